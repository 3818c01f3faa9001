"""A baseline transport that does one thing wrong on some ranks, at one T: what ranks must survive together.

The fault is named by PYTEST_EP_FAULT=KIND@RANKS[:T], with ranks as ``1`` or ``0+1``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import ClassVar

import pytest
from torch import Tensor

from pytest_ep import EPSuite
from pytest_ep.backends.base import Received
from pytest_ep.backends.torch_a2a import Exchange
from pytest_ep.backends.torch_a2a import TorchA2A
from pytest_ep.matrix.shapes import Shape
from pytest_ep.oracle import checks
from pytest_ep.ranks.group import Ranks
from pytest_ep.results.record import Recorder
from pytest_ep.workload.problem import Problem

KIND, _, _WHERE = os.environ.get("PYTEST_EP_FAULT", "none@0").partition("@")
RANKS = {int(rank) for rank in _WHERE.partition(":")[0].split("+")}
TOKENS = int(_WHERE.partition(":")[2] or 4)


class InjectedError(Exception):
    """What a faulty rank raises."""


def _raise() -> None:
    raise InjectedError("injected")


def _spin() -> None:
    while True:
        pass


FAULTS: dict[str, Callable[[], object]] = {
    "exits": lambda: os._exit(1),
    "leaves-quietly": lambda: os._exit(0),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "before-dispatch": _raise,
    "between": _raise,
    "in-combine": _raise,
    "in-setup": _raise,
    "in-oracle": _raise,
    "in-recording": _raise,
    "in-teardown": _raise,
    "spins": _spin,
    "native-wait": lambda: ctypes.CDLL(None).pause(),
    "holds-the-gil": lambda: ctypes.PyDLL(None).sleep(10_000),
    "sleeps": lambda: time.sleep(float(os.environ.get("PYTEST_EP_FAULT_SLEEP", "30"))),
    "interrupted": lambda: os.kill(os.getpid(), signal.SIGINT),
    "exit-call": lambda: pytest.exit("injected"),
}
WHERE = {
    "between": "receive",
    "in-combine": "combine",
    "in-setup": "construct",
    "in-oracle": "oracle",
    "in-recording": "recording",
    "in-teardown": "teardown",
    "skips-alone": "setup",
}


def strike(place: str, rank: int, tokens: int) -> None:
    """Commit the fault where this is its place, its rank and its T."""
    if KIND in FAULTS and WHERE.get(KIND, "dispatch") == place and rank in RANKS and tokens == TOKENS:
        FAULTS[KIND]()


class Faulty(TorchA2A):
    """torch_a2a with the fault of this process's environment."""

    name: ClassVar[str] = "faulty"
    maturity: ClassVar[str] = "candidate"

    def __init__(self, ranks: Ranks, shape: Shape, mode: str, precision: str, max_tokens: int) -> None:
        """Construct, or fail at it."""
        strike("construct", ranks.rank, TOKENS)
        super().__init__(ranks, shape, mode, precision, max_tokens)

    def dispatch(self, problem: Problem) -> Exchange:
        """Dispatch, or fail before."""
        strike("dispatch", problem.rank, problem.tokens)
        return super().dispatch(problem)

    def receive(self, problem: Problem, handle: Exchange) -> Received:
        """Receive, or fail between dispatch and combine."""
        strike("receive", problem.rank, problem.tokens)
        return super().receive(problem, handle)

    def combine(self, problem: Problem, handle: Exchange, staged: Tensor) -> Tensor:
        """Combine, or fail before."""
        strike("combine", problem.rank, problem.tokens)
        return super().combine(problem, handle, staged)


class FaultySuite(EPSuite):
    """The cases of the faulty transport."""

    backend = Faulty

    @pytest.fixture(autouse=True)
    def _around(
        self, monkeypatch: pytest.MonkeyPatch, tokens: int, ep_run: object, request: pytest.FixtureRequest
    ) -> Iterator[None]:
        rank = int(os.environ.get("RANK", "0"))
        if KIND == "skips-alone" and rank in RANKS and tokens == TOKENS:
            pytest.skip("only here")
        unchanged, record = checks.inputs_unchanged, Recorder.record

        def faulty_oracle(problem: Problem) -> bool:
            strike("oracle", problem.rank, problem.tokens)
            return unchanged(problem)

        def faulty_record(recorder: Recorder, measurement: object) -> None:
            strike("recording", rank, tokens)
            record(recorder, measurement)  # type: ignore[arg-type]

        monkeypatch.setattr(checks, "inputs_unchanged", faulty_oracle)
        monkeypatch.setattr(Recorder, "record", faulty_record)
        yield
        strike("teardown", rank, tokens)


if KIND == "collects-differently" and int(os.environ.get("RANK", "0")) in RANKS:

    def test_only_here() -> None:
        """An item that other ranks do not have."""

else:

    def test_everywhere() -> None:
        """An item in its place."""


if KIND == "fails-to-import" and int(os.environ.get("RANK", "0")) in RANKS:
    raise InjectedError("injected while importing")
