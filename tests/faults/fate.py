"""A baseline transport that does one thing wrong on some ranks, at one T: what ranks must survive together.

Faults are named by PYTEST_EP_FAULT=KIND@RANKS[:T],..., with ranks as ``1`` or ``0+1`` and T 4 unless given.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
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

RANK = int(os.environ.get("RANK", "0"))


def _mine() -> set[tuple[str, int]]:
    """Return kind and T of each fault of this rank."""
    found = set()
    for fault in filter(None, os.environ.get("PYTEST_EP_FAULT", "").split(",")):
        kind, _, where = fault.partition("@")
        ranks, _, tokens = where.partition(":")
        if str(RANK) in ranks.split("+"):
            found.add((kind, int(tokens or 4)))
    return found


MINE = _mine()
KINDS = {kind for kind, _ in MINE}
RANKS_DIE_INSIDE = "killed-inside@" in os.environ.get("PYTEST_EP_FAULT", "")
"""Some rank dies between two exchanges, so all ranks take part in the first."""
EVERY = -1
"""As T: whichever the fault names."""


class InjectedError(Exception):
    """What a faulty rank raises."""


def _raise() -> None:
    raise InjectedError("injected")


def _index_out_of_bounds() -> None:
    """Trip an assertion in a kernel: every later call on this device fails, too."""
    table = torch.zeros(1, device="cuda")
    table[torch.tensor([5], device="cuda")].sum().item()


def _passed(tokens: int) -> bool:
    """Whether the fault's case is timed again after one of ``tokens``."""
    return tokens in Faulty.dispatched


def _print_and_exit() -> None:
    print("last words")
    time.sleep(1)
    os._exit(1)


def _spin() -> None:
    while True:
        pass


FAULTS: dict[str, Callable[[], object]] = {
    "exits": lambda: os._exit(1),
    "prints-and-exits": _print_and_exit,
    "leaves-quietly": lambda: os._exit(0),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "killed-inside": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "device-assert": _index_out_of_bounds,
    "before-dispatch": _raise,
    "between": _raise,
    "in-combine": _raise,
    "gives-up": lambda: sys.exit("library gives up"),
    "skips-inside": lambda: pytest.skip("not today"),
    "again": lambda: _raise() if _passed(16) else None,
    "in-setup": _raise,
    "in-oracle": _raise,
    "in-recording": _raise,
    "in-teardown": _raise,
    "dies-in-teardown": lambda: os._exit(1),
    "spins": _spin,
    "native-wait": lambda: ctypes.CDLL(None).pause(),
    "holds-the-gil": lambda: ctypes.PyDLL(None).sleep(10_000),
    "sleeps": lambda: time.sleep(float(os.environ.get("PYTEST_EP_FAULT_SLEEP", "30"))),
    "interrupted": lambda: os.kill(os.getpid(), signal.SIGINT),
    "exit-call": lambda: pytest.exit("injected"),
    "exit-fixture": lambda: pytest.exit("injected"),
}
WHERE = {
    "killed-inside": "exchange",
    "between": "receive",
    "gives-up": "receive",
    "in-combine": "combine",
    "in-setup": "construct",
    "in-oracle": "oracle",
    "in-recording": "recording",
    "in-teardown": "teardown",
    "dies-in-teardown": "teardown",
    "skips-alone": "setup",
    "exit-fixture": "fixture",
}


def strike(place: str, tokens: int) -> None:
    """Commit each fault of this rank whose place and T these are."""
    for kind, when in MINE:
        if kind in FAULTS and WHERE.get(kind, "dispatch") == place and tokens in (when, EVERY):
            Path("struck").touch()  # when, for the table of faults
            FAULTS[kind]()


class Faulty(TorchA2A):
    """torch_a2a with the fault of this process's environment."""

    name: ClassVar[str] = "faulty"
    maturity: ClassVar[str] = "candidate"
    dispatched: ClassVar[set[int]] = set()

    def __init__(self, ranks: Ranks, shape: Shape, mode: str, precision: str, max_tokens: int) -> None:
        """Construct, or fail at it."""
        strike("construct", EVERY)
        super().__init__(ranks, shape, mode, precision, max_tokens)

    def dispatch(self, problem: Problem) -> Exchange:
        """Dispatch, or fail before."""
        self.dispatched.add(problem.tokens)
        strike("dispatch", problem.tokens)
        if RANKS_DIE_INSIDE:
            super()._all_to_all(problem.x.new_zeros(self._ranks.size))
            strike("exchange", problem.tokens)
        return super().dispatch(problem)

    def receive(self, problem: Problem, handle: Exchange) -> Received:
        """Receive, or fail between dispatch and combine."""
        strike("receive", problem.tokens)
        return super().receive(problem, handle)

    def combine(self, problem: Problem, handle: Exchange, staged: Tensor) -> Tensor:
        """Combine, or fail before."""
        strike("combine", problem.tokens)
        return super().combine(problem, handle, staged)


class FaultySuite(EPSuite):
    """The cases of the faulty transport."""

    backend = Faulty

    @pytest.fixture(autouse=True)
    def _around(
        self, monkeypatch: pytest.MonkeyPatch, tokens: int, ep_run: object, request: pytest.FixtureRequest
    ) -> Iterator[None]:
        if ("skips-alone", tokens) in MINE:
            pytest.skip("only here")
        strike("fixture", tokens)
        unchanged, record = checks.inputs_unchanged, Recorder.record

        def faulty_oracle(problem: Problem) -> bool:
            strike("oracle", problem.tokens)
            return unchanged(problem)

        def faulty_record(recorder: Recorder, measurement: object) -> None:
            strike("recording", tokens)
            record(recorder, measurement)  # type: ignore[arg-type]

        monkeypatch.setattr(checks, "inputs_unchanged", faulty_oracle)
        monkeypatch.setattr(Recorder, "record", faulty_record)
        yield
        strike("teardown", tokens)


def test_everywhere() -> None:
    """An item that is no case and that all ranks have."""


if "collects-differently" in KINDS:

    def test_only_here() -> None:
        """An item that other ranks do not have."""


if "fails-to-import" in KINDS:
    raise InjectedError("injected while importing")
