"""The timing of one case: sampled until it is known well enough, then what was timed is checked."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from functools import partial
from typing import Any

import numpy as np
import torch

from pytest_ep.matrix.cells import Cell
from pytest_ep.options import duration
from pytest_ep.oracle import checks
from pytest_ep.oracle.checks import Verdict
from pytest_ep.ranks.fate import AgreedFailure
from pytest_ep.ranks.fate import Failure
from pytest_ep.results.record import JSON
from pytest_ep.results.record import Measurement
from pytest_ep.run import Run
from pytest_ep.sampled import FLOOR
from pytest_ep.sampled import Sampled
from pytest_ep.sampled import sample
from pytest_ep.timing import clocks
from pytest_ep.timing import device
from pytest_ep.timing import graphs
from pytest_ep.timing import tracing
from pytest_ep.timing.flush import L2Flush
from pytest_ep.timing.graphs import GraphSampler
from pytest_ep.timing.kernels import SPAN
from pytest_ep.timing.kernels import KernelSampler
from pytest_ep.timing.kernels import Profiler
from pytest_ep.timing.sampling import COMPONENTS
from pytest_ep.timing.sampling import METADATA
from pytest_ep.timing.sampling import EagerSampler
from pytest_ep.timing.sampling import Sampler
from pytest_ep.timing.traffic import Traffic
from pytest_ep.timing.traffic import traffic
from pytest_ep.transports import Live
from pytest_ep.workload import load
from pytest_ep.workload.problem import Problem

INDEX_BYTES = {"int32": 4, "int64": 8}
EXTRA_SAMPLES = 24
"""Samples of a clock that does not own the rows."""
IDLE_SAMPLES = 5
"""Pairs timed after each pause."""

Rows = dict[str, dict[str, JSON]]
"""What joins the rows, by component."""


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
        before = self._speeds()
        sampler, sampled = self._timed(owner, problem, None)
        speeds = device.figures(before, self._speeds())
        agreed = self._verified(sampler)
        rows: Rows = {one: {**sampler.says_of(one), **sampled.skew(one)} for one in COMPONENTS}
        _add_spans(rows, sampled)
        if METADATA in sampled.seconds:
            rows["dispatch"]["metadata_us"] = sampled.median_us(METADATA)
        if self._between is None or sampler.name != "graph":
            rows["roundtrip"]["overlap_lost_us"] = _overlap_lost_us(sampled)
        for other in others:
            self._beside(other, problem, sampled, rows)
        rows["roundtrip"] |= self._idle(problem)
        return Measurement(
            clock=sampler.name,
            seconds={one: sampled.seconds[one] for one in COMPONENTS},
            spread={one: sampled.spread[one] for one in COMPONENTS},
            traffic=self._traffic(problem),
            link_gbps=self._run.link_gbps(self._cell),
            error=agreed.error,
            bit_exact=agreed.bit_exact,
            reduction=self._live.reduction.name,
            max_tokens=self._live.max_tokens,
            extra={**sampler.says(), **self._sureness(sampled), **self._load(problem), **speeds},
            by_component=rows,
        )

    def again(self, problem: Problem) -> dict[str, float]:
        """Return the medians of as few samples as a case may have, us: the same case at another time."""
        sampler, sampled = self._timed(self._clocks()[0], problem, FLOOR)
        self._verified(sampler)
        return {one: sampled.median_us(one) for one in COMPONENTS}

    def trace(self, problem: Problem, nodeid: str) -> None:
        """Write a trace of one more pair, where --ep-profile asks for it."""
        folder = self._run.options.profile
        if folder is not None:
            live, ranks = self._live.backend, self._run.ranks

            def write() -> None:
                rows = self._constant_rows(problem)
                tracing.trace_pair(live, problem, rows, ranks, case=nodeid, folder=folder)

            self._together("profile", write)

    def _clocks(self) -> tuple[str, ...]:
        wanted, graph_safe = self._run.options.clocks, self._live.facts.graph_safe
        if wanted != ("auto",):
            # As the owner, a graph clock that cannot be had leaves the case untimed; beside it, a gap.
            return tuple(clock for clock in wanted if clock != "graph" or graph_safe)
        if self._run.ranks.device.type == "cpu":
            return ("host",)
        return ("graph", "event") if graph_safe else ("event",)

    @cached_property
    def _between(self) -> L2Flush | None:
        return L2Flush(self._run.ranks.device) if self._run.options.flush_l2 else None

    def _constant_rows(self, problem: Problem) -> torch.Tensor:
        return checks.constant_rows(problem, self._live.backend.constant_planes(problem))

    def _timed(self, clock: str, problem: Problem, number: int | None) -> tuple[Sampler, Sampled]:
        if clock == "graph":
            sampler: Sampler = self._graph(problem)
        else:
            sampler = self._eager(clock, problem, metadata=number is None)
        return sampler, sample(self._run, sampler, number)

    def _eager(self, name: str, problem: Problem, *, metadata: bool = False) -> EagerSampler:
        backend, ranks = self._live.backend, self._run.ranks
        made: list[EagerSampler] = []

        def build() -> tuple[str, ...]:
            rows, between = self._constant_rows(problem), self._between
            if name == "kernel":
                made.append(KernelSampler(backend, problem, rows, ranks, clock=Profiler(), between=between))
            else:
                clock, make = clocks.choose(name, ranks.device), partial(EagerSampler, metadata=metadata)
                made.append(make(backend, problem, rows, ranks, clock=clock, between=between))
            return made[0].series

        series = self._together("timing: warm-up", build)
        if len(set(series)) > 1:
            apart = [str(rank) for rank, one in enumerate(series) if METADATA in one]
            said = f"metadata() is true on rank {', '.join(apart)} alone: it must be the same on every rank"
            raise AgreedFailure(Failure(said))
        return made[0]

    def _graph(self, problem: Problem) -> GraphSampler:
        backend, ranks = self._live.backend, self._run.ranks
        made: list[GraphSampler] = []

        def guess() -> float:
            routings, rows = self._routings(problem), self._constant_rows(problem)
            return graphs.pair_seconds(backend, routings, rows, ranks)

        # With something between the pairs only the other graph is replayed, once for each routing.
        pair = self._together("timing: a first guess", guess)[0] if self._between is None else 0.0

        def build() -> None:
            routings, rows = self._routings(problem), self._constant_rows(problem)
            made.append(
                GraphSampler(backend, routings, rows, ranks, pair_seconds=pair, between=self._between)
            )

        self._together("timing: capture", build)
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

    def _verified(self, sampler: Sampler) -> Any:
        """Check what the timed combines left, and what the sampler itself saw."""
        backend, exact = self._live.backend, self._run.options.exact

        def verify() -> list[Verdict]:
            verdicts, faults = [], sampler.faults()
            for problem, output in sampler.outputs():
                planes = backend.constant_planes(problem)
                verdict = checks.check_timed_output(problem, output, self._live.reduction, planes, exact)
                for fault in faults:
                    verdict = checks.failing(verdict, "timed_output", fault)
                verdicts.append(verdict)
            return verdicts

        said: list[list[Verdict]] = self._together("timed output", verify)
        agreed = [self._agree(verdicts, "last timed output: ") for verdicts in zip(*said, strict=True)]
        worst = max(agreed, key=lambda one: one.error)
        return replace(worst, bit_exact=min(one.bit_exact for one in agreed))

    def _sureness(self, sampled: Sampled) -> dict[str, JSON]:
        flushed: dict[str, JSON] = {"l2_flushed": True} if self._between is not None else {}
        return {
            "target_ci": self._run.options.target_ci,
            "target_met": sampled.met,
            "timing_s": sampled.elapsed,
            **flushed,
        }

    def _load(self, problem: Problem) -> dict[str, float | int]:
        owned = self._cell.shape.owned(problem.ep_size)
        return load.figures(problem.trace.expert_ids, owned, problem.tokens_by_rank)

    def _traffic(self, problem: Problem) -> Traffic:
        return traffic(
            problem.trace.expert_ids,
            self._cell.shape.owned(problem.ep_size),
            problem.tokens_by_rank,
            hidden=self._cell.shape.hidden,
            index_bytes=INDEX_BYTES[self._live.facts.index_dtype],
            domain=self._live.domain,
        )

    def _beside(self, clock: str, problem: Problem, owner: Sampled, rows: Rows) -> None:
        """Put another clock's medians beside the rows, and what launching costs."""
        sampler, sampled = self._timed(clock, problem, EXTRA_SAMPLES)
        self._verified(sampler)
        for component in COMPONENTS:
            value, owned = sampled.median_us(component), owner.median_us(component)
            rows[component] |= {f"{clock}_p50_us": value, **sampler.says_of(component)}
            if {clock, self._clocks()[0]} == {"event", "graph"}:
                rows[component]["launch_us"] = value - owned if clock == "event" else owned - value
        _add_spans(rows, sampled)

    def _idle(self, problem: Problem) -> dict[str, JSON]:
        """Time the first pair after each pause of --ep-idle, and after none, by the eager clock."""
        pauses = {"steady": 0.0} | {text: duration(text) for text in self._run.options.idle}
        if len(pauses) == 1:
            return {}
        sampler = self._eager("auto", problem)
        medians: dict[str, JSON] = {}
        for name, pause in pauses.items():

            def pairs(pause: float = pause) -> list[float]:
                return [sampler.pair_after(pause) for _ in range(IDLE_SAMPLES)]

            maxima = np.max(self._together("timing after a pause", pairs), axis=0)
            medians[f"idle_{name}_us"] = float(np.median(maxima)) * 1e6
        self._verified(sampler)
        return medians

    def _speeds(self) -> list[device.Speed | None]:
        """The speeds of all ranks' devices, none without devices."""
        if self._run.ranks.device.type == "cpu":
            return []
        return self._together("device speed", partial(device.speed, self._run.ranks.device))


def _overlap_lost_us(sampled: Sampled) -> float:
    dispatch, combine, roundtrip = (sampled.median_us(one) for one in COMPONENTS)
    return dispatch + combine - roundtrip


def _add_spans(rows: Rows, sampled: Sampled) -> None:
    for component in COMPONENTS:
        if component + SPAN in sampled.seconds:
            rows[component]["kernel_span_us"] = sampled.median_us(component + SPAN)
