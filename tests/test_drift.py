"""Which case is timed again after the last one of its key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ep.drift import entry
from pytest_ep.drift import first_rung
from pytest_ep.matrix.cells import Cell
from pytest_ep.matrix.cells import Key
from pytest_ep.matrix.cells import Skip
from pytest_ep.matrix.plan import Planned
from pytest_ep.matrix.shapes import Shape
from pytest_ep.results.record import JSON
from pytest_ep.results.record import CaseResult
from pytest_ep.results.record import Ledger
from pytest_ep.run import PLANNED

SHAPE = Shape("small", 64, 16, 4)
KEY = Key("torch_a2a", "cpu", 2, "normal", "bf16", "small")
OTHER = Key("torch_a2a", "cpu", 2, "normal", "bf16", "large")


def cell(tokens: int, key: Key = KEY) -> Cell:
    return Cell(key, SHAPE, "uniform", tokens)


def item(nodeid: str, of: Cell, skip: Skip | None = None, fixture: str = "ep_case") -> Any:
    stash = pytest.Stash()
    stash[PLANNED] = Planned(of, skip)
    path = Path(nodeid.partition("::")[0])
    return SimpleNamespace(nodeid=nodeid, path=path, stash=stash, fixturenames=[fixture])


ITEMS = [
    item("a.py::probe", cell(8), fixture="probe"),
    item("a.py::1", cell(1)),
    item("a.py::other", cell(4, OTHER)),
    item("a.py::2", cell(2)),
    item("a.py::4", cell(4)),
    item("a.py::skipped", cell(8), Skip("token-cap", "too many")),
    item("b.py::1", cell(1)),
]


def run_of(outcomes: dict[str, Any], resumed: Sequence[str] = ()) -> Any:
    ledger = Ledger()
    for one in ITEMS:
        if one.nodeid in outcomes:
            ledger.add(CaseResult(one.nodeid, one.stash[PLANNED].cell, outcomes[one.nodeid]))
    items = [*ITEMS, SimpleNamespace(nodeid="a.py::not_ours", stash=pytest.Stash())]
    return SimpleNamespace(
        session=SimpleNamespace(items=items), ledger=ledger, resumed=dict.fromkeys(resumed)
    )


ALL = {"a.py::1": "timed", "a.py::2": "timed", "a.py::4": "timed", "a.py::other": "timed"}


def first(nodeid: str, outcomes: dict[str, Any], resumed: Sequence[str] = ()) -> str:
    found = first_rung(run_of(outcomes, resumed), nodeid)
    return "" if found is None else found.nodeid


def test_after_the_last_case_of_a_key_and_a_file_it_is_the_first() -> None:
    assert first("a.py::4", ALL) == "a.py::1"


@pytest.mark.parametrize("nodeid", ["a.py::1", "a.py::2", "a.py::other", "b.py::1"])
def test_after_an_earlier_case_and_where_there_is_but_one_it_is_none(nodeid: str) -> None:
    assert first(nodeid, {**ALL, nodeid: "timed"}) == ""


def test_a_case_that_only_passed_is_not_timed_again() -> None:
    assert first("a.py::4", {**ALL, "a.py::1": "checked"}) == "a.py::2"
    assert first("a.py::4", {**ALL, "a.py::1": "checked", "a.py::2": "checked"}) == ""


def test_after_a_failure_of_the_key_nothing_is_timed_again() -> None:
    assert first("a.py::4", {**ALL, "a.py::2": "failed"}) == ""
    assert first("a.py::4", {**ALL, "a.py::other": "failed"}) == "a.py::1"


def test_what_an_earlier_run_has_timed_does_not_count() -> None:
    assert first("a.py::4", ALL, resumed=["a.py::1"]) == "a.py::2"
    assert first("a.py::2", {"a.py::1": "timed", "a.py::2": "timed"}, resumed=["a.py::4"]) == "a.py::1"


def test_the_entry_has_both_medians_and_their_ratio() -> None:
    row: dict[str, JSON] = {"p50_us": 10.0, "clock": "host"}
    rows = dict.fromkeys(("dispatch", "combine", "roundtrip"), row)
    result = CaseResult("a.py::1", cell(1), "timed", rows=rows)
    said = entry(result, {"dispatch": 10.0, "combine": 12.0, "roundtrip": 9.0})
    assert said["ratio"] == {"dispatch": 1.0, "combine": 1.2, "roundtrip": 0.9}
    assert (said["case"], said["tokens"], said["key"]) == ("a.py::1", 1, str(KEY))
    assert said["p50_us"] == dict.fromkeys(rows, 10.0)
