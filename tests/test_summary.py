from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pytest_ep.matrix.cells import Cell
from pytest_ep.matrix.cells import Key
from pytest_ep.matrix.shapes import Shape
from pytest_ep.results.record import JSON
from pytest_ep.results.record import CaseResult
from pytest_ep.results.record import Measurement
from pytest_ep.results.summary import case_line
from pytest_ep.results.summary import summary
from pytest_ep.timing.traffic import Leaving
from pytest_ep.timing.traffic import Traffic

SHAPE = Shape("deepseek_v3", 7168, 256, 8)
LEAVING = Leaving(100_000, 200_000, 300_000)
KEY = Key("torch_a2a", "cpu", 4, "normal", "bf16", "deepseek_v3")


def cell(tokens: int, key: Key = KEY) -> Cell:
    return Cell(key, SHAPE, "uniform", tokens)


def timed(
    tokens: int,
    unit: float = 1e-6,
    link_gbps: float | None = None,
    key: Key = KEY,
    rows: Mapping[str, Mapping[str, JSON]] | None = None,
    **extra: JSON,
) -> CaseResult:
    base = np.array([28.5] * 15 + [31.0]) * unit
    measurement = Measurement(
        clock="host",
        seconds={"dispatch": base, "combine": base * 2, "roundtrip": base * 3},
        spread=dict.fromkeys(("dispatch", "combine", "roundtrip"), base),
        traffic=Traffic(4 * tokens, 5, LEAVING, LEAVING, Leaving(0, 0, 0), 10),
        link_gbps=link_gbps,
        error=0.0,
        bit_exact=1.0,
        reduction="rank-sum-fp32",
        max_tokens=512,
        extra=extra,
        by_component=rows or {},
    )
    return CaseResult.timed(f"case.py::test_case[T{tokens}]", cell(tokens, key), measurement)


def line_of(lines: list[str], start: str) -> str:
    return next(line for line in lines if line.split()[:1] == [start])


def test_a_timed_case_is_a_row_of_medians_percentiles_and_rates() -> None:
    lines = summary([timed(64)])
    assert line_of(lines, "T").split() == (
        [
            "T",
            "dispatch",
            "p99",
            "combine",
            "p99",
            "roundtrip",
            "p99",
            "noise",
            "GB/s",
            "%link",
            "error",
            "exact",
        ]
    )
    assert line_of(lines, "64").split() == (
        ["64", "28.5", "31.0", "57.0", "62.0", "85.5", "93.0", "0.0", "3.5", "-", "0.0e+00", "100"]
    )


def test_a_rate_below_one_is_not_shown_as_nothing() -> None:
    assert line_of(summary([timed(64, unit=1e-4)]), "64").split()[8] == "0.04"


def test_the_share_of_the_link_is_shown_where_its_peak_is_known() -> None:
    assert line_of(summary([timed(64, link_gbps=7.0)]), "64").split()[9] == "50.1"


def test_the_last_line_says_what_the_numbers_are() -> None:
    legend = " ".join(summary([timed(1), timed(2)])[-3:])
    assert "medians of per-iteration maxima over 4 ranks, 16 samples" in legend
    assert "the host's monotonic clock" in legend
    assert "GB/s = bytes leaving the most loaded rank for others / median time" in legend


def test_one_rank_is_not_called_ranks() -> None:
    assert "over 1 rank, 16 samples" in " ".join(summary([timed(1, key=replace(KEY, ep_size=1))]))


def test_each_key_has_a_block_of_rows_in_order_of_tokens() -> None:
    other = replace(KEY, ep_size=8)
    lines = summary([timed(8), timed(16, key=other), timed(1), timed(2, key=other)])
    starts = [line.split()[0] for line in lines if line.split()[:1] and line.split()[0].isdigit()]
    assert starts == ["1", "8", "2", "16"]
    assert [line.strip("- ") for line in lines if line.startswith("-")] == [
        "torch_a2a  cpu EP4  normal bf16  deepseek_v3: hidden 7168, 256 experts, top-8  uniform",
        "torch_a2a  cpu EP8  normal bf16  deepseek_v3: hidden 7168, 256 experts, top-8  uniform",
    ]


@pytest.mark.parametrize("unit", [1e-9, 1e-6, 1e-3, 1.0, 1e6])
def test_columns_stay_apart_and_aligned_whatever_the_magnitude(unit: float) -> None:
    lines = summary([timed(131_072 if unit > 1 else 1, unit)])
    header = next(line for line in lines if "dispatch" in line)
    row = lines[lines.index(header) + 2]
    assert len(row.split()) == 12
    assert len(row) == len(header)
    assert max(len(line) for line in lines) <= 110


def test_a_wrong_result_names_rank_token_and_column_and_says_what_is_wrong() -> None:
    wrong = CaseResult(
        "n",
        cell(4096),
        "failed",
        reason="combine: got 1.5, expected 2.5, error 4.7e-01 " + "x" * 60,
        code="combine",
        rank=2,
        token=17,
        column=40,
    )
    lines = summary([wrong])
    text = " ".join(" ".join(lines).split())
    assert "4096 WRONG rank 2 token 17 column 40: combine: got 1.5, expected 2.5, error 4.7e-01 xxx" in text
    assert max(len(line) for line in lines) <= 110
    assert "medians" not in text


def test_a_failure_that_no_check_found_is_failed_and_not_wrong() -> None:
    text = "\n".join(summary([CaseResult("n", cell(1), "failed", reason="timed out", rank=3)]))
    assert "FAILED  rank 3: timed out" in text
    assert "WRONG" not in text


def test_probes_that_say_the_same_share_a_line() -> None:
    probes = [CaseResult(f"n{n}", cell(0), "failed", reason="not run", probe=f"p{n}") for n in range(3)]
    wrong = CaseResult("w", cell(0), "failed", reason="a row is lost", code="source_set", probe="slots")
    lines = summary([*probes, wrong])
    assert [line for line in lines if "probe" in line] == [
        "3 probes FAILED  not run",
        "probe WRONG  a row is lost",
    ]


def test_a_failure_without_a_word_still_has_its_row() -> None:
    assert any("FAILED" in line for line in summary([CaseResult("n", cell(1), "failed")]))


def test_a_checked_case_says_why_it_has_no_timing() -> None:
    lines = summary([CaseResult("n", cell(8), "checked", reason="not timed: two ranks share a GPU")])
    assert line_of(lines, "8").split(maxsplit=1)[1] == "checked, not timed: two ranks share a GPU"


def test_skips_are_counted_by_reason_the_most_frequent_first() -> None:
    skipped = [
        CaseResult(f"n{n}", cell(0), "skipped", reason=reason, code=code)
        for n, (reason, code) in enumerate(
            [("8 ranks, 4 here", "ranks")] + [("no adapter yet", "no-adapter")] * 2
        )
    ]
    assert summary(skipped) == ["skipped 2: no-adapter: no adapter yet", "skipped 1: ranks: 8 ranks, 4 here"]


def test_a_nearly_exact_share_is_not_rounded_up_to_exact() -> None:
    assert line_of(summary([replace(timed(2), bit_exact=0.9999999)]), "2").split()[-1] == "99.99"


def test_nothing_executed_is_nothing_to_say() -> None:
    assert summary([]) == []


def test_a_case_line_carries_three_medians_and_the_error() -> None:
    assert case_line(timed(1)) == "28.5 57.0 85.5 us err 0.0e+00"


def test_a_case_without_a_timing_adds_nothing_to_its_line() -> None:
    assert case_line(CaseResult("n", cell(1), "failed", reason="timed out")) == ""


def text_of(lines: list[str]) -> str:
    """All lines as one, however they were wrapped."""
    assert max(len(line) for line in lines) <= 110
    return " ".join(" ".join(lines).split())


def skew(**changes: JSON) -> dict[str, JSON]:
    figures: dict[str, JSON] = {"slowest_rank": 0, "slowest_share": 0.5, "fastest_rank": 1}
    return {**figures, "fastest_share": 0.75, "late": 0, "skewed": False, **changes}


def skewed(tokens: int, **changes: JSON) -> CaseResult:
    return timed(tokens, rows={one: skew(**changes) for one in ("dispatch", "combine", "roundtrip")})


def test_a_row_that_missed_its_target_is_marked_and_explained() -> None:
    missed, met = timed(1, target_ci=1.0, target_met=False), timed(8, target_ci=1.0, target_met=True)
    lines = summary([missed, met])
    assert line_of(lines, "1").endswith("100 ~")
    assert line_of(lines, "8").endswith("100")
    assert "~ a median is known less well than the 1 % of --ep-target-ci" in text_of(lines)


def test_without_a_target_no_row_is_marked() -> None:
    lines = summary([timed(1, target_ci=1.0, target_met=None)])
    assert line_of(lines, "1").endswith("100")
    assert "--ep-target-ci" not in text_of(lines)


def test_a_skewed_row_names_the_slowest_rank_and_the_one_that_came_late() -> None:
    lines = summary([skewed(1), skewed(8, skewed=True, slowest_rank=3, slowest_share=0.98)])
    assert line_of(lines, "8").endswith("100 s")
    assert line_of(lines, "1").endswith("100")
    said = "s the ranks differ by half of the median or more: T=8 dispatch (slowest rank 3 in 98 %,"
    assert f"{said} fastest rank 1 in 75 % of iterations)" in text_of(lines)


def test_only_a_few_of_many_skewed_rows_are_named() -> None:
    text = text_of(summary([skewed(1 << power, skewed=True) for power in range(7)]))
    assert "T=8 dispatch" in text
    assert "T=16 dispatch" not in text
    assert "of iterations) and 3 more;" in text


def test_a_throttled_row_says_why_and_how_slow() -> None:
    held: dict[str, Any] = {"throttle_reasons": ["power cap"], "sm_clock_mhz": [1980, 1200]}
    lines = summary([timed(1, throttled=False, throttle_reasons=[]), timed(8, throttled=True, **held)])
    assert line_of(lines, "8").endswith("100 t")
    assert line_of(lines, "1").endswith("100")
    assert "t a GPU was held back: T=8 power cap (1200 MHz)" in text_of(lines)


def test_launch_cost_is_a_range_over_the_cases_that_have_it() -> None:
    def launch(tokens: int, cost: float) -> CaseResult:
        costs = {"dispatch": cost, "combine": cost / 2, "roundtrip": 70.0}
        return timed(tokens, rows={one: {"launch_us": value} for one, value in costs.items()})

    text = text_of(summary([launch(1, 64.0), timed(2), launch(8, 60.0)]))
    said = "launch cost (event less graph, us) over T=1 to 8: dispatch 60.0 to 64.0, combine 30.0 to 32.0,"
    assert f"{said} roundtrip 70.0" in text
    assert "launch cost" not in text_of(summary([timed(1)]))


def test_the_slowest_ranks_are_counted_over_the_cases() -> None:
    cases = [skewed(1, slowest_share=0.9), skewed(8, late=2), skewed(16, slowest_rank=2)]
    said = "slowest in most roundtrips: rank 0 at 2 T (50 to 90 %), rank 2 at 1 T (50 %);"
    assert f"{said} roundtrips of 3 medians or more: 2" in text_of(summary(cases))


def test_one_rank_alone_is_not_the_slowest() -> None:
    alone = timed(1, key=replace(KEY, ep_size=1), rows={"roundtrip": skew()})
    assert "slowest" not in text_of(summary([alone]))


def growing(tokens: int, row_bytes: int = 14336) -> CaseResult:
    """Bytes in proportion to T; 20 us and 1 us more for each token."""
    result = timed(tokens)
    moved: dict[str, JSON] = {"bytes": row_bytes * tokens, "p50_us": 20.0 + tokens}
    return replace(result, rows={name: {**row, **moved} for name, row in result.rows.items()})


def test_latency_and_bandwidth_stand_under_a_block_that_they_explain() -> None:
    said = "latency + bytes / bandwidth (95 % intervals): dispatch 20.0 (20.0 to 20.0) us and 14.3 (14.3 to"
    assert said in text_of(summary([growing(1 << power) for power in range(6)]))
    assert "bandwidth" not in text_of(summary([growing(1 << power) for power in range(3)]))


def test_a_slow_link_is_shown_with_the_digits_that_it_has() -> None:
    slow = [growing(1 << power, row_bytes=143) for power in range(6)]
    assert "us and 0.143 (0.143 to 0.143) GB/s" in text_of(summary(slow))


def test_a_drift_above_5_percent_is_said_and_one_below_is_not() -> None:
    def drifted(ratio: float) -> str:
        ratios = {"dispatch": 1.0, "combine": ratio, "roundtrip": 1.02}
        return text_of(summary([timed(1)], drift={KEY: {"tokens": 1, "ratio": ratios}}))

    assert "multiples of before: dispatch 1.00, combine 1.08, roundtrip 1.02" in drifted(1.08)
    assert "combine 0.90" in drifted(0.90)
    assert "drift" not in drifted(1.04)


def test_kernel_durations_and_a_flushed_cache_are_explained() -> None:
    text = text_of(summary([timed(1, kernel_span_us=9.0, l2_flushed=True)]))
    assert "waiting for peers is inside them" in text
    assert "a roundtrip by graph is then dispatch + combine" in text
    assert "waiting" not in text_of(summary([timed(1)]))
