"""The graph clock: pairs captured in a CUDA graph and replayed, so that no launch cost is inside.

Two graphs. The pair graph has exactly two event nodes, after the fill pairs and after the last pair: a
sample of the roundtrip is the mean of one replay's pairs. The parts graph has an event node on each side of
every dispatch and combine, which costs a few microseconds and keeps kernels from overlapping: the cost of an
empty window, two event nodes in a row, is measured in every replay and subtracted.

With something between the pairs, such as a flush of the cache, only the parts graph can leave that out: it
alone is replayed, and a roundtrip is its dispatch plus its combine.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from functools import cache
from itertools import cycle
from statistics import median
from typing import Any

import torch
from torch import Tensor

from pytest_ep.backends.base import EPBackend
from pytest_ep.oracle.exchange import inspect
from pytest_ep.ranks.group import Ranks
from pytest_ep.timing.sampling import COMPONENTS
from pytest_ep.timing.sampling import Batch
from pytest_ep.workload.problem import Problem

FILL_PAIRS = 8
"""Pairs before the first event of a replay: they align the ranks, and nobody times them."""
REPLAY_SECONDS = 12e-3
"""About how long the timed pairs of one replay take."""
MOST_LAPS = 12
"""Laps over the routings that one replay times at most."""
MOST_WINDOWS_LAPS = 4
"""Laps of which each dispatch and combine has a window of its own at most."""
WARMUP_REPLAYS = 2
SETTLED = 3
"""Graphs that a process has captured before the first is timed. From the third on, the replays of all its
graphs are slower, the older ones' too and for good: 17.5 for 16.7 us a pair of FlashInfer at T=1 on H200,
whatever the third holds. A serving engine has dozens."""


class GraphSampler:
    """Samples of the graph clock; a sample is one replay of each graph.

    ``problems`` are the routings that the pairs cycle through; ``rows`` [S, H] BF16 the constant messages;
    ``pair_seconds``, the same on every rank, what the function of that name found on one; ``between``, if
    any, issues what comes before each pair.
    """

    name = "graph"
    series: tuple[str, ...] = COMPONENTS

    def __init__(
        self,
        backend: EPBackend,
        problems: Sequence[Problem],
        rows: Tensor,
        ranks: Ranks,
        *,
        pair_seconds: float,
        between: Callable[[], None] | None = None,
    ) -> None:
        """Stage, run every routing once eagerly, capture the graphs and replay each to warm."""
        settle(rows.device)
        self._backend = backend
        self._problems = problems
        self._ranks = ranks
        self._between = between
        self._staged = backend.stage_constant(problems[0], rows)
        turns = 1 if between else laps(pair_seconds, len(problems))
        self._pairs = len(problems) * turns
        self._windows = len(problems) * min(turns, MOST_WINDOWS_LAPS)
        self._empty: list[float] = []
        self._known: dict[int, Tensor] = {}
        self._differing = 0
        for index in range(len(problems)):
            self._pair(index)
        ranks.synchronize()
        self._chain = self._capture_pairs() if between is None else None
        self._part_graph, self._part_marks, self._part_output, self._handle = self._capture_parts()
        self.batch(WARMUP_REPLAYS)
        self._empty.clear()

    def batch(self, iterations: int) -> Batch:
        """Replay the graphs in turn."""
        taken: Batch = {component: [] for component in self.series}
        for _ in range(iterations):
            parts = self._parts()
            for component, seconds in parts.items():
                taken[component].append(seconds)
            taken["roundtrip"].append(sum(parts.values()) if self._chain is None else self._mean_pair())
        return taken

    def outputs(self) -> list[tuple[Problem, Tensor]]:
        """What the last pair of each graph combined."""
        left = [self._part_output] if self._chain is None else [self._chain[2], self._part_output]
        return [(self._problems[-1], output) for output in left]

    def faults(self) -> list[str]:
        """Replays whose final output is not bit for bit the first's; what the last dispatch brought."""
        found = [f"{self._differing} replays gave another output than the first"] if self._differing else []
        arrived = inspect(self._backend, self._problems[-1], self._handle)
        return [*found, f"timed dispatch: {arrived}"] if arrived else found

    def says(self) -> dict[str, Any]:
        """What a sample is made of."""
        return {
            "pairs_per_replay": self._pairs,
            "windows_per_replay": self._windows,
            "fill_pairs": FILL_PAIRS,
            "warmup_replays": WARMUP_REPLAYS,
            "routings": len(self._problems),
            "empty_window_us": median(self._empty) * 1e6 if self._empty else None,
        }

    def says_of(self, component: str) -> dict[str, Any]:
        """Nothing: all is said of the replay."""
        return {}

    def _mean_pair(self) -> float:
        assert self._chain is not None
        graph, marks, output = self._chain
        self._replay(graph, output)
        return _seconds(*marks) / self._pairs

    def _parts(self) -> dict[str, float]:
        self._replay(self._part_graph, self._part_output)
        windows, nothing = self._part_marks
        empty = _seconds(*nothing)
        self._empty.append(empty)
        return {
            component: sum(_seconds(*marks[first : first + 2]) for marks in windows) / len(windows) - empty
            for first, component in enumerate(("dispatch", "combine"))
        }

    def _replay(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        output.fill_(float("nan"))  # a replay that writes nothing must not leave the last one's result
        self._ranks.synchronize()
        self._ranks.pulse.beat()
        self._ranks.barrier()
        graph.replay()
        self._ranks.synchronize()
        known = self._known.setdefault(id(output), output.clone())
        self._differing += int(not torch.equal(known, output))

    def _pair(self, index: int) -> Tensor:
        problem = self._problems[index % len(self._problems)]
        return self._backend.combine(problem, self._backend.dispatch(problem), self._staged)

    def _capture_pairs(self) -> tuple[torch.cuda.CUDAGraph, tuple[Any, Any], Tensor]:
        graph, start, end = torch.cuda.CUDAGraph(), _event(), _event()
        with torch.cuda.graph(graph):
            for index in range(FILL_PAIRS):
                self._pair(index)
            start.record()
            for index in range(self._pairs):
                output = self._pair(index)
            end.record()
        return graph, (start, end), output

    def _capture_parts(self) -> tuple[torch.cuda.CUDAGraph, tuple[Any, Any], Tensor, Any]:
        graph = torch.cuda.CUDAGraph()
        windows = [(_event(), _event(), _event()) for _ in range(self._windows)]
        nothing = (_event(), _event())
        with torch.cuda.graph(graph):
            for index in range(FILL_PAIRS):
                self._pair(index)
            for (before, between, after), problem in zip(windows, cycle(self._problems), strict=False):
                if self._between is not None:
                    self._between()
                before.record()
                handle = self._backend.dispatch(problem)
                between.record()
                output = self._backend.combine(problem, handle, self._staged)
                after.record()
            for mark in nothing:
                mark.record()
        return graph, (windows, nothing), output, handle


def pair_seconds(backend: EPBackend, problems: Sequence[Problem], rows: Tensor, ranks: Ranks) -> float:
    """Return about how long a pair takes the device: each problem's, replayed once to warm, then timed."""
    settle(rows.device)
    staged = backend.stage_constant(problems[0], rows)
    for problem in problems:
        backend.combine(problem, backend.dispatch(problem), staged)
    ranks.synchronize()
    graph, start, end = torch.cuda.CUDAGraph(), _event(), _event()
    with torch.cuda.graph(graph):
        start.record()
        for problem in problems:
            backend.combine(problem, backend.dispatch(problem), staged)
        end.record()
    for _ in range(2):
        graph.replay()
        ranks.synchronize()
    return _seconds(start, end) / len(problems)


@cache
def settle(device: torch.device) -> None:
    """Capture ``SETTLED`` graphs of nothing much, once in a process."""
    nothing = torch.zeros(1, device=device)
    for _ in range(SETTLED):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            nothing.add_(1)


def laps(pair_seconds: float, routings: int) -> int:
    """Return how often one replay goes over all routings: about as long as ``REPLAY_SECONDS``."""
    return max(1, min(MOST_LAPS, round(REPLAY_SECONDS / max(pair_seconds, 1e-6) / routings)))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]


def _seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(start.elapsed_time(end)) / 1e3
