"""The kernel clock: what torch.profiler says that kernels took, as published tables of kernels do.

No launch and no gap between kernels is inside, but waiting is: a kernel that waits for its peers runs while
it waits. Marks, which are kernels of our own, bound each window on the device: no two clocks are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence
from functools import partial
from typing import Any
from typing import NamedTuple
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity
from torch.profiler import profile

from pytest_ep.backends.base import EPBackend
from pytest_ep.ranks.group import Ranks
from pytest_ep.timing.sampling import COMPONENTS
from pytest_ep.timing.sampling import Batch
from pytest_ep.timing.sampling import EagerSampler
from pytest_ep.workload.problem import Problem

MARK = "spin_kernel"
"""Within the name of the kernel that ``torch.cuda._sleep`` launches; no transport uses it."""
SPAN = " span"
"""After a component's name: from the start of its first kernel to the end of its last."""


class Activity(NamedTuple):
    """A kernel, copy or fill on the device: when it ran, seconds."""

    name: str
    start: float
    end: float


class Recorder(Protocol):
    """Records what a device does while some work is done. As a clock it marks where windows begin and end."""

    name: str

    def start(self) -> None:
        """Launch a mark."""

    def end(self) -> None:
        """Launch a mark once all that was issued is done, on whatever stream."""

    def seconds(self, start: None, end: None) -> float:
        """Return nothing of use: a window's duration is known only when all is recorded."""

    def during(self, work: Callable[[], object]) -> list[Activity]:
        """Do the work and return what the device did, the marks among it."""


class Profiler:
    """torch.profiler, for the device alone."""

    name = "kernel"

    def start(self) -> None:
        """Launch a kernel that ends at once."""
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Wait, then do the same."""
        torch.cuda.synchronize()
        self.start()

    def seconds(self, start: None, end: None) -> float:
        """Not a number: it comes later."""
        return math.nan

    def during(self, work: Callable[[], object]) -> list[Activity]:
        """Profile the work."""
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            work()
            torch.cuda.synchronize()
        return [
            Activity(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in profiled.events()
            if event.device_type == DeviceType.CUDA
        ]


class KernelSampler(EagerSampler):
    """Sums of kernel durations in each window of eager pairs."""

    series = (*COMPONENTS, *(component + SPAN for component in COMPONENTS))

    def __init__(
        self,
        backend: EPBackend,
        problem: Problem,
        rows: Tensor,
        ranks: Ranks,
        *,
        clock: Recorder,
        between: Callable[[], None] | None = None,
    ) -> None:
        """Stage ``rows`` [S, H] BF16, warm up, and record once in vain: that is slow and may miss."""
        super().__init__(backend, problem, rows, ranks, clock=clock, between=between)
        self._recorder = clock
        self._kernels: dict[str, dict[str, list[float]]] = {}
        self._recorder.during(partial(super().batch, 1))

    def batch(self, iterations: int) -> Batch:
        """Record as many pairs as the eager clocks time."""
        recorded = self._recorder.during(partial(super().batch, iterations))
        taken: Batch = {one: [] for one in self.series}
        for number, window in enumerate(windows(recorded, len(COMPONENTS) * iterations)):
            component = COMPONENTS[number % len(COMPONENTS)]
            taken[component].append(sum(one.end - one.start for one in window))
            first, last = min(one.start for one in window), max(one.end for one in window)
            taken[component + SPAN].append(last - first)
            kernels = self._kernels.setdefault(component, {})
            for one in window:
                kernels.setdefault(one.name, []).append(one.end - one.start)
        return taken

    def says_of(self, component: str) -> dict[str, Any]:
        """This rank's kernels, the longest first: how often each ran in all pairs, and for how long."""
        kernels = [
            {"name": name, "count": len(seconds), "total_us": sum(seconds) * 1e6}
            for name, seconds in self._kernels.get(component, {}).items()
        ]
        return {"kernels": sorted(kernels, key=lambda kernel: -kernel["total_us"])}


def windows(recorded: Sequence[Activity], expected: int) -> list[list[Activity]]:
    """Return what ran between the first and second mark, the third and fourth, and so on.

    Raises RuntimeError, one line, where that is not ``expected`` windows with something in each.
    """
    found: list[list[Activity]] = []
    marks = 0
    for one in sorted(recorded, key=lambda one: one.start):
        if MARK in one.name:
            marks += 1
            if marks % 2:
                found.append([])
        elif marks % 2:
            found[-1].append(one)
    filled = sum(bool(window) for window in found)
    if marks != 2 * expected or filled != expected:
        raise RuntimeError(
            f"torch.profiler saw kernels in {filled} of {expected} windows and {marks} of {2 * expected}"
            " marks: it needs CUPTI and the right to use it; use another --ep-clock"
        )
    return found
