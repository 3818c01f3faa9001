"""A wrong transport fails exactly the checks that its fault breaks, on real ranks, at small and large T."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_ep.oracle.checks import COMBINE_REL_TOL
from tests.faults import transports
from tests.launching import Torchrun

SMALL, DEEPSEEK = "h128e256k8", "deepseek_v3"
HIDDEN = {SMALL: 128, DEEPSEEK: 7168}
CELLS = {
    2: [(SMALL, 1), (SMALL, 8), (SMALL, 512)],
    4: [(SMALL, 1), (SMALL, 8), (SMALL, 512), (DEEPSEEK, 1)],
    8: [(SMALL, 1), (SMALL, 8), (SMALL, 512)],
}
CLOCK_CELL = (SMALL, 8)
AT_EIGHT = (
    *("torch_a2a", "stepped", "exactly_stepped", "slot_tree", "two_level", "gated", "dropped"),
    *("doubled", "swapped"),
)
"""Of eight ranks, which take long: what more contributors can change. The rest is not run there."""
ITERATIONS = 3

REDUCTIONS = {"slot_tree", "two_level"}
"""Two contributors cannot tell these from the sum."""

CHECKS = {
    "slot_tree": {"combine_values"},
    "two_level": {"combine_values"},
    "gated": {"combine_values"},
    "dropped": {"source_set", "counts", "combine_values"},
    "doubled": {"source_set", "counts", "combine_values"},
    # Wrong metadata also makes the wrong messages, by design; so does a wrong weight.
    "swapped": {"metadata", "weights", "combine_values"},
    "unmasked": {"metadata", "multiplicity", "combine_values"},
    "miscounted": {"counts"},
    "weighted": {"weights", "combine_values"},
    "not_a_number": {"combine_values"},
    "misshapen": {"combine_values"},
    "overwriting": {"inputs"},
    "stale": {"combine_values"},
    "worn": {"combine_values"},
    "exactly_stepped": {"bit_exact"},
}
CLOCKS = {
    "clock_zero": "combine: rank 1: sample 1 of 3 is 0.0 s, which is no duration (1 such)",
    "clock_backwards": "combine: rank 1: sample 1 of 3 is -0.001 s, which is no duration (1 such)",
    "clock_nan": "combine: rank 1: sample 1 of 3 is nan s, which is no duration (1 such)",
    "clock_infinite": "combine: rank 1: sample 1 of 3 is inf s, which is no duration (1 such)",
    "clock_forgetful": "roundtrip: rank 1 has 2 samples where rank 0 has 3",
}

every_fault = pytest.mark.parametrize("outcome", [2, 4], indirect=True, ids=["ep2", "ep4"])
"""What AT_EIGHT leaves out."""

Case = tuple[str, str, int]
"""Backend, model, tokens per rank."""


@dataclass(frozen=True)
class Outcome:
    """What one launch said.

    Rows of the result file by component, failures' checks and reasons, the table's failures, all of its text.
    """

    ep_size: int
    timed: dict[Case, dict[str, dict[str, Any]]]
    checks: dict[Case, str]
    failed: dict[Case, str]
    table: dict[Case, str]
    printed: str


@pytest.fixture(scope="module", params=list(CELLS), ids=lambda size: f"ep{size}")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    ep_size: int = request.param
    folder = tmp_path_factory.mktemp(f"ep{ep_size}")
    shutil.copy(transports.__file__, folder / "test_faulty.py")
    small = " or ".join(f"{model} and T{tokens:05d}" for model, tokens in CELLS[ep_size])
    chosen = " or ".join(AT_EIGHT) if ep_size == 8 else "bf16"
    result = Torchrun(folder)(
        ep_size,
        "-p",
        "cacheprovider",  # for the routing: every transport here asks for the same
        f"--override-ini=cache_dir={tmp_path_factory.getbasetemp() / 'cache'}",
        "-q",
        "--tb=no",
        "-rN",
        f"--ep-size={ep_size}",
        f"--ep-tokens={','.join(str(tokens) for tokens in sorted({tokens for _, tokens in CELLS[ep_size]}))}",
        f"--ep-iterations={ITERATIONS}",
        "--ep-shape=hidden=128,experts=256,top_k=8",
        f"--ep-model={DEEPSEEK}",
        "--ep-precision=bf16",
        "-k",
        f"test_case and ({small}) and (not clock or {CLOCK_CELL[0]} and T{CLOCK_CELL[1]:05d}) and ({chosen})",
        "--benchmark-json=results.json",
    )
    assert result.ret == 1, result.stderr.str()
    results = json.loads((folder / "results.json").read_text())
    timed: dict[Case, dict[str, dict[str, Any]]] = {}
    for row in results["benchmarks"]:
        params = row["params"]
        case = (params["backend"], params["model"], params["tokens"])
        timed.setdefault(case, {})[params["component"]] = row["extra_info"]
    failures = {_case(entry["case"]): entry for entry in results["pytest_ep"]["failed"]}
    checks = {case: entry["code"] for case, entry in failures.items()}
    failed = {case: entry["reason"] for case, entry in failures.items()}
    return Outcome(ep_size, timed, checks, failed, _table(result.outlines), result.stdout.str())


def _case(nodeid: str) -> Case:
    found = re.search(r"::(\w+)::test_case\[cpu-ep\d\d-normal-bf16-(\w+)-uniform-T(\d{5})\]", nodeid)
    assert found, nodeid
    backend = getattr(transports, found[1]).backend
    return getattr(backend, "name", backend), found[2], int(found[3])


def _table(lines: list[str]) -> dict[Case, str]:
    rows: dict[Case, str] = {}
    case: Case | None = None
    backend = model = ""
    for line in lines:
        if title := re.match(r"-+ (\w+)  cpu EP\d+  normal bf16  (\w+): hidden", line):
            backend, model = title[1], title[2]
        elif row := re.match(r" +(\d+)  ((?:WRONG|FAILED)  .*)", line):
            case = (backend, model, int(row[1]))
            rows[case] = row[2]
        elif case and line.startswith(" " * 8):
            rows[case] += f" {line.strip()}"
        else:
            case = None
    return {case: re.sub(r"\s+", " ", row) for case, row in rows.items()}


def test_the_right_transport_passes_beside_the_wrong_ones(outcome: Outcome) -> None:
    for model, tokens in CELLS[outcome.ep_size]:
        rows = outcome.timed["torch_a2a", model, tokens]
        assert set(rows) == {"dispatch", "combine", "roundtrip"}
        assert all((row["error"], row["bit_exact"]) == (0.0, 1.0) for row in rows.values())


def test_copies_are_those_published_for_this_routing(outcome: Outcome) -> None:
    published = {1: 45, 8: 336, 512: 21640}
    if outcome.ep_size == 8:
        for model, tokens in CELLS[outcome.ep_size]:
            rows = outcome.timed["torch_a2a", model, tokens]
            assert {row["copies"] for row in rows.values()} == {published[tokens]}


@pytest.mark.parametrize("fault", CHECKS)
@every_fault
def test_a_fault_fails_exactly_its_checks(outcome: Outcome, fault: str) -> None:
    fails_exactly_its_checks(outcome, fault)


def fails_exactly_its_checks(outcome: Outcome, fault: str) -> None:
    for model, tokens in CELLS[outcome.ep_size]:
        case = (fault, model, tokens)
        if outcome.ep_size == 2 and fault in REDUCTIONS:
            rows = outcome.timed[case]
            assert all((row["error"], row["bit_exact"]) == (0.0, 1.0) for row in rows.values())
            continue
        found = set(outcome.checks[case].split(","))
        if fault == "swapped":  # the two tokens may or may not have as many experts on that rank
            found -= {"multiplicity"}
        assert found == CHECKS[fault], outcome.table[case]
        assert re.match(rf"WRONG rank \d.*?: {outcome.checks[case]}: ", outcome.table[case])


@pytest.mark.parametrize("fault", [fault for fault in CHECKS if fault in AT_EIGHT])
@pytest.mark.parametrize("outcome", [8], indirect=True, ids=["ep8"])
def test_so_it_does_among_eight(outcome: Outcome, fault: str) -> None:
    fails_exactly_its_checks(outcome, fault)


def test_every_case_either_left_rows_or_is_a_failure_of_the_table_and_of_the_file(outcome: Outcome) -> None:
    cells = {
        (fault, model, tokens)
        for fault in (AT_EIGHT if outcome.ep_size == 8 else ("torch_a2a", "stepped", *CHECKS))
        for model, tokens in CELLS[outcome.ep_size]
    }
    if outcome.ep_size < 8:
        cells |= {(fault, *CLOCK_CELL) for fault in (*CLOCKS, "clock_late")}
    assert set(outcome.timed) | set(outcome.failed) == cells
    assert not set(outcome.timed) & set(outcome.failed)
    assert set(outcome.table) == set(outcome.failed)
    for case, reason in outcome.failed.items():
        assert outcome.table[case].endswith(" ".join(reason.split()))


def test_one_bf16_step_on_one_message_lowers_the_bit_exact_share_by_one_element(outcome: Outcome) -> None:
    for model, tokens in CELLS[outcome.ep_size]:
        rows = outcome.timed["stepped", model, tokens]
        assert len(rows) == 3
        for row in rows.values():
            assert row["bit_exact"] == 1.0 - 1 / (tokens * HIDDEN[model])
            assert 0 < row["error"] <= 2**-7 < COMBINE_REL_TOL


@every_fault
def test_the_wrong_element_is_named_by_rank_token_and_column(outcome: Outcome) -> None:
    for model, tokens in CELLS[outcome.ep_size]:
        token, column = 2 * tokens - 1, transports.NAN_COLUMN
        row = outcome.table["not_a_number", model, tokens]
        assert row.startswith(f"WRONG rank 1 token {token} column {column}: combine_values: ")
        assert f"error inf at token {token} column {column}: got nan" in row
        row = outcome.table["exactly_stepped", model, tokens]
        assert row.startswith(f"WRONG rank 1 token {tokens} column ")


@every_fault
def test_a_wrong_count_is_named_by_expert(outcome: Outcome) -> None:
    owned = 256 // outcome.ep_size
    said = rf"counts: 1 of {owned} experts differ, first: expert {owned} got (\d+), expected (\d+) \(rank 1\)"
    for model, tokens in CELLS[outcome.ep_size]:
        counts = re.fullmatch(said, outcome.failed["miscounted", model, tokens])
        assert counts
        assert int(counts[1]) == int(counts[2]) + 1


@every_fault
def test_a_misshapen_output_is_described(outcome: Outcome) -> None:
    for model, tokens in CELLS[outcome.ep_size]:
        hidden = HIDDEN[model]
        said = f"combined bfloat16 [{tokens}, {hidden - 1}], expected bfloat16 [{tokens}, {hidden}]"
        assert said in outcome.failed["misshapen", model, tokens]


@every_fault
def test_the_last_timed_output_and_the_oracle_after_timing_are_checked(outcome: Outcome) -> None:
    for model, tokens in CELLS[outcome.ep_size]:
        assert outcome.failed["stale", model, tokens].startswith("last timed output: combine_values: ")
        assert outcome.failed["worn", model, tokens].startswith("combine_values: ")


@pytest.mark.parametrize("clock", CLOCKS)
@every_fault
def test_samples_that_are_no_measurement_fail_the_case_and_name_the_rank(
    outcome: Outcome, clock: str
) -> None:
    case = (clock, *CLOCK_CELL)
    assert (outcome.checks[case], outcome.failed[case]) == ("", CLOCKS[clock])
    assert outcome.table[case] == f"FAILED {CLOCKS[clock]}"


@every_fault
def test_a_rank_that_comes_late_is_flagged_as_the_one_that_waits_least(outcome: Outcome) -> None:
    late = transports.LATE_SECONDS * 1e6
    case = ("clock_late", *CLOCK_CELL)
    for row in outcome.timed[case].values():
        assert row["skewed"] is True
        assert row["fastest_rank"] == transports.CULPRIT
        assert row["slowest_rank"] != transports.CULPRIT
        assert row["spread_us"] > 0.5 * late
        ranks = row["rank_p50_us"]
        assert ranks[transports.CULPRIT] == min(ranks)
        assert min(ranks[: transports.CULPRIT] + ranks[transports.CULPRIT + 1 :]) > 0.5 * late
    block = outcome.printed.partition(" clock_late  cpu ")[2].partition("\n\n")[0]
    assert re.search(r"^ +8 .* 100 .*s$", block, re.MULTILINE)
    said = "s the ranks differ by half of the median or more: T=8 "
    assert said in block
    assert f"fastest rank {transports.CULPRIT} in 100 %" in " ".join(block.split())
