"""Runs of the faulty suite, and what they leave."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.launching import Torchrun

ROOT = Path(__file__).parents[2]
RANK_TIMEOUT = 6
MODULE = """
from tests.faults.fate import *

class TestFaulty(FaultySuite):
    pass
"""
SHAPE = "hidden=64,experts=16,top_k=4"
EVERY_T = [1, 2, 4, 8, 16]


class Outcome:
    """What a faulty run left."""

    def __init__(self, folder: Path, result: pytest.RunResult) -> None:
        self.said = "\n".join(result.outlines)
        self.stderr = "\n".join(result.errlines)
        self.code = result.ret
        self.seconds = result.duration
        path = folder / "out.json"
        self.json = json.loads(path.read_text()) if path.exists() else {}
        junit = folder / "junit.xml"
        self.junit_failures = len(ET.parse(junit).findall(".//failure")) if junit.exists() else -1

    @property
    def timed(self) -> list[int]:
        """T of each timed case, in order."""
        return sorted({row["params"]["tokens"] for row in self.json["benchmarks"]})

    def failed(self) -> list[int]:
        """T of each failed case, in order."""
        return [tokens(one["case"]) for one in self.json["pytest_ep"]["failed"]]


def tokens(case: str) -> int:
    """T of a node id; 0 of one that is no case."""
    found = re.search(r"T(\d{5})\]", case)
    return int(found[1]) if found else 0


class FaultyRun:
    """Runs two ranks with the faults of tests/faults/fate.py in a folder."""

    def __init__(self, torchrun: Torchrun) -> None:
        self._torchrun = torchrun
        torchrun.folder.joinpath("test_faulty.py").write_text(MODULE)

    def __call__(self, faults: str, *arguments: str) -> Outcome:
        """Run and return the outcome."""
        result = self._torchrun(
            2,
            "-q",
            f"--ep-shape={SHAPE}",
            "--ep-tokens=1..16",
            "--ep-size=2",
            "--ep-iterations=3",
            f"--ep-rank-timeout={RANK_TIMEOUT}",
            "--benchmark-json=out.json",
            "--junit-xml=junit.xml",
            "-k=(bf16 or here) and not test_probe",
            *arguments,
            "test_faulty.py",
            env={"PYTHONPATH": str(ROOT), "PYTEST_EP_FAULT": faults},
        )
        return Outcome(self._torchrun.folder, result)
