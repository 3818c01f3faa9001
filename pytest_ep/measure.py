"""The timing of one case: sampled until it is known well enough, then what was timed is checked."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pytest_ep.matrix.cells import Cell
from pytest_ep.oracle import checks
from pytest_ep.oracle.checks import Verdict
from pytest_ep.ranks.fate import AgreedFailure
from pytest_ep.ranks.fate import Failure
from pytest_ep.results.record import JSON
from pytest_ep.results.record import Measurement
from pytest_ep.run import Run
from pytest_ep.timing import clocks
from pytest_ep.timing import statistics
from pytest_ep.timing.graphs import GraphSampler
from pytest_ep.timing.sampling import COMPONENTS
from pytest_ep.timing.sampling import Batch
from pytest_ep.timing.sampling import EagerSampler
from pytest_ep.timing.sampling import Sampler
from pytest_ep.timing.traffic import traffic
from pytest_ep.transports import Live
from pytest_ep.workload import load
from pytest_ep.workload.problem import Problem

INDEX_BYTES = {"int32": 4, "int64": 8}
BATCH = 8
FLOOR, CAP = 16, 512
"""Samples of a component: at least, at most."""
EXTRA_SAMPLES = 24
"""Samples of a clock that does not own the rows."""
LATE = 3.0
"""An iteration is late from this many medians on."""
SKEWED = 0.5
"""A case is skewed where the ranks' median spread is this share of its value, or more."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """All ranks' samples of one clock: maxima and spread by component, seconds; and each rank's own."""

    seconds: dict[str, statistics.Samples]
    spread: dict[str, statistics.Samples]
    by_rank: list[Batch]
    elapsed: float


class Timing:
    """Measures a case of a live transport on all ranks together.

    ``agree`` turns the ranks' verdicts into the largest error and the least bit-exact share, or raises.
    """

    def __init__(
        self, run: Run, live: Live, cell: Cell, agree: Callable[[Sequence[Verdict], str], Any]
    ) -> None:
        self._run = run
        self._live = live
        self._cell = cell
        self._agree = agree
        self._together = run.fate.together

    def refusal(self) -> str:
        """Why the clock asked for cannot time this transport, or ""."""
        wanted = self._run.options.clocks[0]
        if wanted == "graph" and not self._live.facts.graph_safe:
            return (
                f"not timed: {self._cell.key.backend} cannot be captured in a CUDA graph (--ep-clock graph)"
            )
        return ""

    def measure(self, problem: Problem) -> Measurement:
        """Time the case by the clock that owns its rows, then by the others asked for."""
        owner, *others = self._clocks()
        sampler = self._sampler(owner, problem)
        sampled = self._sample(sampler, None)
        agreed = self._verified(sampler)
        extra: dict[str, JSON] = {**sampler.says(), **self._sureness(sampled), **self._load(problem)}
        by_component: dict[str, dict[str, JSON]] = {component: {} for component in COMPONENTS}
        for other in others:
            self._beside(other, problem, sampled, by_component)
        medians = {one: statistics.median(sampled.seconds[one]) * 1e6 for one in COMPONENTS}
        by_component["roundtrip"]["overlap_lost_us"] = (
            medians["dispatch"] + medians["combine"] - medians["roundtrip"]
        )
        for component in COMPONENTS:
            by_component[component] |= _skew(sampled, component)
        return Measurement(
            clock=sampler.name,
            seconds=sampled.seconds,
            spread=sampled.spread,
            traffic=traffic(
                problem.trace.expert_ids,
                self._cell.shape.owned(problem.ep_size),
                problem.tokens_by_rank,
                hidden=self._cell.shape.hidden,
                index_bytes=INDEX_BYTES[self._live.facts.index_dtype],
                domain=self._live.domain,
            ),
            link_gbps=self._run.link_gbps(self._cell),
            error=agreed.error,
            bit_exact=agreed.bit_exact,
            reduction=self._live.reduction.name,
            max_tokens=self._live.max_tokens,
            extra=extra,
            by_component=by_component,
        )

    def _load(self, problem: Problem) -> dict[str, float | int]:
        owned = self._cell.shape.owned(problem.ep_size)
        return load.figures(problem.trace.expert_ids, owned, problem.tokens_by_rank)

    def _clocks(self) -> tuple[str, ...]:
        wanted, device = self._run.options.clocks, self._run.ranks.device
        if wanted != ("auto",):
            return wanted
        if device.type == "cpu":
            return ("host",)
        return ("graph", "event") if self._live.facts.graph_safe else ("event",)

    def _sampler(self, clock: str, problem: Problem) -> Sampler:
        backend, ranks = self._live.backend, self._run.ranks
        made: list[Sampler] = []

        def rows() -> torch.Tensor:
            return checks.constant_rows(problem, backend.constant_planes(problem))

        def build(pair_seconds: float = 0.0) -> None:
            if clock == "graph":
                routings = self._routings(problem)
                made.append(GraphSampler(backend, routings, rows(), ranks, pair_seconds=pair_seconds))
            else:
                eager = clocks.choose(clock, ranks.device)
                made.append(EagerSampler(backend, problem, rows(), ranks, clock=eager))

        def guess() -> float:
            staged = backend.stage_constant(problem, rows())
            ranks.synchronize()
            began = time.perf_counter()
            for _ in range(3):
                backend.combine(problem, backend.dispatch(problem), staged)
            ranks.synchronize()
            return (time.perf_counter() - began) / 3

        if clock == "graph":
            pair = self._together("timing: a first guess", guess)[0]
            self._together("timing: capture", lambda: build(pair))
        else:
            self._together("timing: warm-up", build)
        return made[0]

    def _routings(self, problem: Problem) -> list[Problem]:
        """Return the case with other pieces of the trace: one routing's imbalance is not the answer."""
        first = problem.first_token(problem.rank)
        own = slice(first, first + problem.tokens)
        _, *others = self._live.traces(problem.tokens_by_rank)
        return [
            problem,
            *(
                replace(
                    problem,
                    trace=trace,
                    expert_ids=torch.tensor(trace.expert_ids[own]).to(problem.expert_ids),
                    weights=torch.tensor(trace.weights[own]).to(problem.weights),
                )
                for trace in others
            ),
        ]

    def _sample(self, sampler: Sampler, number: int | None) -> Sampled:
        """Take batches until rank 0 says that it is enough; ``number`` asks for exactly so many."""
        options = self._run.options
        number = number or options.iterations
        by_rank: list[Batch] = [{one: [] for one in COMPONENTS} for _ in range(self._run.ranks.size)]
        began = time.monotonic()
        taken = 0
        while True:
            size = BATCH if number is None else min(BATCH, number - taken)

            def batch(size: int = size) -> tuple[Batch, float]:
                return sampler.batch(size), time.monotonic() - began

            said: list[tuple[Batch, float]] = self._together("timing", batch)
            for mine, (theirs, _) in zip(by_rank, said, strict=True):
                for component in COMPONENTS:
                    mine[component] += theirs[component]
            taken += size
            seconds, spread = _combined(by_rank)
            if taken == number or (number is None and self._enough(seconds, said[0][1])):
                return Sampled(seconds, spread, by_rank, said[0][1])

    def _enough(self, seconds: dict[str, statistics.Samples], elapsed: float) -> bool:
        """Whether the interval is narrow enough or the time used up: rank 0's clock is everyone's."""
        taken = min(len(one) for one in seconds.values())
        if taken < FLOOR:
            return False
        return taken >= CAP or elapsed >= self._run.options.time_budget or self._met(seconds)

    def _met(self, seconds: dict[str, statistics.Samples]) -> bool:
        noises = [statistics.noise(one) for one in seconds.values()]
        return all(noise is not None and noise <= self._run.options.target_ci for noise in noises)

    def _verified(self, sampler: Sampler) -> Any:
        """Check what the timed combines left, and what the sampler itself saw."""
        backend, exact = self._live.backend, self._run.options.exact

        def verify() -> list[Verdict]:
            verdicts = []
            for problem, output in sampler.outputs():
                planes = backend.constant_planes(problem)
                verdict = checks.check_timed_output(problem, output, self._live.reduction, planes, exact)
                for fault in sampler.faults():
                    verdict = checks.failing(verdict, "timed_output", fault)
                verdicts.append(verdict)
            return verdicts

        said: list[list[Verdict]] = self._together("timed output", verify)
        agreed = [self._agree(verdicts, "last timed output: ") for verdicts in zip(*said, strict=True)]
        worst = max(agreed, key=lambda one: one.error)
        return replace(worst, bit_exact=min(one.bit_exact for one in agreed))

    def _sureness(self, sampled: Sampled) -> dict[str, JSON]:
        return {
            "target_ci": self._run.options.target_ci,
            "target_met": self._met(sampled.seconds),
            "timing_s": sampled.elapsed,
        }

    def _beside(self, clock: str, problem: Problem, owner: Sampled, rows: dict[str, dict[str, JSON]]) -> None:
        """Put another clock's medians beside the rows, and what launching costs."""
        sampler = self._sampler(clock, problem)
        sampled = self._sample(sampler, EXTRA_SAMPLES)
        self._verified(sampler)
        for component in COMPONENTS:
            value = statistics.median(sampled.seconds[component]) * 1e6
            rows[component][f"{clock}_p50_us"] = value
            if clock == "event":
                rows[component]["launch_us"] = value - statistics.median(owner.seconds[component]) * 1e6


def _combined(
    by_rank: list[Batch],
) -> tuple[dict[str, statistics.Samples], dict[str, statistics.Samples]]:
    seconds, spread = {}, {}
    for component in COMPONENTS:
        try:
            both = statistics.combine_ranks([samples[component] for samples in by_rank])
        except statistics.SampleError as error:
            raise AgreedFailure(Failure(f"{component}: {error}")) from None
        seconds[component], spread[component] = both
    return seconds, spread


def _skew(sampled: Sampled, component: str) -> dict[str, JSON]:
    """Say how the ranks differ: each one's median, the slowest and how often it was, late iterations."""
    table = np.array([samples[component] for samples in sampled.by_rank])
    maxima = sampled.seconds[component]
    often = np.bincount(table.argmax(axis=0), minlength=len(table))
    middle = statistics.median(maxima)
    return {
        "rank_p50_us": [float(one) for one in np.median(table, axis=1) * 1e6],
        "slowest_rank": int(often.argmax()),
        "slowest_share": float(often.max() / len(maxima)),
        "late": int((maxima > LATE * middle).sum()),
        "skewed": bool(statistics.median(sampled.spread[component]) >= SKEWED * middle),
    }
