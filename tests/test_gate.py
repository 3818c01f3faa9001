"""What a run must have shown to pass, and what may not be run as cases at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ep import gate
from pytest_ep.run import PLANNED

CASE: Any = SimpleNamespace(nodeid="a.py::case", stash={PLANNED: None}, get_closest_marker=lambda name: None)
OTHER: Any = SimpleNamespace(nodeid="a.py::other", stash={}, get_closest_marker=lambda name: None)


def run_of(*items: object, allow_skips: bool = False) -> Any:
    return SimpleNamespace(
        active=True,
        config=SimpleNamespace(getoption=lambda *_: None, getini=lambda _: None),
        executed=0,
        ledger=[],
        options=SimpleNamespace(allow_skips=allow_skips),
        resumed={},
        session=SimpleNamespace(items=items),
    )


def test_nothing_executed_is_5_where_a_case_was_selected_or_nothing_was() -> None:
    for items in ([CASE], [CASE, OTHER], []):
        assert gate.judge(run_of(*items)) == pytest.ExitCode.NO_TESTS_COLLECTED
        assert gate.complaints(run_of(*items)) == [gate.NOTHING_EXECUTED]
        assert gate.judge(run_of(*items, allow_skips=True)) == pytest.ExitCode.OK


def test_a_run_of_other_tests_alone_is_not_judged() -> None:
    assert gate.judge(run_of(OTHER)) == pytest.ExitCode.OK
    assert gate.complaints(run_of(OTHER)) == []


def test_cases_are_refused_in_what_torchrun_has_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_of().config
    for count, said in (("0", ""), ("1", "torchrun's --max-restarts with EP cases: a pass would hide the")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        assert gate.reruns(config, [CASE]).startswith(said)
        assert bool(gate.reruns(config, [CASE])) is bool(said)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert gate.reruns(config, [CASE]) == ""


def test_a_case_that_is_selected_twice_is_refused_and_another_test_is_not() -> None:
    assert gate.repeated([CASE, OTHER, OTHER]) == ""
    assert gate.repeated([CASE, OTHER, CASE]).startswith(
        "a.py::case is selected twice: drop --keep-duplicates"
    )
