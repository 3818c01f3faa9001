"""Transports that keep a log of their lives, and that refuse or break at one point of them.

Where only one rank refuses or breaks it is rank 1; what breaks in a case does so at one token per rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from torch import Tensor

from pytest_ep import EPSuite
from pytest_ep.backends.base import BackendUnavailable
from pytest_ep.backends.base import Received
from pytest_ep.backends.torch_a2a import Exchange
from pytest_ep.backends.torch_a2a import TorchA2A
from pytest_ep.matrix.shapes import Shape
from pytest_ep.ranks.group import Ranks
from pytest_ep.workload.problem import Problem

CULPRIT = 1


class Logging(TorchA2A):
    """Writes ``event name model max_tokens`` to lives-RANK.txt; breaks where ``breaks_in`` says."""

    name: ClassVar[str] = "logging"
    breaks_in: ClassVar[str] = ""

    def __init__(self, ranks: Ranks, shape: Shape, mode: str, precision: str, max_tokens: int) -> None:
        self._life = f"{self.name} {shape.name} {max_tokens}"
        self._log = Path(f"lives-{ranks.rank}.txt")
        self._combined = 0
        self._ranks = ranks
        if ranks.rank == CULPRIT:
            self.break_in("construction")
        super().__init__(ranks, shape, mode, precision, max_tokens)
        self._write("construct")

    def dispatch(self, problem: Problem) -> Exchange:
        self._maybe("dispatch", problem)
        return super().dispatch(problem)

    def receive(self, problem: Problem, handle: Exchange) -> Received:
        self._maybe("receive", problem)
        return super().receive(problem, handle)

    def combine(self, problem: Problem, handle: Exchange, staged: Tensor) -> Tensor:
        self._combined += 1
        self._maybe("timing" if self._combined == 10 else "combine", problem)
        return super().combine(problem, handle, staged)

    def close(self) -> None:
        super().close()
        self._write("close")

    def break_in(self, place: str) -> None:
        if place == self.breaks_in:
            raise RuntimeError(f"broke in {place}")

    def _maybe(self, place: str, problem: Problem) -> None:
        if problem.rank == CULPRIT and problem.tokens == 1:
            self.break_in(place)

    def _write(self, event: str) -> None:
        with self._log.open("a") as log:
            print(event, self._life, file=log)


class RefusesEverywhere(Logging):
    name = "refuses_everywhere"

    def __init__(self, ranks: Ranks, shape: Shape, mode: str, precision: str, max_tokens: int) -> None:
        raise BackendUnavailable("no-fabric", f"no fabric on rank {ranks.rank}: grant it")


class RefusesOnOne(Logging):
    name = "refuses_on_one"

    def __init__(self, ranks: Ranks, shape: Shape, mode: str, precision: str, max_tokens: int) -> None:
        if ranks.rank == CULPRIT:
            raise BackendUnavailable("no-fabric", "no fabric here: grant it")
        self._life = f"{self.name} {shape.name} {max_tokens}"
        self._log = Path(f"lives-{ranks.rank}.txt")
        self._write("construct")


class BreaksInConstruction(Logging):
    name = "breaks_in_construction"
    breaks_in = "construction"


class BreaksInDispatch(Logging):
    name = "breaks_in_dispatch"
    breaks_in = "dispatch"


class BreaksInReceive(Logging):
    name = "breaks_in_receive"
    breaks_in = "receive"


class BreaksInCombine(Logging):
    name = "breaks_in_combine"
    breaks_in = "combine"


class BreaksInTiming(Logging):
    name = "breaks_in_timing"
    breaks_in = "timing"


class TestRefusesEverywhere(EPSuite):
    backend = RefusesEverywhere


class TestRefusesOnOne(EPSuite):
    backend = RefusesOnOne


class TestBreaksInConstruction(EPSuite):
    backend = BreaksInConstruction


class TestBreaksInDispatch(EPSuite):
    backend = BreaksInDispatch


class TestBreaksInReceive(EPSuite):
    backend = BreaksInReceive


class TestBreaksInCombine(EPSuite):
    backend = BreaksInCombine


class TestBreaksInTiming(EPSuite):
    backend = BreaksInTiming


class TestFirst(EPSuite):
    backend = Logging


class TestSecond(EPSuite):
    backend = Logging


class TestBaseline(EPSuite):
    backend = "torch_a2a"
