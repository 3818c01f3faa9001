"""Every report is agreed by all ranks before pytest sees it."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from pytest_ep.matrix.cells import Skip
from pytest_ep.ranks.fate import AgreedFailure
from pytest_ep.ranks.fate import AgreedSkip
from pytest_ep.ranks.fate import Failure
from pytest_ep.ranks.fate import Vote
from pytest_ep.results.record import CaseResult
from pytest_ep.results.record import Recorder
from pytest_ep.results.summary import case_line
from pytest_ep.run import PLANNED
from pytest_ep.run import Run


class Reports:
    """Registered once EP cases are collected: the ballot after setup, call and teardown of every item."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.current: pytest.Item | None = None
        self._next: pytest.Item | None = None
        self._case_began = run.began
        self._longest = 0.0
        self._rows: dict[str, list[dict[str, Any]]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> object:
        """Say which item this rank is at."""
        self.current, self._next = item, nextitem
        self._case_began = time.monotonic()
        ballot = self._run.fate.ballot
        ballot.begin_case(item.nodeid)
        # A test that is no case gives no sign of life.
        ours = PLANNED in item.stash
        limit = self._run.options.case_timeout
        try:
            with contextlib.nullcontext() if ours else ballot.pulse.long_phase("a test", limit):
                return (yield)
        finally:
            ballot.begin_case("")
            self.current = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Turn this rank's report into the one that all ranks make."""
        report: pytest.TestReport = yield
        failure = self._agree(item, call, report)
        if failure is not None:
            report.outcome = "failed"
            if hasattr(report, "wasxfail"):
                del report.wasxfail
            raised = call.excinfo.value if call.excinfo is not None else None
            if not (isinstance(raised, AgreedFailure) and raised.failure is failure):
                report.longrepr = "\n".join(filter(None, (failure.reason, failure.diagnosis)))
        self._note(item, call, report, failure)
        if report.when == "teardown":
            self._journal(item)
        return report

    def pytest_report_teststatus(self, report: pytest.TestReport, config: pytest.Config) -> Any:
        """Show a timed case's three medians in the verbose line."""
        result = self._run.ledger.of(report.nodeid)
        if report.when == "call" and report.passed and result is not None and (line := case_line(result)):
            return "passed", ".", f"PASSED {line}"
        return None

    def _agree(
        self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> Failure | None:
        fate, phase = self._run.fate, f"{report.when} of {item.nodeid}"
        outcome: str = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        raised = call.excinfo.value if call.excinfo is not None else None
        stop = self._stop(report.when)
        vote = Vote(outcome, _reason(report, raised), stop=stop)
        if outcome == "failed" and not isinstance(raised, AgreedFailure):
            text = report.longreprtext
            place = fate.leave(str(report.when))
            if place == 1:  # as in work done together
                fate.say_failed(str(report.when), text)
            vote = Vote(outcome, text, place, stop=stop)
        votes, failure = fate.settle(phase, vote)
        if isinstance(raised, AgreedFailure) and {(one.outcome, one.place) for one in votes} == {
            (outcome, 0)
        }:
            failure = raised.failure if outcome == "failed" else None  # None of an expected failure
        stop = next((vote.stop for vote in votes if vote.stop), "")
        if stop and report.when == "teardown":
            item.session.shouldstop = self._run.ledger.stopped_by = stop
        return failure

    def _stop(self, when: str | None) -> str:
        """Why this rank wants the session to end after this case: Ctrl-C, or the session's budget is used."""
        run, budget = self._run, self._run.options.session_budget
        if run.fate.ballot.stop or when != "teardown" or budget is None:
            return run.fate.ballot.stop
        now = time.monotonic()
        self._longest = max(self._longest, now - self._case_began)
        if self._next is None or self._next.get_closest_marker("skip") is not None:
            return ""
        if run.identity.rank == 0 and now - run.began + self._longest > budget:
            return f"--ep-session-budget: {budget:g} s would not hold another case of {self._longest:.1f} s"
        return ""

    def _journal(self, item: pytest.Item) -> None:
        """Put a finished case on disk before the next begins."""
        run, result = self._run, self._run.ledger.of(item.nodeid)
        if run.journal is None or result is None or item.nodeid in run.resumed:  # those it began with
            return
        run.journal.add(result, self._rows.pop(item.nodeid, []))

    def discard(self, item: pytest.Item) -> None:
        """Leave no row of a case that has not passed."""
        if recorder := _recorder(item):
            recorder.discard()
        self._rows.pop(item.nodeid, None)

    def _note(
        self,
        item: pytest.Item,
        call: pytest.CallInfo[None],
        report: pytest.TestReport,
        failure: Failure | None,
    ) -> None:
        run, planned = self._run, item.stash.get(PLANNED, None)
        if planned is None or item.nodeid in run.resumed:
            return
        if report.when == "call" and not report.skipped:
            run.executed += 1
        if failure is not None:
            self.discard(item)
            probe = item.callspec.params.get("probe", "")  # type: ignore[attr-defined]
            run.ledger.add(CaseResult.failed(item.nodeid, planned.cell, failure, probe))
        elif report.skipped:
            self.discard(item)
            code, reason = _why_skipped(planned.skip, call, report)
            run.ledger.add(CaseResult(item.nodeid, planned.cell, "skipped", reason, code))
        else:
            result = run.ledger.of(item.nodeid)
            if report.when == "call" and result is not None:
                recorder = _recorder(item)
                self._rows[item.nodeid] = recorder.rows() if recorder else []
                rows = {component: row["p50_us"] for component, row in result.rows.items()}
                report.user_properties += [(f"{component}_us", value) for component, value in rows.items()]


def _why_skipped(
    skip: Skip | None, call: pytest.CallInfo[None], report: pytest.TestReport
) -> tuple[str, str]:
    """The matrix's reason, the transport's, or a test's own."""
    raised = call.excinfo.value if call.excinfo is not None else None
    if hasattr(report, "wasxfail"):
        said = raised.failure.reason if isinstance(raised, AgreedFailure) else str(raised)
        return "xfail", ": ".join(filter(None, (report.wasxfail, said)))
    if isinstance(raised, AgreedSkip):
        return raised.code, raised.reason
    if skip is not None:
        return skip.code, skip.told
    return "skipped", _own_skip(report)


def _own_skip(report: pytest.TestReport) -> str:
    """The reason alone: pytest keeps where the skip was raised beside it."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return text.removeprefix("Skipped: ")


def _reason(report: pytest.TestReport, raised: BaseException | None) -> str:
    """What the other ranks are told of an outcome that all expect or that is not this rank's own doing."""
    if isinstance(raised, AgreedFailure):
        return raised.failure.reason
    return _own_skip(report) if report.skipped and not hasattr(report, "wasxfail") else ""


def _recorder(item: pytest.Item) -> Recorder | None:
    recorder = getattr(item, "funcargs", {}).get("ep_recorder")
    return recorder if isinstance(recorder, Recorder) else None
