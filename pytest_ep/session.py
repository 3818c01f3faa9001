"""A session of EP cases: from the moment it is known to be one until its files are written."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections.abc import Generator
from collections.abc import MutableMapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import pytest

from pytest_ep import gate
from pytest_ep.matrix.machine import run_command
from pytest_ep.ranks.ending import early_report
from pytest_ep.ranks.launch import EXIT_FILE
from pytest_ep.ranks.watchdog import Ending
from pytest_ep.ranks.watchdog import Limits
from pytest_ep.ranks.watchdog import Watchdog
from pytest_ep.reports import Reports
from pytest_ep.results import artifact
from pytest_ep.results import curves
from pytest_ep.results import environment
from pytest_ep.results import hosts
from pytest_ep.results import invocation
from pytest_ep.results import topology
from pytest_ep.results.record import CaseResult
from pytest_ep.results.summary import write_summary
from pytest_ep.run import PLANNED
from pytest_ep.run import Run
from pytest_ep.run import announce

if TYPE_CHECKING:
    from pytest_ep.results.record import JSON

DESCRIBING = 120.0
"""Seconds that rank 0 may take to ask the machine and its libraries what they are."""
WRITING = 600.0
"""Seconds that the reporter may take for its files and summary; the other ranks watch that it lives."""
LAST_WRITING = 4.0
"""Seconds that are left for it once the run is told to end."""
DEBUGGING = 1e6
"""Seconds without a limit: a person is at a prompt."""


def begin(run: Run) -> None:
    """Take over the session: other ranks fall silent, reports are agreed, ranks are watched."""
    config = run.config
    if run.held is not None:
        run.held.drop()
    if run.usage_error is not None:
        _refuse(run, run.usage_error)
    reports = Reports(run)
    config.pluginmanager.register(reports, "ep-reports")
    if config.option.collectonly and run.identity.size == 1:
        return
    if run.identity.rank == 0 and not config.option.collectonly:
        run.refusal = artifact.prepare(config)
        if run.options.resume is not None and not run.refusal:
            _resume(run, run.options.resume)
    session = EPSession(run, reports)
    config.pluginmanager.register(session, "ep-session")
    session.watchdog.start()


def _resume(run: Run, path: Path) -> None:
    try:
        run.resumed = artifact.resumable(path)
    except pytest.UsageError as error:
        run.refusal = str(error)


def _refuse(run: Run, error: pytest.UsageError) -> None:
    announce(run.identity, "refuses to begin", str(error))
    if run.reporter:
        raise error
    artifact.silence(run.config)
    pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


class EPSession:
    """Registered for a session that runs EP cases."""

    def __init__(self, run: Run, reports: Reports) -> None:
        self._run = run
        self._reports = reports
        # Now: transports set variables of their own.
        self._started = invocation.started(run.config.invocation_params.args, run.identity, os.environ)
        self._finishing = threading.Event()
        self._finished = threading.Event()
        limits = Limits(rank=run.options.rank_timeout, case=run.options.case_timeout)
        if any(run.config.getoption(name, False) for name in ("usepdb", "trace")):
            limits = Limits(rank=DEBUGGING, case=DEBUGGING)
        self.watchdog = Watchdog(
            run.identity,
            run.fate_store,
            run.fate.ballot,
            limits,
            report=self._end_early,
            printed=self._printed,
            free=run.free,
            stderr=run.stderr,
        )

    def pytest_report_collectionfinish(self) -> list[str]:
        """Say what runs here."""
        run = self._run
        ranks = run.identity.size
        more = "" if ranks > 1 else "; more with --ep-nproc N, or under torchrun"
        where = run.machine.product or run.machine.sku
        return [f"ep: {ranks} rank{'s' * (ranks != 1)} on {where} (sku {run.machine.sku}){more}"]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> object:
        """Begin the journal; leave together: whoever leaves early tells the others, who would wait for it."""
        run = self._run
        try:
            if run.reporter and not run.config.option.collectonly:
                with run.pulse.long_phase("describing the machine", DESCRIBING):
                    self._open_journal()
            result = yield
            run.fate.ballot.gather("end of session", None)
        except BaseException as error:
            if not isinstance(error, pytest.Session.Interrupted | pytest.Session.Failed):
                run.ledger.stopped_by = run.ledger.stopped_by or str(error)
            run.fate.part(error)
            raise
        finally:
            run.close()
            if not run.reporter:
                artifact.silence(run.config)
            elif run.recorded == 0:
                self._write_without_rows()
        return result

    def pytest_runtest_logstart(self) -> None:
        """Hear signals in every test, whatever the one before has done to them."""
        self.watchdog.listen()

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Let the reporter finish first: torchrun ends every rank as soon as one has failed."""
        self._finished.set()
        leave = self.watchdog.stop
        self._run.fate.ballot.follow("goodbye", leads=self._run.reporter, limit=WRITING, leave=leave)
        leave()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Any:
        """Decide the exit code and write what pytest-benchmark does not."""
        self._finishing.set()
        with self._run.pulse.long_phase("writing the results", WRITING):
            return (yield from self._finish(session))

    def _finish(self, session: pytest.Session) -> Generator[None, object, object]:
        run = self._run
        if not run.config.option.collectonly and session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = gate.judge(run)
        try:
            result = yield
        except OSError as error:
            if run.journal is None or not run.reporter:
                raise
            pytest.exit(artifact.unwritten(run.config, error), returncode=pytest.ExitCode.INTERNAL_ERROR)
        if run.reporter and (path := os.environ.get(EXIT_FILE)):
            Path(path).write_text(str(int(session.exitstatus)))
        if run.journal is not None and run.reporter:
            run.journal.remove()
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        """Print a table for each key, then why an all-green run may still not be a pass."""
        write_summary(terminalreporter, self._run.ledger)
        if exitstatus == pytest.ExitCode.USAGE_ERROR:
            return  # that is why
        for line in self._complaints():
            terminalreporter.write_line(f"ep: {line}", red=True)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_benchmark_generate_machine_info(self) -> dict[str, Any] | None:
        """Give what the journal has: pytest-benchmark takes a second to ask the processor again."""
        return copy.deepcopy(self._run.machine_info)

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, machine_info: MutableMapping[str, Any]) -> None:
        """Add the hardware, drop what changes from second to second."""
        run = self._run
        sku = run.platforms.sku(run.machine.sku, run.machine.devices)
        environment.drop_jitter(machine_info)
        machine_info["pytest_ep"] = environment.hardware(
            run.machine, sku.link, sku.gbps, run.ranks_by_host, self._survey
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_commit_info(self, commit_info: MutableMapping[str, Any]) -> None:
        """Add the software, and how the run was started."""
        environment.admit_unknown(commit_info)
        commit_info["pytest_ep"] = environment.software(self._run.versions, self._started)

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_json(self, output_json: MutableMapping[str, Any]) -> None:
        """Add what an earlier run finished, and every case that left no row, with why."""
        earlier = [row for entry in self._run.resumed.values() for row in entry["rows"]]
        output_json["benchmarks"] = [*earlier, *output_json["benchmarks"]]
        output_json["pytest_ep"] = self._section()

    @pytest.hookimpl(optionalhook=True, wrapper=True)
    def pytest_benchmark_group_stats(self, config: pytest.Config) -> Any:
        """Keep our rows out of pytest-benchmark's own tables, unless something of them was asked for."""
        groups = yield
        if any(
            config.getoption(f"benchmark_{wish}", None) for wish in ("compare", "compare_fail", "histogram")
        ):
            return groups
        return [
            (name, rows)
            for name, rows in groups
            if not all("component" in (row["params"] or {}) for row in rows)
        ]

    @cached_property
    def _survey(self) -> dict[str, JSON]:
        """Asked once; of no driver by a rank that writes in place of a lost one, as that may hang it."""
        asked = run_command if self._run.identity.rank == 0 else lambda argv: None
        return topology.survey(os.environ, command=asked)

    def _section(self) -> dict[str, Any]:
        run, session = self._run, self._run.session
        assert session is not None
        run.ledger.not_run = [nodeid for nodeid in self._selected() if run.ledger.of(nodeid) is None]
        why = session.shouldstop or session.shouldfail or "the run ended"
        run.ledger.stopped_by = run.ledger.stopped_by or str(why)
        return {
            **run.ledger.section(),
            "medians": hosts.medians(run.ledger, run.ranks_by_host),
            "fits": curves.fits(curves.rows_of(run.ledger)),
        }

    def _selected(self) -> list[str]:
        return [item.nodeid for item in self._planned()]

    def _planned(self) -> list[pytest.Item]:
        assert self._run.session is not None
        return [item for item in self._run.session.items if PLANNED in item.stash]

    def _complaints(self) -> list[str]:
        refused = self._run.journal is None and artifact.result_path(self._run.config)
        if refused or self._run.config.option.collectonly:
            return []  # nothing was to run, or an error says why nothing could
        return gate.complaints(self._run)

    def _open_journal(self) -> None:
        run = self._run
        if path := artifact.result_path(run.config):
            if any(item.stash[PLANNED].skip is None for item in self._planned()):
                import torch  # noqa: F401 - the first case would, and the head is to say its version
            run.machine_info, commit_info = artifact.describe(run.config)
            run.journal = artifact.open_journal(
                path, self._selected(), run.machine_info, commit_info, run.resumed.values()
            )

    def _write_without_rows(self, began: bool = False) -> None:
        """Write the result file in pytest-benchmark's stead, which would warn that it writes none."""
        if self._run.config._benchmarksession.benchmarks:  # type: ignore[attr-defined]
            return  # of tests beside the cases: it writes
        if began or self._run.journal is not None:
            artifact.write_without_rows(self._run.config)
        artifact.silence_benchmark(self._run.config)

    def _printed(self) -> str:
        capture = self._run.config.pluginmanager.getplugin("capturemanager")
        if capture is None or not capture.is_globally_capturing():
            return ""
        out, err = capture.read_global_capture()
        return "\n".join((out + err).splitlines()[-10:])

    def _end_early(self, ending: Ending) -> None:
        """Write report, JUnit and results from what this rank knows. In the watchdog's thread."""
        run = self._run
        if self._finishing.is_set() and run.reporter:  # the main thread is at it, and no case is to come
            done = self._finished.wait(LAST_WRITING)
            lacks = "" if done else ": what they lack is in the journal"
            run.say(f"{ending.cause}, while results were written{lacks}")
            return
        run.reporter = True
        if run.held is not None:
            run.held.release()
        began = time.time() - (time.monotonic() - run.began)
        alone = artifact.claimed(run.config, began) if ending.alone else contextlib.nullcontext(True)
        with alone as may_write:
            if not may_write:
                artifact.silence(run.config)
                run.journal = None
            self._report_early(early_report(ending))

    def _report_early(self, text: str) -> None:
        run, session, item = self._run, self._run.session, self._reports.current
        assert session is not None
        config = run.config
        if capture := config.pluginmanager.getplugin("capturemanager"):
            capture.suspend_global_capture(in_=True)
        if item is not None:
            report = pytest.TestReport(
                item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", text, "call"
            )
            if planned := item.stash.get(PLANNED, None):
                self._reports.discard(item)
                reason = text.splitlines()[0]
                run.ledger.add(CaseResult(item.nodeid, planned.cell, "failed", reason, diagnosis=text))
            config.hook.pytest_runtest_logreport(report=report)
        else:
            config.pluginmanager.getplugin("terminalreporter").write_line(text, red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if run.recorded == 0 and config.pluginmanager.has_plugin("benchmark"):
            self._write_without_rows(item is not None)
        # The runner would tear down fixtures, which waits for the ranks that are lost.
        config.pluginmanager.unregister(name="runner")
        config.hook.pytest_sessionfinish(session=session, exitstatus=session.exitstatus)
