"""A comparison as a program reads it."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pytest_ep.results.comparison import Comparison
from pytest_ep.results.sides import Case
from pytest_ep.results.sides import Side
from pytest_ep.results.times import RowVerdict

SCHEMA = 1


def document(comparison: Comparison, fail_on: Collection[str]) -> dict[str, Any]:
    """Return a comparison as JSON values; ratios are new / base with the ends of their 99 % interval."""
    return {
        "schema": SCHEMA,
        "base": _side(comparison.base),
        "new": _side(comparison.new),
        "floor": asdict(comparison.floor),
        "words": dict(comparison.words),
        "fails": list(comparison.failing(fail_on)),
        "rows": [_row(row) for row in comparison.rows],
        "cases": [
            {**_subject(case.subject), "word": case.word, "reason": case.reason} for case in comparison.cases
        ],
        "curves": [
            {
                "curve": curve.name,
                "component": curve.component,
                "clock": curve.clock,
                "geometric_mean": curve.mean,
                "ratios": curve.counted,
                "device": [_row(row) for row in curve.device],
            }
            for curve in comparison.curves
        ],
        "launch_costs": [{**asdict(cost), **_ratio(asdict(cost.ratio))} for cost in comparison.launch_costs],
        **{
            name: [asdict(changed) for changed in getattr(comparison, name)]
            for name in ("software", "circumstances", "construction", "facts")
        },
        "notes": list(comparison.notes),
    }


def _side(side: Side) -> dict[str, Any]:
    return {"name": side.name, "files": [str(launch.path) for launch in side.launches]}


def _row(row: RowVerdict) -> dict[str, Any]:
    return {
        "clock": row.clock,
        **_subject(row.key.case),
        "component": row.key.component,
        "word": row.word,
        "base_us": row.base_us,
        "new_us": row.new_us,
        **_ratio(None if row.ratio is None else asdict(row.ratio)),
        "base_launches": row.launches[0],
        "new_launches": row.launches[1],
        "reason": row.reason,
    }


def _ratio(ratio: Mapping[str, float] | None) -> dict[str, Any]:
    return {
        "ratio": None if ratio is None else ratio["value"],
        "interval": None if ratio is None else [ratio["low"], ratio["high"]],
    }


def _subject(subject: Case | str) -> dict[str, Any]:
    return {"case": subject} if isinstance(subject, str) else {"params": asdict(subject)}
