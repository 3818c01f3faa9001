"""A transport whose steps take known times: what is recorded of it, and what is beside the rows."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults import timed
from tests.launching import python

EXPECTED_US = {"dispatch": 1000, "combine": 3000, "roundtrip": 4000}
PAUSE_US = 20_000


@dataclass(frozen=True)
class Launch:
    """One run of three cases of each transport."""

    folder: Path
    printed: str

    @property
    def file(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "results.json").read_text())
        return content

    def rows(self, backend: str, component: str) -> list[dict[str, Any]]:
        return [
            row
            for row in self.file["benchmarks"]
            if (row["params"]["backend"], row["params"]["component"]) == (backend, component)
        ]


def letters(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", text)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    folder = tmp_path_factory.mktemp("known")
    shutil.copy(timed.__file__, folder / "test_timed.py")
    result = python(
        folder,
        *("-m", "pytest", "-p", "no:cacheprovider", "-q", "-k", "test_case", "--ep-size=1"),
        *("--ep-shape=hidden=512,experts=16,top_k=4", "--ep-tokens=1,4,8", "--ep-precision=bf16"),
        *("--ep-iterations=16", f"--ep-idle={PAUSE_US // 1000}ms", "--ep-profile=traces"),
        "--benchmark-json=results.json",
    )
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["failed"]) == (8, 1), f"{result.stdout}{result.stderr}"
    return Launch(folder, result.stdout.str())


@pytest.mark.parametrize("component", EXPECTED_US)
def test_each_component_takes_as_long_as_its_step_and_staging_is_in_none(
    launch: Launch, component: str
) -> None:
    rows = launch.rows("sleeping", component)
    assert len(rows) == 3
    for row in rows:
        assert row["extra_info"]["p50_us"] == pytest.approx(EXPECTED_US[component], rel=0.2)
        assert row["stats"]["median"] == pytest.approx(EXPECTED_US[component] / 1e6, rel=0.2)


def test_metadata_that_the_transport_tells_apart_is_beside_dispatch_alone(launch: Launch) -> None:
    for component in EXPECTED_US:
        for row in launch.rows("sleeping", component):
            if component == "dispatch":
                assert row["extra_info"]["metadata_us"] == pytest.approx(500, rel=0.3)
            else:
                assert "metadata_us" not in row["extra_info"]


def test_tokens_per_second_are_those_of_the_roundtrip(launch: Launch) -> None:
    for component in EXPECTED_US:
        for row in launch.rows("sleeping", component):
            assert row["extra_info"]["tokens_per_s"] == pytest.approx(row["params"]["tokens"] / 4e-3, rel=0.2)


def test_the_pair_after_a_pause_is_beside_the_steady_one_and_without_the_pause(launch: Launch) -> None:
    for row in launch.rows("sleeping", "roundtrip"):
        for name in ("idle_steady_us", f"idle_{PAUSE_US // 1000}ms_us"):
            assert row["extra_info"][name] == pytest.approx(4000, rel=0.5)
            assert row["extra_info"][name] < PAUSE_US
    assert not any("idle_steady_us" in row["extra_info"] for row in launch.rows("sleeping", "dispatch"))


def test_every_case_leaves_a_trace_with_its_two_ranges(launch: Launch) -> None:
    cases = {row["fullname"].rpartition("-")[0] + "]" for row in launch.file["benchmarks"]}
    paths = {letters(path.name): path for path in (launch.folder / "traces").iterdir()}
    assert len(cases) == len(paths) == 8
    for case in cases:
        path = paths[letters(f"{case}.rank0.json")]
        spans = {
            event["name"]: event["dur"]
            for event in json.loads(path.read_text())["traceEvents"]
            if "::test_case[" in event.get("name", "") and "dur" in event
        }
        assert set(spans) == {f"{case} dispatch", f"{case} combine"}
        assert spans[f"{case} dispatch"] >= 1000
        assert spans[f"{case} combine"] >= 3000


def test_the_first_case_is_timed_again_after_the_last(launch: Launch) -> None:
    drift = {entry["backend"]: entry for entry in launch.file["pytest_ep"]["drift"]}
    tired = drift["tiring"]
    assert (tired["tokens"], tired["clock"]) == (timed.FIRST, "host")
    assert f"T{timed.FIRST:05d}" in tired["case"]
    assert tired["ratio"]["dispatch"] == pytest.approx(2.0, rel=0.2)
    assert tired["ratio"]["combine"] == pytest.approx(1.0, rel=0.2)
    assert drift["sleeping"]["ratio"]["roundtrip"] == pytest.approx(1.0, rel=0.2)
    assert "drift: T=1 after the last case took, as multiples of before: dispatch " in launch.printed


def test_after_a_failure_nothing_is_timed_again(launch: Launch) -> None:
    assert [row["params"]["tokens"] for row in launch.rows("breaking", "dispatch")] == [1, 8]
    assert {entry["backend"] for entry in launch.file["pytest_ep"]["drift"]} == {"sleeping", "tiring"}
