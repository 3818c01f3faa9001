"""A comparison as a comment on a pull request: what matters first, the rest folded."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence

from pytest_ep.results.comparison import Comparison
from pytest_ep.results.phrases import escaped
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


def lines(comparison: Comparison, fail_on: Collection[str]) -> Iterator[str]:
    """Yield the lines: the verdict, what is slower, wrong or gone, then all rows within ``<details>``."""
    yield from (f"### {escaped(title(comparison))}", "", f"**{escaped(verdict(comparison, fail_on))}**", "")
    yield from _items(comparison.software)
    for word, cases, reason in grouped(comparison.cases):
        yield f"- **{word}**: {escaped(f'{cases}: {reason}' if reason else cases)}"
    for word in (SLOWER, FASTER):
        yield from (f"- **{word}**: {escaped(said)}" for said in summary(comparison, word))
    yield from ("", "<details><summary>All rows</summary>", "")
    for name, curves in by_name(comparison.curves).items():
        yield from _table(name, curves)
    yield from _items(f"also differs: {changed}" for changed in comparison.circumstances)
    for cost in comparison.launch_costs:
        figures = f"{us(cost.base_us)} -> {us(cost.new_us)} us, {change(cost.ratio)} %: {cost.word}"
        yield f"- launch cost, {escaped(cost.name)} {cost.component}: {figures}"
    yield from _items((*comparison.construction, *comparison.facts, *comparison.notes))
    if comparison.curves:
        yield from ("", escaped(legend(comparison)))
    yield from ("", "</details>", "")


def _table(name: str, curves: Sequence[Curve]) -> Iterator[str]:
    yield escaped(name)
    yield from ("", "| component | T | base us | new us | change % | verdict |", "|---|--:|--:|--:|--:|---|")
    for curve in curves:
        yield from map(_row, curve.rows)
        if curve.mean is not None:
            mean = f"{100 * (curve.mean - 1):+.1f}"
            yield f"| {curve.component} | geometric mean of {curve.counted} | | | {mean} | |"
    yield ""
    yield from _items(remark for curve in curves for remark in remarks(curve))


def _row(row: RowVerdict) -> str:
    word = f"**{row.word}**" if row.word in (SLOWER, FASTER) else row.word
    changed = "bimodal" if row.ratio is None else change(row.ratio)
    cells = (row.key.component, str(row.key.case.tokens), us(row.base_us), us(row.new_us), changed, word)
    return f"| {' | '.join(cells)} |"


def _items(said: Iterable[object]) -> Iterator[str]:
    return (f"- {escaped(str(one))}" for one in said)
