"""A suite on two real ranks: its rows, its transports' lives, and what one rank's fault leaves behind."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults import lifecycle
from tests.launching import Torchrun
from tests.launching import python

SMALL = "h64e16k4"
SHAPE = "--ep-shape=hidden=64,experts=16,top_k=4"

REPORTS = """
import itertools
import os
import types
import pytest
from pytest_ep import sampled

rank = int(os.environ.get("RANK", "0"))
ticks = itertools.count(step=1e9 if rank == 0 else 0)

def pytest_runtest_logreport(report):
    why = report.longrepr[2] if report.skipped else ""
    with open(f"reports-{rank}.txt", "a") as file:
        print(report.when, report.outcome, report.nodeid, why, file=file)

# Left to themselves rank 0 would take the fewest iterations, as its time is used up, and rank 1 the most.
sampled.time = types.SimpleNamespace(monotonic=lambda: float(next(ticks)))
"""
"""A conftest.py that keeps each rank's own reports."""
MIXED = """
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    items[:] = items[1::2] + items[0::2][::-1]
"""


@dataclass(frozen=True)
class Launch:
    """What one launch left behind."""

    folder: Path
    result: pytest.RunResult

    @property
    def file(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "results.json").read_text())
        return content

    def rows(self, **params: object) -> list[dict[str, Any]]:
        return [row for row in self.file["benchmarks"] if params.items() <= row["params"].items()]

    def reports(self, rank: int) -> list[str]:
        return (self.folder / f"reports-{rank}.txt").read_text().splitlines()

    def lives(self, rank: int, backend: str) -> list[str]:
        lines = (self.folder / f"lives-{rank}.txt").read_text().splitlines()
        return [line for line in lines if line.split()[1] == backend]

    def failed(self, backend: str, tokens: int) -> str:
        found: list[str] = [
            entry["reason"]
            for entry in self.file["pytest_ep"]["failed"]
            if suite(backend) in entry["case"] and f"T{tokens:05d}" in entry["case"]
        ]
        assert len(found) == 1, found
        return found[0]


def suite(backend: str) -> str:
    return "::Test" + "".join(part.capitalize() for part in backend.split("_")) + "::"


def prepared(tmp_path_factory: pytest.TempPathFactory, name: str, more: str = "") -> Path:
    folder = tmp_path_factory.mktemp(name)
    shutil.copy(lifecycle.__file__, folder / "test_lives.py")
    (folder / "conftest.py").write_text(REPORTS + more)
    return folder


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """A third party's backend alone, probes and cases, in two suites and two models, shuffled."""
    folder = prepared(tmp_path_factory, "measured", MIXED)
    result = Torchrun(folder)(
        2,
        SHAPE,
        "--ep-model=deepseek_v3",
        "--ep-tokens=1,4,8",
        "--ep-precision=bf16",
        "-k",
        "logging and not (deepseek_v3 and T00008)",
        "-v",
        "--benchmark-json=results.json",
        "--benchmark-min-rounds=3",
        "--benchmark-max-time=0.001",
        "--benchmark-warmup=on",
        "--benchmark-calibration-precision=1",
        "--ep-target-ci=0.000001",
    )
    assert result.ret == 0, f"{result.stdout}{result.stderr}"
    return Launch(folder, result)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """One case with more iterations than a row keeps samples."""
    folder = prepared(tmp_path_factory, "long")
    result = Torchrun(folder)(
        2,
        SHAPE,
        "--ep-tokens=1",
        "--ep-precision=bf16",
        "--ep-iterations=600",
        "-k",
        "TestFirst and test_case",
        "--benchmark-json=results.json",
    )
    assert result.ret == 0, f"{result.stdout}{result.stderr}"
    return Launch(folder, result)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Every way in which one rank can refuse or break, then a right transport."""
    folder = prepared(tmp_path_factory, "broken")
    result = Torchrun(folder)(
        2,
        SHAPE,
        "--ep-tokens=1,8",
        "--ep-size=2",
        "--ep-precision=bf16",
        "-k",
        "test_case and (refuses or breaks or torch_a2a)",
        "--benchmark-json=results.json",
    )
    assert result.ret == 1, f"{result.stdout}{result.stderr}"
    return Launch(folder, result)


def test_a_case_leaves_three_rows_with_scalar_parameters_and_a_group_each(measured: Launch) -> None:
    assert len(measured.rows()) == 3 * 2 * (3 + 2)
    for component in ("dispatch", "combine", "roundtrip"):
        first, second = measured.rows(component=component, model=SMALL, tokens=4)
        assert first["name"] == f"test_case[cpu-ep02-normal-bf16-{SMALL}-uniform-T00004-{component}]"
        assert {row["fullname"] for row in (first, second)} == {
            f"test_lives.py::{name}::{first['name']}" for name in ("TestFirst", "TestSecond")
        }
        assert first["group"] == f"logging cpu ep02 normal bf16 {SMALL} uniform host {component}"
        assert first["params"] == {
            "backend": "logging",
            "sku": "cpu",
            "ep_size": 2,
            "mode": "normal",
            "precision": "bf16",
            "model": SMALL,
            "routing": "uniform",
            "tokens": 4,
            "component": component,
        }


def test_the_keys_of_extra_info_are_fixed(measured: Launch) -> None:
    for row in measured.rows():
        info = row["extra_info"]
        own = {"roundtrip": {"overlap_lost_us"}, "dispatch": {"metadata_us"}}
        assert set(info) == own.get(row["params"]["component"], set()) | {
            *("clock", "samples", "p50_us", "p90_us", "p99_us", "noise", "spread_us", "copies", "bytes"),
            *("scale_up_bytes", "scale_out_bytes", "metadata_bytes", "gbps", "link_share", "tokens_per_s"),
            *("error", "bit_exact", "reduction", "max_tokens"),
            *("target_ci", "target_met", "timing_s", "warmup_pairs"),
            *("rank_p50_us", "slowest_rank", "slowest_share", "fastest_rank", "fastest_share"),
            *("late", "skewed"),
            *("expert_load_max_over_mean", "expert_load_cv", "empty_experts", "rank_load_max_over_mean"),
            *("fan_out_mean", "fan_out_max", "local_fraction"),
        }
        assert (info["clock"], info["reduction"], info["link_share"]) == ("host", "rank-sum-fp32", None)
        assert (info["error"], info["bit_exact"]) == (0.0, 1.0)
        assert 0 < info["p50_us"] <= info["p90_us"] <= info["p99_us"]
        assert info["p50_us"] == pytest.approx(1e6 * row["stats"]["median"])
        if "metadata_us" in info:
            assert 0 < info["metadata_us"] < info["p50_us"], "dispatch has it inside"
        assert info["gbps"] == pytest.approx(info["bytes"] / info["p50_us"] / 1e3)


def test_rank_0_chooses_the_iterations_and_pytest_benchmark_does_not(measured: Launch) -> None:
    for row in measured.rows():
        assert (row["extra_info"]["samples"], row["extra_info"]["target_met"]) == (16, False)
        assert (row["stats"]["rounds"], row["stats"]["iterations"]) == (16, 1)
        assert len(row["stats"]["data"]) == 16
        assert row["options"]["timer"] == "replayed"


def test_a_row_keeps_at_most_512_of_its_samples(long: Launch) -> None:
    assert len(long.rows()) == 3
    for row in long.rows():
        assert row["extra_info"]["samples"] == 600
        assert row["stats"]["rounds"] == len(row["stats"]["data"]) == 512


def test_the_file_lists_what_was_skipped_and_why(measured: Launch) -> None:
    section = measured.file["pytest_ep"]
    assert section["schema"] == 1
    assert (section["failed"], section["checked"]) == ([], [])
    skipped = {entry["case"]: entry for entry in section["skipped"]}
    other = skipped[f"test_lives.py::TestFirst::test_case[cpu-ep04-normal-bf16-{SMALL}-uniform-Tany]"]
    assert other["code"] == "ep-size"
    assert "needs 4 ranks, launched with 2" in other["reason"]


def test_a_verbose_line_carries_the_three_medians(measured: Launch) -> None:
    case = re.escape(f"TestFirst::test_case[cpu-ep02-normal-bf16-{SMALL}-uniform-T00004]")
    lines = [line for line in measured.result.outlines if re.search(case, line)]
    medians = [
        measured.rows(component=component, model=SMALL, tokens=4)
        for component in ("dispatch", "combine", "roundtrip")
    ]
    first = [
        next(row for row in rows if "TestFirst" in row["fullname"])["extra_info"]["p50_us"]
        for rows in medians
    ]
    assert lines
    assert " ".join(f"{median:.1f}" for median in first) in lines[0]


def test_a_backend_that_nobody_registered_runs_and_is_selected_by_its_name(measured: Launch) -> None:
    assert {row["params"]["backend"] for row in measured.rows()} == {"logging"}
    assert not any("TestBaseline" in line or "Breaks" in line for line in measured.reports(0))


def test_a_key_has_one_transport_sized_for_its_largest_selected_case(measured: Launch) -> None:
    order = [line.rstrip() for line in measured.reports(0) if line.startswith("call passed")]
    assert any("::test_probe[" in line for line in order)
    order = [line for line in order if "::test_case[" in line]
    suites = [line.split("::")[1] for line in order]
    tokens = [line[-6:-1] for line in order]
    assert tokens != sorted(tokens), "the cases were not mixed"
    assert suites != sorted(suites), "the suites were not mixed"
    for rank in (0, 1):
        lives = measured.lives(rank, "logging")
        assert sorted(lives) == [
            "close logging deepseek_v3 4",
            f"close logging {SMALL} 8",
            "construct logging deepseek_v3 4",
            f"construct logging {SMALL} 8",
        ]
        assert [life.split()[0] for life in lives] == ["construct", "close"] * 2
    assert {row["extra_info"]["max_tokens"] for row in measured.rows(model=SMALL)} == {8}
    assert {row["extra_info"]["max_tokens"] for row in measured.rows(model="deepseek_v3")} == {4}


def test_stock_compare_shows_the_three_components_of_every_case(measured: Launch, long: Launch) -> None:
    files = [str(launch.folder / "results.json") for launch in (measured, long)]
    compared = python(Path(__file__).parents[1], "-m", "pytest_benchmark", "compare", *files)
    assert compared.ret == 0, compared.stderr.str()
    shown = "\n".join((*compared.outlines, *compared.errlines))
    for row in measured.rows():
        assert row["name"] in shown
        assert f"benchmark '{row['group']}'" in shown
    for row in long.rows():
        table = shown.partition(f"benchmark '{row['group']}'")[2].partition("benchmark '")[0]
        assert table.count(row["name"]) == 3, "two suites of the first file, one of the second"


def test_disabled_benchmarks_check_and_record_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = prepared(tmp_path_factory, "disabled")
    result = python(
        folder,
        *("-m", "pytest", "-p", "no:cacheprovider", SHAPE, "--ep-tokens=1,8", "--ep-size=1"),
        *("-k", "TestFirst and test_case and bf16", "--benchmark-disable", "--benchmark-json=results.json"),
    )
    assert result.ret == 0
    assert result.parseoutcomes()["passed"] == 2
    launch = Launch(folder, result)
    assert launch.rows() == []
    section = launch.file["pytest_ep"]
    assert (section["failed"], section["skipped"]) == ([], [])
    assert [entry["reason"] for entry in section["checked"]] == ["not timed: --benchmark-disable"] * 2
    result.stdout.fnmatch_lines(["     1  checked, not timed: *--benchmark-disable"])


def test_all_ranks_report_the_same_for_every_case(broken: Launch) -> None:
    assert broken.reports(0) == broken.reports(1)
    assert len(broken.reports(0)) >= 2 * 2 * 8


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("refuses_everywhere", r"no fabric on rank [01]: grant it"),
        ("refuses_on_one", r"no fabric here: grant it"),
    ],
)
def test_a_refusal_is_the_same_skip_on_every_rank(broken: Launch, backend: str, reason: str) -> None:
    skipped = [one for one in broken.file["pytest_ep"]["skipped"] if suite(backend) in one["case"]]
    assert [one["code"] for one in skipped] == ["no-fabric"] * 2
    assert re.fullmatch(reason, skipped[0]["reason"])
    assert skipped[1]["reason"] == skipped[0]["reason"]
    for rank in (0, 1):
        setups = [line for line in broken.reports(rank) if suite(backend) in line and "setup" in line]
        assert len(setups) == 2
        assert all(line.startswith("setup skipped ") for line in setups)
        assert all(line.endswith(f"no-fabric: {skipped[0]['reason']}") for line in setups)


def test_a_transport_that_only_another_rank_refused_is_closed(broken: Launch) -> None:
    assert broken.lives(0, "refuses_on_one") == [
        f"construct refuses_on_one {SMALL} 8",
        f"close refuses_on_one {SMALL} 8",
    ]
    assert broken.lives(1, "refuses_on_one") == []


def test_nothing_executed_exits_with_5_and_shows_the_reasons(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = prepared(tmp_path_factory, "refused")
    result = python(
        folder,
        *("-m", "pytest", "-p", "no:cacheprovider", SHAPE, "--ep-tokens=1,8", "--ep-size=2"),
        *("--ep-precision=bf16", "-k", "test_case and refuses", "--ep-nproc=2"),
    )
    assert result.ret == 5
    assert "passed" not in result.parseoutcomes()
    result.stdout.fnmatch_lines(
        [
            "skipped 2: no-fabric: no fabric*grant it",
            "skipped 2: no-fabric: no fabric*grant it",
            "ep: no case was executed: exit code 5 (--ep-allow-skips to accept that)",
        ]
    )


def test_a_construction_that_fails_on_one_rank_fails_the_key_everywhere(broken: Launch) -> None:
    first, second = (broken.failed("breaks_in_construction", tokens) for tokens in (1, 8))
    assert first.startswith("rank 1 failed in construction: ") != second.startswith(
        "rank 1 failed in construction: "
    )
    told, not_run = sorted((first, second), key=lambda reason: reason.startswith("not run"))
    assert told.endswith("RuntimeError: broke in construction")
    assert not_run.startswith("not run: no transport since test_lives.py::TestBreaksInConstruction::")


@pytest.mark.parametrize(
    ("backend", "phase"),
    [
        ("breaks_in_dispatch", "oracle before timing"),
        ("breaks_in_combine", "oracle before timing"),
        ("breaks_in_timing", "timing"),
    ],
)
def test_a_case_after_one_that_broke_on_one_rank_passes(broken: Launch, backend: str, phase: str) -> None:
    reason = broken.failed(backend, 1)
    assert reason.startswith(f"rank 1 failed in {phase}: ")
    assert reason.endswith(f"RuntimeError: broke in {backend.removeprefix('breaks_in_')}")
    assert len(broken.rows(backend=backend, tokens=8)) == 3
    assert broken.rows(backend=backend, tokens=1) == []
    for rank in (0, 1):
        lives = broken.lives(rank, backend)
        assert lives == [f"{event} {backend} {SMALL} 8" for event in ("construct", "close") * 2]


def test_what_breaks_between_dispatch_and_combine_is_a_verdict_and_the_transport_lives_on(
    broken: Launch,
) -> None:
    said = "receive: RuntimeError: broke in receive (rank 1)"
    assert broken.failed("breaks_in_receive", 1).startswith(said)
    assert len(broken.rows(backend="breaks_in_receive", tokens=8)) == 3
    assert [life.split()[0] for life in broken.lives(1, "breaks_in_receive")] == ["construct", "close"]


def test_the_right_transport_after_all_that_is_measured(broken: Launch) -> None:
    assert len(broken.rows(backend="torch_a2a")) == 6
