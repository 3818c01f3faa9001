"""Every report is agreed by all ranks before pytest sees it."""

from __future__ import annotations

from typing import Any

import pytest

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

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> object:
        """Say which item this rank is at."""
        self.current = item
        self._run.pulse.begin_case(item.nodeid)
        try:
            return (yield)
        finally:
            self._run.pulse.begin_case("")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Turn this rank's report into the one that all ranks make."""
        report: pytest.TestReport = yield
        failure = self._agree(item, call, report)
        if failure is not None:
            report.outcome = "failed"
            if hasattr(report, "wasxfail"):
                del report.wasxfail
            if call.excinfo is None or not call.excinfo.errisinstance(AgreedFailure):
                report.longrepr = failure.reason
        self._note(item, call, report, failure)
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
        vote = Vote(outcome, stop=fate.ballot.stop)
        if outcome == "failed" and not isinstance(raised, AgreedFailure):
            text = report.longreprtext
            place = fate.leave(str(report.when))
            fate.say_failed(str(report.when), text)
            vote = Vote(outcome, text, place, stop=fate.ballot.stop)
        votes, failure = fate.settle(phase, vote)
        if isinstance(raised, AgreedFailure):
            failure = raised.failure
        stop = next((vote.stop for vote in votes if vote.stop), "")
        if stop and report.when == "teardown":
            item.session.shouldstop = stop
        return failure

    def _note(
        self,
        item: pytest.Item,
        call: pytest.CallInfo[None],
        report: pytest.TestReport,
        failure: Failure | None,
    ) -> None:
        run, planned = self._run, item.stash.get(PLANNED, None)
        if planned is None:
            return
        if report.when == "call" and not report.skipped:
            run.executed += 1
        if failure is not None:
            recorder = getattr(item, "funcargs", {}).get("ep_recorder")
            if isinstance(recorder, Recorder):
                recorder.discard()
            run.ledger.add(_failed(item, planned.cell, failure))
        elif report.skipped:
            skip = planned.skip
            code, reason = (skip.code, skip.reason) if skip else ("skipped", report.longreprtext)
            if call.excinfo is not None and isinstance(call.excinfo.value, AgreedSkip):
                code, reason = call.excinfo.value.code, call.excinfo.value.reason
            run.ledger.add(CaseResult(item.nodeid, planned.cell, "skipped", reason, code))
        else:
            result = run.ledger.of(item.nodeid)
            if report.when == "call" and result is not None:
                rows = {component: row["p50_us"] for component, row in result.rows.items()}
                report.user_properties += [(f"{component}_us", value) for component, value in rows.items()]


def _failed(item: pytest.Item, cell: Any, failure: Failure) -> CaseResult:
    return CaseResult(
        item.nodeid,
        cell,
        "failed",
        failure.reason,
        failure.code,
        failure.diagnosis,
        failure.rank,
        failure.token,
        failure.column,
        failure.error,
        failure.bit_exact,
    )
