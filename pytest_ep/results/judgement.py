"""Rows against expectations: which are met, which are not and by how much."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from itertools import product
from statistics import median
from typing import Literal

from pytest_ep.results.expectations import LIMITS
from pytest_ep.results.expectations import Choice
from pytest_ep.results.expectations import Expectation
from pytest_ep.results.expectations import Limit
from pytest_ep.results.expectations import admits
from pytest_ep.results.expectations import shown
from pytest_ep.results.expectations import value_of
from pytest_ep.results.phrases import among
from pytest_ep.results.record import COMPONENTS
from pytest_ep.results.sides import PROBE
from pytest_ep.results.sides import Case
from pytest_ep.results.sides import Launch
from pytest_ep.results.sides import Outcome
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
    cases = _cases(side)
    findings = [
        *_wrong(expectations, side),
        *_gaps(expectations, cases, side),
        *_missing(expectations, rows.keys(), cases.keys(), side),
    ]
    for expectation in expectations:
        for key in filter(expectation.selects_row, rows):
            launches = sum(launch.reaches(key.case) for launch in side.launches)
            findings += _limits(expectation, key, rows[key], launches)
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


def _cases(side: Side) -> dict[Case, dict[str, None]]:
    """Return the cases that launches have or name, each with its node ids; not what is for other machines."""
    found: dict[Case, dict[str, None]] = {}
    for launch in side.launches:
        for case, outcome in launch.outcomes.items():
            if case.tokens and not case.probe and launch.reaches(case):
                found.setdefault(case, {})[outcome.nodeid] = None
    return found


def _gaps(
    expectations: Sequence[Expectation], cases: Mapping[Case, Collection[str]], side: Side
) -> Iterator[Finding]:
    """The cases for which anything is expected, and that some launch has no time of though it could."""
    for case, names in cases.items():
        if any(one.covers(case) for one in expectations):
            launches = [launch for launch in side.launches if launch.reaches(case)]
            reasons = [why for launch in launches if (why := _why_untimed(launch, case, names))]
            if reasons:
                yield _gap(case.key, _size(case), reasons, len(launches))
    known = {name for names in cases.values() for name in names}
    never: dict[str, list[str]] = {}
    for launch in side.launches:
        for nodeid, outcome in launch.unplaced.items():
            if outcome.what == "not_run" and nodeid not in known and PROBE not in nodeid:
                never.setdefault(nodeid, []).append(_told(outcome))
    for nodeid, reasons in never.items():
        yield _gap("", nodeid, reasons, len(side.launches))


def _why_untimed(launch: Launch, case: Case, names: Iterable[str]) -> str:
    """Say why a launch has no time of a case; empty where it has one, or found it wrong, which is said."""
    of_key = (one for other, one in launch.outcomes.items() if other.whole and other.key == case.key)
    unplaced = (launch.unplaced[name] for name in names if name in launch.unplaced)
    outcome = launch.outcomes.get(case) or next(chain(unplaced, of_key), None)
    if outcome is None:
        return "absent"
    return "" if outcome.what in ("timed", "failed") else _told(outcome)


def _told(outcome: Outcome) -> str:
    return f"{outcome.what.replace('_', ' ')}: {outcome.reason}"


def _gap(key: str, subject: str, reasons: Sequence[str], launches: int) -> Finding:
    reason = among(len(reasons), launches) + ", ".join(dict.fromkeys(reasons))
    return Finding("missing", key, subject, reason, launches=len(reasons))


def _missing(
    expectations: Sequence[Expectation], timed: Collection[RowKey], cases: Iterable[Case], side: Side
) -> Iterator[Finding]:
    """The expectations for which there is nothing to judge, those of one reason together.

    What a case lacks that is not timed is said of the case.
    """
    known = dict.fromkeys(timed) | {RowKey(case, one): None for case in cases for one in COMPONENTS}
    lacking: dict[str, list[Expectation]] = {}
    for expectation in expectations:
        skipped = dict.fromkeys(
            f"; {_told(outcome)}"
            for launch in side.launches
            for case, outcome in launch.outcomes.items()
            if outcome.what == "skipped" and case not in cases and expectation.covers(case)
        )
        for text in _lacking(expectation, known, timed):
            lacking.setdefault(text + "".join(skipped), []).append(expectation)
    for reason, those in lacking.items():
        more = f" and {len(those) - 1} more" if len(those) > 1 else ""
        yield Finding("missing", "", f"{those[0]}{more}", reason)


def _lacking(expectation: Expectation, known: Iterable[RowKey], timed: Collection[RowKey]) -> list[str]:
    """Say which selector nothing has, or which listed values and combinations of them."""
    left = list(known)
    for name, choices in expectation.selects.items():
        there = dict.fromkeys(str(value_of(key, name)) for key in left if key in timed)
        left = [key for key in left if admits(choices, value_of(key, name))]
        if not left:
            return [f"no row with {name} {shown(choices)}; there: {', '.join(there) or 'none'}"]
    lists = {name: choices for name, choices in expectation.selects.items() if len(choices) > 1}
    return [
        f"no row with {' and '.join(f'{name} {shown((one,))}' for name, one in those)}"
        for those in _absent(lists, left)
    ]


def _absent(
    lists: Mapping[str, Sequence[Choice]], keys: Iterable[RowKey]
) -> Iterator[Iterable[tuple[str, Choice]]]:
    """Yield the values that none of the rows have, then the combinations of those that some have."""
    found = [
        {name: _admitting(choices, value_of(key, name)) for name, choices in lists.items()} for key in keys
    ]
    some = {name: {one for values in found for one in values[name]} for name in lists}
    for name, choices in lists.items():
        yield from (((name, one),) for one in choices if one not in some[name])
    together = {combination for values in found for combination in product(*values.values())}
    for combination in product(*([one for one in lists[name] if one in some[name]] for name in lists)):
        if combination not in together:
            yield zip(lists, combination, strict=True)


def _admitting(choices: Iterable[Choice], value: str | int) -> list[Choice]:
    return [one for one in choices if admits((one,), value)]


def _limits(
    expectation: Expectation, key: RowKey, rows: Mapping[str, Row], launches: int
) -> Iterator[Finding]:
    """Judge a row that some of ``launches`` have; that others lack it is said of its case."""
    subject = f"{_size(key.case)} {key.component}"
    others = {row.clock for row in rows.values()} - {expectation.clock}
    if others:
        reason = f"timed by {', '.join(sorted(others))}, expected by {expectation.clock}"
        yield Finding("other clock", key.case.key, subject, reason)
        return
    for limit in LIMITS:
        said = limit.between_launches and len(rows) == 1 < launches
        if limit.name in expectation.limits and not said:
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
