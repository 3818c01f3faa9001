"""Drift: whether the first case of a key still takes as long after the key's last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pytest_ep.results.record import COMPONENTS
from pytest_ep.results.record import CaseResult
from pytest_ep.run import PLANNED
from pytest_ep.run import Run

if TYPE_CHECKING:
    import pytest

    from pytest_ep.results.record import JSON


def first_rung(run: Run, nodeid: str) -> CaseResult | None:
    """Return the result of the first timed case of a key, where ``nodeid`` is the last of that key to run.

    None where it is not, where it is the only one, and after a failure: what came before it may be another
    transport. The same on every rank, as the order of the cases and what became of them is.
    """
    assert run.session is not None
    cases = [item for item in run.session.items if _runs(item, run)]
    here = next(item for item in cases if item.nodeid == nodeid)
    rungs = [
        item.nodeid
        for item in cases
        if item.path == here.path and item.stash[PLANNED].cell.key == here.stash[PLANNED].cell.key
    ]
    results = [result for result in map(run.ledger.of, rungs) if result is not None]
    if rungs[-1] != nodeid or any(result.outcome == "failed" for result in results):
        return None
    timed = [result for result in results if result.outcome == "timed"]
    return timed[0] if len(timed) > 1 else None


def entry(first: CaseResult, again: Mapping[str, float]) -> dict[str, JSON]:
    """Return what files say: the medians then and ``again``, us, and their ratio, by component."""
    row = first.rows[COMPONENTS[0]]
    return {
        "backend": first.cell.key.backend,
        "key": str(first.cell.key),
        "case": first.nodeid,
        "tokens": first.cell.tokens,
        "clock": row["clock"],
        "p50_us": {one: first.rows[one]["p50_us"] for one in COMPONENTS},
        "again_us": dict(again),
        "ratio": {one: again[one] / float(str(first.rows[one]["p50_us"])) for one in COMPONENTS},
    }


def _runs(item: pytest.Item, run: Run) -> bool:
    """Whether this is a case that the session runs."""
    planned = item.stash.get(PLANNED, None)
    if planned is None or planned.skip is not None or item.nodeid in run.resumed:
        return False
    return "probe" not in getattr(item, "fixturenames", ())
