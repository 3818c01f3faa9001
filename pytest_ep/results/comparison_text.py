"""A comparison as a person reads it in a terminal or a log: fixed-width plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from itertools import chain
from typing import TypeAlias

from pytest_ep.results.comparison import Comparison
from pytest_ep.results.launch_costs import LaunchCost
from pytest_ep.results.times import Curve
from pytest_ep.results.times import RowVerdict
from pytest_ep.results.verdicts import FASTER
from pytest_ep.results.verdicts import SLOWER
from pytest_ep.results.wording import by_name
from pytest_ep.results.wording import change
from pytest_ep.results.wording import grouped
from pytest_ep.results.wording import legend
from pytest_ep.results.wording import remarks
from pytest_ep.results.wording import summary
from pytest_ep.results.wording import title
from pytest_ep.results.wording import us
from pytest_ep.results.wording import verdict

WIDTH = 110
_TOKENS, _US, _CHANGE, _WORD = 6, 7, 12, 8
_Widths: TypeAlias = tuple[int, int, int]
"""Of T, of a time and of a change."""


def lines(comparison: Comparison, fail_on: Collection[str]) -> Iterator[str]:
    """Yield the lines: what differs beside times, a table a key, costs, then what matters and the verdict."""
    yield from _wrapped(title(comparison))
    for changed in comparison.software:
        yield from _wrapped(f"  {changed}")
    for changed in comparison.circumstances:
        yield from _wrapped(f"  also differs: {changed}")
    for name, curves in by_name(comparison.curves).items():
        yield from _table(name, curves)
    yield from _launch_costs(comparison.launch_costs)
    yield ""
    for remark in (*comparison.construction, *comparison.facts, *comparison.notes):
        yield from _wrapped(f"note: {remark}")
    if comparison.curves:
        yield from _wrapped(legend(comparison))
    yield ""
    for word in (SLOWER, FASTER):
        for said in summary(comparison, word):
            yield from _wrapped(f"{word}: {said}")
    for word, cases, reason in grouped(comparison.cases):
        yield from _wrapped(f"{word}: {cases}{f': {reason}' if reason else ''}")
    yield from _wrapped(verdict(comparison, fail_on))


def _table(name: str, curves: Sequence[Curve]) -> Iterator[str]:
    widths = _widths(row for curve in curves for row in curve.rows)
    first, us_, change_ = widths
    yield ""
    yield f" {name} ".center(WIDTH, "-")
    whole = 2 * us_ + change_ + _WORD
    titles = (curve.component.rjust(us_ + 3).ljust(whole) for curve in curves)
    yield f"{'T':>{first}}{''.join(titles)}".rstrip()
    heads = f"{'base':>{us_}}{'new':>{us_}}{'change %':>{change_}}{'':{_WORD}}"
    yield f"{'':{first}}{heads * len(curves)}".rstrip()
    found = [{row.key.case.tokens: row for row in curve.rows} for curve in curves]
    for tokens in sorted(set(chain(*found))):
        cells = (_cell(rows.get(tokens), widths) for rows in found)
        yield f"{tokens:>{first}}{''.join(cells)}".rstrip()
    means = (f"{_mean(curve):>{2 * us_ + change_}}{'':{_WORD}}" for curve in curves)
    yield f"{'mean':>{first}}{''.join(means)}".rstrip()
    for curve in curves:
        for remark in remarks(curve):
            yield from _wrapped(f"  {remark}")


def _widths(rows: Iterable[RowVerdict | LaunchCost]) -> _Widths:
    """Return how wide columns are: as ever, or as their longest figure and a space want."""
    first, us_, change_ = _TOKENS, _US, _CHANGE
    for row in rows:
        if isinstance(row, RowVerdict):
            first = max(first, len(str(row.key.case.tokens)))
        us_ = max(us_, 1 + len(us(row.base_us)), 1 + len(us(row.new_us)))
        change_ = max(change_, 1 + len(_changed(row)))
    return first, us_, change_


def _cell(row: RowVerdict | None, widths: _Widths) -> str:
    _, us_, change_ = widths
    if row is None:
        return " " * (2 * us_ + change_ + _WORD)
    return (
        f"{us(row.base_us):>{us_}}{us(row.new_us):>{us_}}{_changed(row):>{change_}} {row.word:<{_WORD - 1}}"
    )


def _changed(row: RowVerdict | LaunchCost) -> str:
    return "bimodal" if row.ratio is None else change(row.ratio)


def _mean(curve: Curve) -> str:
    return "-" if curve.mean is None else f"{100 * (curve.mean - 1):+.1f} ({curve.counted})"


def _launch_costs(costs: Sequence[LaunchCost]) -> Iterator[str]:
    if not costs:
        return
    yield ""
    yield " launch cost (event less graph, the median over T), in no row above ".center(WIDTH, "-")
    _, us_, change_ = _widths(costs)
    for place, cost in enumerate(costs):
        if not place or cost.name != costs[place - 1].name:
            yield cost.name
        figures = f"{us(cost.base_us):>{us_}}{us(cost.new_us):>{us_}}{_changed(cost):>{change_ + 3}}"
        yield f"  {f'{cost.component}, {cost.cases} T':<20}{figures} {cost.word}"


def _wrapped(line: str) -> Iterable[str]:
    return textwrap.wrap(
        line, WIDTH, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    )
