"""A device that exists in its own time: it issues work, captures it in graphs, and records its kernels."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_ep.timing.kernels import Activity

EVENT_NODE = 3e-6
"""Seconds that an event node takes."""


class Device:
    """Runs what is issued at once, or puts it on the tape of the graph that is being captured."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tape: list[Callable[[], object]] | None = None
        self.activities: list[Activity] = []
        self.wrong: Piece | None = None

    def issue(self, work: Callable[[], object]) -> None:
        if self.tape is None:
            work()
        else:
            self.tape.append(work)

    def run(self, name: str, seconds: float) -> None:
        """Issue a kernel."""

        def kernel() -> None:
            self.activities.append(Activity(name, self.now, self.now + seconds))
            self.now += seconds

        self.issue(kernel)

    def arrived(self, problem: Piece) -> str:
        """What is wrong with what a dispatch of this problem brought."""
        return "weights" if problem is self.wrong else ""

    @contextlib.contextmanager
    def capture(self, graph: Graph) -> Iterator[None]:
        self.tape = graph.tape
        yield
        self.tape = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand in for CUDA's graphs and events."""
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(self))


class Graph:
    def __init__(self) -> None:
        self.tape: list[Callable[[], object]] = []

    def replay(self) -> None:
        for work in self.tape:
            work()


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = math.nan

    def record(self) -> None:
        def mark() -> None:
            self.at = self.device.now
            self.device.now += EVENT_NODE

        self.device.issue(mark)

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


class KernelRecorder:
    """Records a device's kernels, as torch.profiler does."""

    name = "kernel"

    def __init__(self, device: Device) -> None:
        self.device = device

    def start(self) -> None:
        self.device.run("void at::native::spin_kernel(long)", 1e-6)

    end = start

    def seconds(self, start: None, end: None) -> float:
        return math.nan

    def during(self, work: Callable[[], object]) -> list[Activity]:
        self.device.activities.clear()
        work()
        return self.device.activities[::-1]  # in no order that could be relied on


@dataclass
class OnlyRank:
    """A group of one rank, whose device is never waited for."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    log: list[str] = field(default_factory=list)

    @property
    def pulse(self) -> OnlyRank:
        return self

    def beat(self, phase: str = "") -> None:
        pass

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def barrier(self) -> None:
        self.log.append("barrier")


@dataclass(frozen=True)
class Piece:
    """A problem of which only the time of its dispatch matters."""

    dispatch_seconds: float = 10e-6
    x: Any = None


class Transport:
    """Issues a kernel for each dispatch and two for each combine, the last of which writes the output."""

    combine_seconds = 5e-6

    def __init__(self, device: Device, tokens: int = 2) -> None:
        self.device = device
        self.tokens = tokens
        self.writes = True

    def stage_constant(self, problem: Piece, rows: Tensor) -> Tensor:
        return rows.expand(self.tokens, -1)

    def metadata(self, problem: Piece) -> bool:
        return False

    def dispatch(self, problem: Piece) -> None:
        self.device.run("dispatch", problem.dispatch_seconds)

    def combine(self, problem: Piece, handle: None, staged: Tensor) -> Tensor:
        output = torch.zeros_like(staged)

        def write() -> None:
            if self.writes:
                output.copy_(staged)

        self.device.run("fetch", self.combine_seconds - 2e-6)
        self.device.run("reduce", 2e-6)
        self.device.issue(write)
        return output
