"""Rare corruption, outputs that are not always the same bits, and results that only look written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Torchrun

SUITES = '''
import torch
from pytest_ep import EPSuite
from pytest_ep.backends.torch_a2a import TorchA2A


class Right(TorchA2A):
    name = "right"


class Rare(TorchA2A):
    """Wrong at its every fifth combine on rank 1; the oracle's first is one, so repetitions are the rest."""

    name = "rare"
    calls = -1

    def combine(self, problem, handle, staged):
        combined = super().combine(problem, handle, staged)
        self.calls += 1
        if problem.rank == 1 and self.calls and self.calls % 5 == 0:
            combined[-1, -1] += 8
        return combined


class Restless(TorchA2A):
    """Right, but the sign of its zeros comes and goes."""

    name = "restless"
    sign = 1.0

    def combine(self, problem, handle, staged):
        self.sign = -self.sign
        combined = super().combine(problem, handle, staged)
        return torch.where(combined == 0, torch.full_like(combined, 0.0 * self.sign), combined)


class Lazy(TorchA2A):
    """Never writes the last row again: it only stays right while nobody touches the buffer."""

    name = "lazy"
    kept = None

    def combine(self, problem, handle, staged):
        combined = super().combine(problem, handle, staged)
        if self.kept is None or self.kept.shape != combined.shape:
            self.kept = combined.clone()
        self.kept[:-1] = combined[:-1]
        return self.kept

    def poison(self, problem):
        if self.kept is not None:
            self.kept.fill_(float("nan"))
        return super().poison(problem)


class TestRight(EPSuite):
    backend = Right


class TestRare(EPSuite):
    backend = Rare


class TestRestless(EPSuite):
    backend = Restless


class TestLazy(EPSuite):
    backend = Lazy
'''
ARGUMENTS = ("-q", "--ep-size=2", "--ep-tokens=8", "--ep-shape=hidden=128,experts=16,top_k=4", "-k=bf16")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def run(*arguments: str) -> tuple[pytest.RunResult, dict[str, Any]]:
        folder: Path = tmp_path_factory.mktemp("repeat")
        (folder / "test_repeated.py").write_text(SUITES)
        result = Torchrun(folder)(2, *ARGUMENTS, "--benchmark-json=out.json", *arguments)
        return result, json.loads((folder / "out.json").read_text())

    return run


@pytest.fixture(scope="module")
def repeated(run: Any) -> dict[str, Any]:
    """Oracles repeated without timing, so that a transport's calls are the oracle's alone."""
    result: dict[str, Any] = run("--ep-repeat=12", "--benchmark-disable", "-k=test_case and bf16")[1]
    return result


def section(result: dict[str, Any], name: str, backend: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = result["pytest_ep"][name]
    return [case for case in cases if f"Test{backend}::" in case["case"]]


def test_rare_corruption_is_k_of_n_with_the_repetitions(repeated: dict[str, Any]) -> None:
    (failed,) = section(repeated, "failed", "Rare")

    assert failed["reason"].startswith("2 of 12 repetitions wrong (5, 10); the 5. was: ")
    assert failed["code"] == "combine_values"


def test_repetitions_say_whether_outputs_were_bit_identical(repeated: dict[str, Any]) -> None:
    (right,) = section(repeated, "checked", "Right")
    (restless,) = section(repeated, "checked", "Restless")

    assert right["reason"] == "not timed: --benchmark-disable; 12 repetitions, identical: True"
    assert restless["reason"] == "not timed: --benchmark-disable; 12 repetitions, identical: False"


def test_a_row_that_is_not_written_is_seen_under_poison_only(run: Any, repeated: dict[str, Any]) -> None:
    assert section(repeated, "checked", "Lazy"), "unpoisoned, what was written once is still right"

    _, poisoned = run(
        "--ep-poison", "--ep-repeat=2", "--ep-iterations=6", "-k=test_case and not rare and bf16"
    )

    (lazy,) = section(poisoned, "failed", "Lazy")
    assert "combine_values" in lazy["code"]
    assert not section(poisoned, "failed", "Right")
    right = next(row for row in poisoned["benchmarks"] if "TestRight::" in row["fullname"])
    assert right["extra_info"]["repeats"] == 2
    assert right["extra_info"]["repeats_identical"] is True
