"""Taking samples: equal batches on every rank, each window entered by all ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from typing import Protocol

from torch import Tensor

from pytest_ep.backends.base import EPBackend
from pytest_ep.oracle.exchange import inspect
from pytest_ep.ranks.group import Ranks
from pytest_ep.timing.clocks import Clock
from pytest_ep.workload.problem import Problem

COMPONENTS = ("dispatch", "combine", "roundtrip")
METADATA = "metadata"
"""The series of what a transport can time apart of its dispatch."""
WARMUP_PAIRS = 5

Batch = dict[str, list[float]]
"""One rank's samples by series, seconds, in the order taken; equally many on every rank."""


class Sampler(Protocol):
    """Takes batches of samples with constant messages, staged once; staging is in no window."""

    name: str
    series: tuple[str, ...]
    """The components, then what else is sampled with them."""

    def batch(self, iterations: int) -> Batch:
        """Take ``iterations`` samples of each series, the components in turn. Collective."""

    def outputs(self) -> list[tuple[Problem, Tensor]]:
        """What the last timed combines returned, and the problems that they belong to."""

    def faults(self) -> list[str]:
        """What was seen to be wrong while sampling, other than in ``outputs``."""

    def says(self) -> dict[str, Any]:
        """What the rows should record of how the samples were taken."""

    def says_of(self, component: str) -> dict[str, Any]:
        """What the row of one component should record besides."""


class EagerSampler:
    """Windows of a clock around eager calls; ``between``, if any, is called before each pair."""

    series: tuple[str, ...] = COMPONENTS

    def __init__(
        self,
        backend: EPBackend,
        problem: Problem,
        rows: Tensor,
        ranks: Ranks,
        *,
        clock: Clock,
        between: Callable[[], None] | None = None,
        metadata: bool = False,
    ) -> None:
        """Stage ``rows`` [S, H] BF16 and warm up; ``metadata`` makes that a series, where it can be."""
        self.name = clock.name
        self._backend = backend
        self._problem = problem
        self._ranks = ranks
        self._clock = clock
        self._between = between
        self._staged = backend.stage_constant(problem, rows)
        self._output = problem.x
        self._arrived = ""
        if metadata and backend.metadata(problem):
            self.series = (*COMPONENTS, METADATA)
        for _ in range(WARMUP_PAIRS):
            ranks.pulse.beat()
            self._pair()
        ranks.synchronize()

    def batch(self, iterations: int) -> Batch:
        """Time dispatch, then the combine of that very dispatch, then a roundtrip."""
        backend, problem, staged = self._backend, self._problem, self._staged
        taken: Batch = {one: [] for one in self.series if one in (*COMPONENTS, METADATA)}
        for left in reversed(range(iterations)):
            self._ranks.pulse.beat()
            self._prepare()
            seconds, handle = self._window(partial(backend.dispatch, problem))
            taken["dispatch"].append(seconds)
            if not left:  # between windows, so that nobody times it
                self._arrived = inspect(backend, problem, handle)
            seconds, self._output = self._window(partial(backend.combine, problem, handle, staged))
            taken["combine"].append(seconds)
            self._prepare()
            seconds, self._output = self._window(self._pair)
            taken["roundtrip"].append(seconds)
            if METADATA in taken:
                self._prepare()
                taken[METADATA].append(self._window(partial(backend.metadata, problem))[0])
        return taken

    def pair_after(self, pause: float) -> float:
        """Run a pair, do nothing for ``pause`` seconds, then time the next pair. Collective."""
        self._ranks.pulse.beat()
        self._pair()
        self._ranks.synchronize()
        time.sleep(pause)
        seconds, self._output = self._window(self._pair)
        return seconds

    def outputs(self) -> list[tuple[Problem, Tensor]]:
        """The last roundtrip's."""
        return [(self._problem, self._output)]

    def faults(self) -> list[str]:
        """What was wrong with the last timed dispatch that was looked at, one in each batch."""
        return [f"timed dispatch: {self._arrived}"] if self._arrived else []

    def says(self) -> dict[str, Any]:
        """How much was thrown away before."""
        return {"warmup_pairs": WARMUP_PAIRS}

    def says_of(self, component: str) -> dict[str, Any]:
        """Nothing: the windows are all alike."""
        return {}

    def _prepare(self) -> None:
        if self._between is not None:
            self._between()

    def _pair(self) -> Tensor:
        return self._backend.combine(self._problem, self._backend.dispatch(self._problem), self._staged)

    def _window(self, call: Any) -> tuple[float, Any]:
        # All preparation is done before the ranks align: no host wait between here and the start.
        self._ranks.synchronize()
        self._ranks.barrier()
        start = self._clock.start()
        result = call()
        end = self._clock.end()
        self._ranks.synchronize()
        return self._clock.seconds(start, end), result
