"""A comparison as a person reads it in a terminal or a log: fixed-width plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from itertools import chain

from pytest_ep.results.comparison import Comparison
from pytest_ep.results.times import Curve
from pytest_ep.results.times import LaunchCost
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
_CELL = 2 * _US + _CHANGE + _WORD


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
    yield ""
    yield f" {name} ".center(WIDTH, "-")
    yield "".join(
        ["T".rjust(_TOKENS), *(curve.component.rjust(_US + 3).ljust(_CELL) for curve in curves)]
    ).rstrip()
    heads = f"{'base':>{_US}}{'new':>{_US}}{'change %':>{_CHANGE}}{'':{_WORD}}"
    yield f"{'':{_TOKENS}}{heads * len(curves)}".rstrip()
    found = [{row.key.case.tokens: row for row in curve.rows} for curve in curves]
    for tokens in sorted(set(chain(*found))):
        cells = (_cell(rows.get(tokens)) for rows in found)
        yield f"{tokens:>{_TOKENS}}{''.join(cells)}".rstrip()
    yield f"{'mean':>{_TOKENS}}{''.join(map(_mean, curves))}".rstrip()
    for curve in curves:
        for remark in remarks(curve):
            yield from _wrapped(f"  {remark}")


def _cell(row: RowVerdict | None) -> str:
    if row is None:
        return " " * _CELL
    changed = "bimodal" if row.ratio is None else change(row.ratio)
    return f"{us(row.base_us):>{_US}}{us(row.new_us):>{_US}}{changed:>{_CHANGE}} {row.word:<{_WORD - 1}}"


def _mean(curve: Curve) -> str:
    mean = "-" if curve.mean is None else f"{100 * (curve.mean - 1):+.1f} ({curve.counted})"
    return f"{mean:>{2 * _US + _CHANGE}}{'':{_WORD}}"


def _launch_costs(costs: Sequence[LaunchCost]) -> Iterator[str]:
    if not costs:
        return
    yield ""
    yield " launch cost (event less graph, the median over T), in no row above ".center(WIDTH, "-")
    for place, cost in enumerate(costs):
        if not place or cost.name != costs[place - 1].name:
            yield cost.name
        figures = f"{us(cost.base_us):>{_US}}{us(cost.new_us):>{_US}}{change(cost.ratio):>{_CHANGE + 3}}"
        yield f"  {f'{cost.component}, {cost.cases} T':<20}{figures} {cost.word}"


def _wrapped(line: str) -> Iterable[str]:
    return textwrap.wrap(
        line, WIDTH, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    )
