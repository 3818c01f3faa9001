"""What a run must have shown to pass: --ep-require, and that any case was executed at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest

from pytest_ep.run import PLANNED

if TYPE_CHECKING:
    from _pytest.mark.expression import Expression

    from pytest_ep.run import Run

RERUN_OPTIONS = ("reruns", "retries", "force_reruns", "force_flaky")
"""Of pytest-rerunfailures, pytest-retry and flaky; the first two are ini options, too."""
NOTHING_EXECUTED = "no case was executed: exit code 5 (--ep-allow-skips to accept that)"


def compiled(text: str) -> Expression:
    """Compile a requirement in the syntax of -k. Raises ValueError."""
    from _pytest.mark.expression import Expression  # pytest offers it under no other name

    if not text.strip():
        raise ValueError("is empty, give an expression as for -k, as 'flashinfer_ep and ep08'")
    if "=" in text:
        raise ValueError("has a '=', which expressions as for -k do not")
    try:
        return Expression.compile(text)
    except SyntaxError as error:
        raise ValueError(f"at column {error.offset} {error.msg}, give an expression as for -k") from None


def unmet(run: Run) -> list[str]:
    """Return the requirements that no case which was executed and passed meets; a probe is no case."""
    from _pytest.mark import KeywordMatcher

    required = run.config.getoption("ep_require") or ()
    items = run.session.items if required and run.session is not None else []
    passed = [
        KeywordMatcher.from_item(item)
        for item in items
        if PLANNED in item.stash
        and (result := run.ledger.of(item.nodeid)) is not None
        and result.outcome in ("timed", "checked")
    ]
    return [text for text in required if not any(compiled(text).evaluate(case) for case in passed)]


def judge(run: Run) -> pytest.ExitCode:
    """Return the exit code of a run in which pytest saw nothing fail."""
    if run.active and any(result.outcome == "failed" for result in run.ledger):
        return pytest.ExitCode.TESTS_FAILED  # what ran it again hid it
    if _nothing_ran(run):
        return pytest.ExitCode.NO_TESTS_COLLECTED
    return pytest.ExitCode.TESTS_FAILED if unmet(run) else pytest.ExitCode.OK


def complaints(run: Run) -> list[str]:
    """Say why a run in which no test failed is no pass."""
    from pytest_ep.results.record import ASIDE

    failed = [one for one in run.ledger if one.outcome == "failed" and one.probe in ASIDE]
    lines = [f"{one.nodeid}: {one.reason}" for one in failed]
    lines += [f"--ep-require {text!r}: no such case was executed and passed" for text in unmet(run)]
    if _nothing_ran(run):
        lines.append(NOTHING_EXECUTED)
    return lines


def _nothing_ran(run: Run) -> bool:
    """Whether no case was executed, nor failed before it could be; of no concern to a run of other tests."""
    items = run.session.items if run.session is not None else []
    if not run.active or (items and not any(PLANNED in item.stash for item in items)):
        return False
    failed = any(result.outcome == "failed" for result in run.ledger)
    return not (failed or run.executed or run.resumed or run.options.allow_skips)


def reruns(config: pytest.Config, items: Iterable[pytest.Item]) -> str:
    """Say what would run a failed case again, or ""."""
    named = [f"--{name.replace('_', '-')}" for name in RERUN_OPTIONS if config.getoption(name, None)]
    named += [f"the ini option {name}" for name in RERUN_OPTIONS[:2] if _ini(config, name)]
    if any(item.get_closest_marker("flaky") for item in items if PLANNED in item.stash):
        named.append("the marker flaky")
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        named.append("torchrun's --max-restarts")
    return f"{named[0]} with EP cases: a pass would hide the failure before it; drop it" if named else ""


def repeated(items: Iterable[pytest.Item]) -> str:
    """Say which case is selected twice, or "": its second run would be taken for the first."""
    seen: set[str] = set()
    for item in items:
        if PLANNED in item.stash and item.nodeid in seen:
            return f"{item.nodeid} is selected twice: drop --keep-duplicates, or the argument that overlaps"
        seen.add(item.nodeid)
    return ""


def _ini(config: pytest.Config, name: str) -> object:
    with contextlib.suppress(ValueError):  # no plugin has an option of this name
        return config.getini(name)
    return None


class WithoutCases:
    """Judges a session in which no EPSuite was collected although cases are required of it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> object:
        """Fail it."""
        if self._lacks_cases() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = judge(self._run)
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say why."""
        if self._lacks_cases():
            for line in complaints(self._run):
                terminalreporter.write_line(f"ep: {line}", red=True)

    def _lacks_cases(self) -> bool:
        return not (self._run.active or self._run.config.option.collectonly)
