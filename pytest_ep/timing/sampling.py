"""The timed loop: equal iterations on every rank, each window entered together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from pytest_ep.backends.base import EPBackend
from pytest_ep.ranks.group import Ranks
from pytest_ep.timing.clocks import Clock
from pytest_ep.workload.problem import Problem

COMPONENTS = ("dispatch", "combine", "roundtrip")
WARMUP_PAIRS = 5
MIN_ITERATIONS, MAX_ITERATIONS = 16, 128
BUDGET = 0.5
"""Seconds that the iterations of one component may take, where that leaves at least MIN_ITERATIONS."""


@dataclass(frozen=True, slots=True)
class Samples:
    """One rank's samples of each component, seconds, in the order taken; and the last timed output."""

    seconds: dict[str, list[float]]
    output: Tensor


def sample(
    backend: EPBackend,
    problem: Problem,
    rows: Tensor,
    ranks: Ranks,
    *,
    clock: Clock,
    iterations: int | None,
) -> Samples:
    """Time dispatch, combine and their roundtrip with constant messages ``rows`` staged once.

    ``iterations`` per component; None lets rank 0 choose from its warm-up. Staging is no part of any window.
    """
    staged = backend.stage_constant(problem, rows)
    began = time.perf_counter()
    for _ in range(WARMUP_PAIRS):
        ranks.pulse.beat()
        backend.combine(problem, backend.dispatch(problem), staged)
    ranks.synchronize()
    if iterations is None:
        iterations = ranks.ballot.gather("iterations", _affordable(time.perf_counter() - began))[0]

    seconds: dict[str, list[float]] = {component: [] for component in COMPONENTS}
    output = problem.x
    for _ in range(iterations):
        ranks.pulse.beat()
        taken, handle = _window(ranks, clock, partial(backend.dispatch, problem))
        seconds["dispatch"].append(taken)
        taken, output = _window(ranks, clock, partial(backend.combine, problem, handle, staged))
        seconds["combine"].append(taken)
        taken, output = _window(
            ranks, clock, lambda: backend.combine(problem, backend.dispatch(problem), staged)
        )
        seconds["roundtrip"].append(taken)
    return Samples(seconds, output)


def _affordable(warmup: float) -> int:
    pairs = BUDGET / max(warmup / WARMUP_PAIRS, 1e-9)
    return int(min(max(pairs, MIN_ITERATIONS), MAX_ITERATIONS))


def _window(ranks: Ranks, clock: Clock, call: Callable[[], Any]) -> tuple[float, Any]:
    # All preparation is done before the ranks align: nothing waits on the host between here and the start.
    ranks.synchronize()
    ranks.barrier()
    start = clock.start()
    result = call()
    end = clock.end()
    ranks.synchronize()
    return clock.seconds(start, end), result
