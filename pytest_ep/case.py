"""One case from its problem to its rows."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

from pytest_ep import drift
from pytest_ep.backends.base import EPBackend
from pytest_ep.command import repeating
from pytest_ep.matrix.cells import Cell
from pytest_ep.measure import Timing
from pytest_ep.oracle import checks
from pytest_ep.oracle import repetition
from pytest_ep.oracle.checks import Verdict
from pytest_ep.oracle.diagnosis.report import diagnose
from pytest_ep.ranks.fate import AgreedFailure
from pytest_ep.ranks.fate import Failure
from pytest_ep.results.record import DRIFT
from pytest_ep.results.record import JSON
from pytest_ep.results.record import CaseResult
from pytest_ep.results.record import Recorder
from pytest_ep.run import Run
from pytest_ep.transports import Live
from pytest_ep.workload.problem import Problem
from pytest_ep.workload.problem import build_problem


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
        self._timing = Timing(run, live, cell, self._agree)

    def run(self) -> None:
        """Check, time, check again, record. Raises AgreedFailure on all ranks where any check fails."""
        problem = self._problem(self._cell)
        before = self._oracle(problem, "oracle before timing")
        if reason := self._untimed():
            self._timing.trace(problem, self._nodeid)
            said = self._repeat(problem)
            reason += (
                f"; {said['repeats']} repetitions, identical: {said['repeats_identical']}" if said else ""
            )
            result = CaseResult(self._nodeid, self._cell, "checked", reason)
            self._finish(replace(result, error=before.error, bit_exact=before.bit_exact))
            return
        measurement = self._timing.measure(problem)
        self._timing.trace(problem, self._nodeid)
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
        self._time_first_again()

    def _time_first_again(self) -> None:
        """Where this was the key's last case, time its first once more: what changed meanwhile is drift."""
        first = drift.first_rung(self._run, self._nodeid)
        if first is not None:
            timing = Timing(self._run, self._live, first.cell, self._agree)
            try:
                again = timing.again(self._problem(first.cell))
            except AgreedFailure as failed:  # not this case's, which is finished, but the run's
                name = f"{first.nodeid} again, after the last"
                self._run.ledger.add(CaseResult.failed(name, first.cell, failed.failure, DRIFT))
            else:
                self._run.ledger.drift[first.cell.key] = drift.entry(first, again)

    def _finish(self, result: CaseResult) -> None:
        versions = self._live.backend.versions
        self._run.ledger.add(replace(result, identity=self._run.identify(self._cell), versions=versions))

    def _problem(self, cell: Cell) -> Problem:
        ranks = self._run.ranks
        shares = cell.tokens_by_rank
        built: list[Problem] = []

        def build() -> None:
            problem = build_problem(
                cell.shape,
                self._live.routes.of(shares),
                ranks.rank,
                shares,
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
            return checks.inputs_changed(verdict, problem)
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
                wrong[number] = failure(verdicts, failed, "", self._command())
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
        return self._timing.refusal()

    def _agree(self, verdicts: Sequence[Verdict], where: str = "") -> Agreed:
        """Combine verdicts by AND: a failure anywhere is raised everywhere."""
        failed = [rank for rank, verdict in enumerate(verdicts) if not verdict.passed]
        if failed:
            raise AgreedFailure(failure(verdicts, failed, where, self._command()))
        return Agreed(
            max((verdict.error for verdict in verdicts), default=0.0),
            min((verdict.bit_exact for verdict in verdicts), default=1.0),
        )

    def _command(self) -> str:
        run = self._run
        return repeating(run.config, run.identity, self._cell, self._nodeid, self._live.largest)


def failure(verdicts: Sequence[Verdict], failed: Sequence[int], where: str, repeat: str) -> Failure:
    """Return what all ranks report: of those whose fault comes first, the one with the largest error speaks.

    A fault of dispatch shows in combine too, on other ranks: who saw the cause is who says it. ``repeat`` is
    the command that repeats the case, for the diagnosis of the ranks' evidence.
    """

    def place(rank: int) -> tuple[int, float, int]:
        error = verdicts[rank].error
        first = min(checks.order(name) for name in verdicts[rank].failed)
        return first, -math.inf if math.isnan(error) else -error, rank

    speaker = min(failed, key=place)
    verdict = verdicts[speaker]
    others = f" (and ranks {', '.join(map(str, failed))} in all)" if len(failed) > 1 else ""
    names = dict.fromkeys(name for rank in failed for name in verdicts[rank].failed)
    worst = verdict.worst
    found = diagnose([one.evidence for one in verdicts], repeat)
    return Failure(
        f"{where}{verdict.message}{others}",
        code=",".join(sorted(names, key=checks.order)),
        rank=speaker,
        token=worst.token if worst else None,
        column=worst.column if worst else None,
        error=verdict.error,
        bit_exact=min(verdicts[rank].bit_exact for rank in failed),
        diagnosis=found.text if found else "",
        evidence=found.data if found else {},
    )
