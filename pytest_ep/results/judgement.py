"""Rows against expectations: which are met, which are not and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from pytest_ep.results.expectations import LIMITS
from pytest_ep.results.expectations import Expectation
from pytest_ep.results.expectations import Limit
from pytest_ep.results.expectations import admits
from pytest_ep.results.expectations import shown
from pytest_ep.results.expectations import value_of
from pytest_ep.results.sides import Case
from pytest_ep.results.sides import Launch
from pytest_ep.results.sides import ResultError
from pytest_ep.results.sides import Row
from pytest_ep.results.sides import RowKey
from pytest_ep.results.sides import Side


@dataclass(frozen=True, slots=True)
class Finding:
    """One limit of one row, or what keeps an expectation from being judged.

    ``value``, the median over ``launches``, and ``bound`` are in ``unit``. ``worst`` is what ``worst_launch``
    had, None where the value is how far launches lie apart.
    """

    what: Literal["met", "over", "under", "missing", "other clock", "wrong"]
    key: str
    subject: str
    reason: str = ""
    limit: str = ""
    bound: float | None = None
    value: float | None = None
    unit: str = ""
    worst: float | None = None
    worst_launch: str = ""
    launches: int = 0

    @property
    def beyond(self) -> float:
        """How far the value is beyond its limit, in percent of that; negative within it."""
        assert self.value is not None
        assert self.bound is not None
        share = 100 * (self.value / self.bound - 1)
        return -share if self.limit.startswith("min_") else share


@dataclass(frozen=True, slots=True)
class Judgement:
    """All findings on one side. ``unexpected`` counts its rows for which nothing was expected."""

    side: str
    launches: int
    findings: tuple[Finding, ...]
    unexpected: int

    @property
    def unmet(self) -> tuple[Finding, ...]:
        """What fails."""
        return tuple(finding for finding in self.findings if finding.what != "met")


def judge(expectations: Sequence[Expectation], side: Side) -> Judgement:
    """Return what is met and what is not. Raises ResultError where a limit needs more launches."""
    rows: dict[RowKey, dict[str, Row]] = {}
    for name, launch in _named(side).items():
        for key, row in launch.rows.items():
            rows.setdefault(key, {})[name] = row
    findings = [*_wrong(expectations, side), *_missing(expectations, list(rows), side)]
    for expectation in expectations:
        for key in filter(expectation.selects_row, rows):
            findings += _limits(expectation, key, rows[key])
    unexpected = sum(not any(one.selects_row(key) for one in expectations) for key in rows)
    return Judgement(side.name, len(side.launches), tuple(findings), unexpected)


def _named(side: Side) -> dict[str, Launch]:
    """Return the launches by the names of their files, or by their paths where names repeat."""
    names = [launch.path.name for launch in side.launches]
    if len(set(names)) < len(names):
        names = [str(launch.path) for launch in side.launches]
    return dict(zip(names, side.launches, strict=True))


def _wrong(expectations: Sequence[Expectation], side: Side) -> Iterator[Finding]:
    """The failed cases for which anything is expected, and those that no one can place."""
    failed: dict[tuple[str, str], dict[str, str]] = {}
    for name, launch in _named(side).items():
        for case, outcome in launch.outcomes.items():
            if outcome.what == "failed" and any(one.covers(case) for one in expectations):
                failed.setdefault((case.key, _size(case)), {})[name] = outcome.reason
        for nodeid, outcome in launch.unplaced.items():
            if outcome.what == "failed":
                failed.setdefault(("", nodeid), {})[name] = outcome.reason
    for (key, subject), reasons in failed.items():
        reason = f"{next(iter(reasons.values()))} ({', '.join(reasons)})"
        yield Finding("wrong", key, subject, reason, launches=len(reasons))


def _missing(expectations: Sequence[Expectation], keys: Sequence[RowKey], side: Side) -> Iterator[Finding]:
    """The expectations for which there is nothing to judge, those of one reason together."""
    lacking: dict[str, list[Expectation]] = {}
    for expectation in expectations:
        outcomes = [
            outcome
            for launch in side.launches
            for case, outcome in launch.outcomes.items()
            if outcome.what != "timed" and expectation.covers(case)
        ]
        if any(outcome.what == "failed" for outcome in outcomes):
            continue  # it is wrong, which is said, not missing
        why = "".join(dict.fromkeys(f"; {one.what}: {one.reason}" for one in outcomes))
        for text in _lacking(expectation, keys):
            lacking.setdefault(text + why, []).append(expectation)
    for reason, those in lacking.items():
        more = f" and {len(those) - 1} more" if len(those) > 1 else ""
        yield Finding("missing", "", f"{those[0]}{more}", reason)


def _lacking(expectation: Expectation, keys: Sequence[RowKey]) -> list[str]:
    """Say which selector nothing has, or which of its listed values."""
    left = list(keys)
    for name, choices in expectation.selects.items():
        there = dict.fromkeys(str(value_of(key, name)) for key in left)
        left = [key for key in left if admits(choices, value_of(key, name))]
        if not left:
            return [f"no row with {name} {shown(choices)}; there: {', '.join(there) or 'none'}"]
    found = {name: {value_of(key, name) for key in left} for name in expectation.selects}
    return [
        f"no row with {name} {shown((one,))}"
        for name, choices in expectation.selects.items()
        for one in choices
        if not any(admits((one,), value) for value in found[name])
    ]


def _limits(expectation: Expectation, key: RowKey, rows: Mapping[str, Row]) -> Iterator[Finding]:
    subject = f"{_size(key.case)} {key.component}"
    others = {row.clock for row in rows.values()} - {expectation.clock}
    if others:
        reason = f"timed by {', '.join(sorted(others))}, expected by {expectation.clock}"
        yield Finding("other clock", key.case.key, subject, reason)
        return
    for limit in LIMITS:
        if limit.name in expectation.limits:
            yield _limit(limit, expectation.limits[limit.name], key, subject, rows)


def _limit(limit: Limit, bound: float, key: RowKey, subject: str, rows: Mapping[str, Row]) -> Finding:
    values = {launch: row.info.get(limit.key) for launch, row in rows.items()}
    told = {launch: float(value) for launch, value in values.items() if value is not None}
    if not told:
        return Finding("missing", key.case.key, subject, f"the row has no {limit.key}", limit.name)
    if limit.between_launches and len(told) < 2:
        raise ResultError(
            f"{limit.name} of {key} needs several launches, {next(iter(told))} is one: give a folder"
        )
    middle = median(told.values())
    value = 100 * (max(told.values()) - min(told.values())) / middle if limit.between_launches else middle
    worst = (max if limit.most else min)(told, key=lambda launch: told[launch])
    broken = value > bound if limit.most else value < bound
    return Finding(
        ("over" if limit.most else "under") if broken else "met",
        key.case.key,
        subject,
        limit=limit.name,
        bound=bound,
        value=value,
        unit=limit.unit,
        worst=None if limit.between_launches else told[worst],
        worst_launch=worst,
        launches=len(told),
    )


def _size(case: Case) -> str:
    return str(case).removeprefix(f"{case.key} ")
