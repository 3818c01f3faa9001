"""Two sides, compared: every row, case and cost, and what differs beside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_ep.results import differences
from pytest_ep.results import times
from pytest_ep.results.differences import Change
from pytest_ep.results.launch_costs import HIGHER
from pytest_ep.results.launch_costs import LaunchCost
from pytest_ep.results.launch_costs import launch_costs
from pytest_ep.results.outcomes import CaseVerdict
from pytest_ep.results.outcomes import compare_outcomes
from pytest_ep.results.outcomes import together
from pytest_ep.results.sides import Side
from pytest_ep.results.times import Curve
from pytest_ep.results.times import RowVerdict
from pytest_ep.results.verdicts import LAUNCH
from pytest_ep.results.verdicts import Floor


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """All that is to be said of NEW beside BASE; ``unknown`` are launch costs without a ratio, and why."""

    base: Side
    new: Side
    floor: Floor
    curves: tuple[Curve, ...]
    cases: tuple[CaseVerdict, ...]
    launch_costs: tuple[LaunchCost, ...]
    unknown: tuple[str, ...]
    software: tuple[Change, ...]
    circumstances: tuple[Change, ...]
    construction: tuple[Change, ...]
    facts: tuple[Change, ...]
    notes: tuple[str, ...]

    @property
    def rows(self) -> Iterator[RowVerdict]:
        """The rows of all curves."""
        for curve in self.curves:
            yield from curve.rows

    @property
    def words(self) -> Counter[str]:
        """How many rows, cases and launch costs each word applies to."""
        counts = Counter(row.word for row in self.rows) + Counter(case.word for case in self.cases)
        counts[LAUNCH] += sum(cost.word == HIGHER for cost in self.launch_costs)
        return +counts

    def failing(self, words: Collection[str]) -> tuple[str, ...]:
        """Return those of the words that apply."""
        return tuple(word for word in words if self.words[word])

    def untold(self, words: Collection[str]) -> str:
        """Say which of the words, none of which applies, cannot be told, and why; empty where all can."""
        if LAUNCH not in words or (self.launch_costs and not self.unknown):
            return ""
        neither = f"neither {self.base.name} nor {self.new.name} has launch costs of the same rows"
        return next(iter(self.unknown), f"{neither}: measure with --ep-clock graph,event")


def compare(base: Side, new: Side, floor: Floor) -> Comparison:
    """Compare two sides. Raises ResultError where they cannot be compared."""
    differences.refuse(base, new)
    outcomes = compare_outcomes(base, new)
    pairs = times.pairs(base, new, set(outcomes.timed))
    costs = launch_costs(base, new, pairs)
    remarks = [*outcomes.remarks]
    for name, side in (("BASE", base), ("NEW", new)):
        remarks.extend(
            (case, f"{name}: a GPU was held back: {why}") for case, why in differences.throttled(side)
        )
    return Comparison(
        base=base,
        new=new,
        floor=floor,
        curves=tuple(times.curves(pairs, floor)),
        cases=tuple(outcomes.differing),
        launch_costs=costs.compared,
        unknown=costs.unknown,
        software=tuple(differences.software(base, new)),
        circumstances=tuple(differences.circumstances(base, new)),
        construction=tuple(differences.construction(base, new)),
        facts=tuple(differences.facts(base, new, pairs)),
        notes=(
            *times.assumed(pairs),
            *costs.unknown,
            *costs.left_out,
            *(f"{cases}: {remark}" for cases, remark in together(remarks)),
        ),
    )
