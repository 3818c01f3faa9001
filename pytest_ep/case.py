"""One case from its problem to its rows."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

from pytest_ep.backends.base import EPBackend
from pytest_ep.matrix.cells import Cell
from pytest_ep.oracle import checks
from pytest_ep.oracle import repetition
from pytest_ep.oracle.checks import Verdict
from pytest_ep.ranks.fate import AgreedFailure
from pytest_ep.ranks.fate import Failure
from pytest_ep.results.record import JSON
from pytest_ep.results.record import CaseResult
from pytest_ep.results.record import Measurement
from pytest_ep.results.record import Recorder
from pytest_ep.run import Run
from pytest_ep.timing import clocks
from pytest_ep.timing import sampling
from pytest_ep.timing import statistics
from pytest_ep.timing.traffic import traffic
from pytest_ep.transports import Live
from pytest_ep.workload.problem import Problem
from pytest_ep.workload.problem import build_problem

INDEX_BYTES = {"int32": 4, "int64": 8}


@dataclass(frozen=True, slots=True)
class Agreed:
    """The ranks' verdicts as one: the largest error, the least bit-exact share."""

    error: float
    bit_exact: float


class Case:
    """A cell that runs: every step is taken by all ranks together, and fails on all where it fails on one."""

    def __init__(self, run: Run, live: Live, cell: Cell, recorder: Recorder, nodeid: str) -> None:
        self._run = run
        self._live = live
        self._cell = cell
        self._recorder = recorder
        self._nodeid = nodeid
        self._together = run.fate.together

    def run(self) -> None:
        """Check, time, check again, record. Raises AgreedFailure on all ranks where any check fails."""
        problem = self._problem()
        before = self._oracle(problem, "oracle before timing")
        if reason := self._untimed():
            said = self._repeat(problem)
            reason += (
                f"; {said['repeats']} repetitions, identical: {said['repeats_identical']}" if said else ""
            )
            result = CaseResult(self._nodeid, self._cell, "checked", reason)
            self._finish(replace(result, error=before.error, bit_exact=before.bit_exact))
            return
        measurement = self._timing(problem)
        after = self._oracle(problem, "oracle after timing")
        measurement = replace(
            measurement,
            extra={**measurement.extra, **self._repeat(problem)},
            error=max(before.error, measurement.error, after.error),
            bit_exact=min(before.bit_exact, measurement.bit_exact, after.bit_exact),
        )
        self._together("recording", lambda: self._recorder.record(measurement))
        self._run.recorded += 1
        self._finish(CaseResult.timed(self._nodeid, self._cell, measurement))

    def _finish(self, result: CaseResult) -> None:
        versions = self._live.backend.versions
        self._run.ledger.add(replace(result, identity=self._run.identify(self._cell), versions=versions))

    def _problem(self) -> Problem:
        ranks, cell = self._run.ranks, self._cell
        built: list[Problem] = []

        def build() -> None:
            problem = build_problem(
                cell.shape,
                self._live.trace(cell.tokens * ranks.size),
                ranks.rank,
                (cell.tokens,) * ranks.size,
                ranks.device,
                self._live.facts.index_dtype,
            )
            built.append(problem)

        self._together("problem", build)
        return built[0]

    def _oracle(self, problem: Problem, phase: str) -> Agreed:
        return self._agree(self._together(phase, lambda: self._check(self._live.backend, problem)))

    def _check(self, backend: EPBackend, problem: Problem) -> Verdict:
        ranks = self._run.ranks
        if self._run.options.poison:
            repetition.poison(backend, problem)
            ranks.synchronize()
            ranks.barrier()
        verdict = checks.run_oracle(backend, problem, self._live.reduction, self._run.options.exact)
        ranks.synchronize()
        if not checks.inputs_unchanged(problem):
            return failing(verdict, "inputs", "the transport changed its inputs")
        return verdict

    def _repeat(self, problem: Problem) -> dict[str, JSON]:
        """Repeat the oracle as --ep-repeat asks; rare corruption fails as "k of N"."""
        if self._run.options.repeat is None:
            return {}
        times, seconds = self._run.options.repeat
        overheard, began = repetition.Overheard(self._live.backend), time.monotonic()
        wrong: dict[int, Failure] = {}
        number, identical = 0, True

        def once() -> tuple[Verdict, bool, float]:
            verdict = self._check(overheard.backend, problem)
            return verdict, overheard.identical, time.monotonic() - began

        while number != times:
            number += 1
            said: list[Any] = self._together("repetition", once)
            verdicts = [verdict for verdict, _, _ in said]
            failed = [rank for rank, verdict in enumerate(verdicts) if not verdict.passed]
            if failed:
                wrong[number] = failure(verdicts, failed, "")
            identical = identical and all(same for _, same, _ in said)
            if seconds is not None and said[0][2] >= seconds:  # rank 0's clock is everyone's
                break
        if wrong:
            first, cause = next(iter(wrong.items()))
            which = ", ".join(map(str, list(wrong)[:8]))
            text = f"{len(wrong)} of {number} repetitions wrong ({which}); the {first}. was: {cause.reason}"
            raise AgreedFailure(replace(cause, reason=text))
        return {"repeats": number, "repeats_identical": identical}

    def _untimed(self) -> str:
        """Why this case is checked only; the same on every rank."""
        run = self._run
        if self._recorder.disabled:
            return "not timed: --benchmark-disable"
        if run.ranks.oversubscribed:
            sharing = f"{run.identity.local_size} ranks share {run.machine.devices} GPUs"
            return f"not timed: {sharing}, so each kernel waits for its time slice"
        return ""

    def _timing(self, problem: Problem) -> Measurement:
        run, backend, reduction = self._run, self._live.backend, self._live.reduction
        clock = clocks.choose(run.options.clock, run.ranks.device)

        def sample() -> tuple[dict[str, list[float]], Verdict]:
            planes = backend.constant_planes(problem)
            rows = checks.constant_rows(problem, planes)
            taken = sampling.sample(
                backend, problem, rows, run.ranks, clock=clock, iterations=run.options.iterations
            )
            verdict = checks.check_timed_output(problem, taken.output, reduction, planes, run.options.exact)
            return taken.seconds, verdict

        said: list[Any] = self._together("timing", sample)
        agreed = self._agree([verdict for _, verdict in said], "last timed output: ")
        seconds, spread = {}, {}
        for component in sampling.COMPONENTS:
            try:
                both = statistics.combine_ranks([taken[component] for taken, _ in said])
            except statistics.SampleError as error:
                raise AgreedFailure(Failure(f"{component}: {error}")) from None
            seconds[component], spread[component] = both
        return Measurement(
            clock=clock.name,
            seconds=seconds,
            spread=spread,
            traffic=traffic(
                problem.trace.expert_ids,
                self._cell.shape.owned(problem.ep_size),
                problem.tokens_by_rank,
                self._cell.shape.hidden,
                INDEX_BYTES[self._live.facts.index_dtype],
            ),
            link_gbps=run.link_gbps(self._cell),
            error=agreed.error,
            bit_exact=agreed.bit_exact,
            reduction=reduction.name,
            max_tokens=self._live.max_tokens,
        )

    def _agree(self, verdicts: Sequence[Verdict], where: str = "") -> Agreed:
        """Combine verdicts by AND: a failure anywhere is raised everywhere."""
        failed = [rank for rank, verdict in enumerate(verdicts) if not verdict.passed]
        if failed:
            raise AgreedFailure(failure(verdicts, failed, where))
        return Agreed(
            max((verdict.error for verdict in verdicts), default=0.0),
            min((verdict.bit_exact for verdict in verdicts), default=1.0),
        )


def failing(verdict: Verdict, check: str, message: str) -> Verdict:
    """Return the verdict with one more failed check."""
    said = f"{verdict.message}; {check}: {message}" if verdict.message else f"{check}: {message}"
    return replace(verdict, passed=False, failed=(*verdict.failed, check), message=said)


def failure(verdicts: Sequence[Verdict], failed: Sequence[int], where: str) -> Failure:
    """Return what all ranks report: the failing rank with the largest error speaks for all."""

    def error(rank: int) -> float:
        return math.inf if math.isnan(verdicts[rank].error) else verdicts[rank].error

    speaker = max(failed, key=lambda rank: (error(rank), -rank))
    verdict = verdicts[speaker]
    others = f" (and ranks {', '.join(map(str, failed))} in all)" if len(failed) > 1 else ""
    names = dict.fromkeys(name for rank in failed for name in verdicts[rank].failed)
    worst = verdict.worst
    return Failure(
        f"{where}{verdict.message}{others}",
        code=",".join(names),
        rank=speaker,
        token=worst.token if worst else None,
        column=worst.column if worst else None,
        error=verdict.error,
        bit_exact=min(verdicts[rank].bit_exact for rank in failed),
    )
