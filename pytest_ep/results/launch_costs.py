"""Launch cost, event less graph: compared curve by curve, apart from the rows."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from pytest_ep.results.outcomes import tokens
from pytest_ep.results.sides import RowKey
from pytest_ep.results.sides import Side
from pytest_ep.results.times import NO_CHANGE
from pytest_ep.results.times import Pair
from pytest_ep.results.times import by_curve
from pytest_ep.results.verdicts import FASTER
from pytest_ep.results.verdicts import SAME
from pytest_ep.results.verdicts import SLOWER
from pytest_ep.results.verdicts import Floor
from pytest_ep.results.verdicts import judge
from pytest_ep.timing import ratios
from pytest_ep.timing.ratios import LAUNCH_COST_NOISE
from pytest_ep.timing.ratios import Ratio

HIGHER, LOWER = "higher", "lower"
LAUNCH_FLOOR = Floor(10.0, 5.0)
"""Of launch cost."""

_Remark: TypeAlias = tuple[str, str, str]
"""Curve, component, and what is said of its launch cost."""


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """Launch cost of a curve over ``cases`` T: of each launch the median over T."""

    name: str
    component: str
    word: str
    base_us: float
    new_us: float
    ratio: Ratio
    cases: int


@dataclass(frozen=True, slots=True)
class LaunchCosts:
    """What was compared, which curves could not be and why, and which T of the others were left out."""

    compared: tuple[LaunchCost, ...]
    unknown: tuple[str, ...]
    left_out: tuple[str, ...]


def launch_costs(base: Side, new: Side, pairs: Mapping[RowKey, Pair]) -> LaunchCosts:
    """Judge the launch cost of each curve of which a launch tells any, over the T of which all do."""
    compared: list[LaunchCost] = []
    unknown: list[_Remark] = []
    left_out: list[_Remark] = []
    for (name, _, component), those in by_curve(pairs):
        sides = [_told(side, those) for side in (base, new)]
        every = [set(costs) for side in sides for costs in side.values()]
        some, common = set.union(*every), set.intersection(*every)
        if not some:
            continue
        if why := _why_unknown(sides, common):
            unknown.append((name, component, f": {why}"))
            continue
        before, after = (list(_medians(side, common).values()) for side in sides)
        compared.append(_judged(name, component, before, after, len(common)))
        if common != some:
            left_out.append((name, component, f" at T={tokens(some - common)}: not all launches have it"))
    return LaunchCosts(tuple(compared), _said(unknown), _said(left_out))


def _told(side: Side, keys: Iterable[RowKey]) -> dict[str, dict[int, float]]:
    """Return what each launch that timed any of these rows tells of their launch cost, by its path and T."""
    found: dict[str, dict[int, float]] = {}
    for key in keys:
        for launch in side.launches:
            if row := launch.rows.get(key):
                costs = found.setdefault(str(launch.path), {})
                if row.info.get("launch_us") is not None:
                    costs[key.case.tokens] = float(row.info["launch_us"])
    return found


def _medians(side: Mapping[str, Mapping[int, float]], common: Iterable[int]) -> dict[str, float]:
    sizes = list(common)
    return {path: median(costs[size] for size in sizes) for path, costs in side.items()}


def _why_unknown(sides: Sequence[Mapping[str, Mapping[int, float]]], common: Iterable[int]) -> str:
    """Say why there is no ratio; empty where there is one."""
    silent = [path for side in sides for path, costs in side.items() if not costs]
    if silent:
        return f"{silent[0]} has none"
    if not common:
        return "no T has it in all launches"
    found = [(path, cost) for side in sides for path, cost in _medians(side, common).items() if cost <= 0]
    return f"{found[0][1]:.1f} us in {found[0][0]}" if found else ""


def _judged(
    name: str, component: str, before: Sequence[float], after: Sequence[float], cases: int
) -> LaunchCost:
    base, new = ratios.measure(before), ratios.measure(after)
    if sorted(before) == sorted(after):
        word, ratio = SAME, NO_CHANGE
    else:
        ratio = ratios.ratio(base, new, LAUNCH_COST_NOISE)
        word = judge(ratio, LAUNCH_FLOOR.of(base.median))
    word = {SLOWER: HIGHER, FASTER: LOWER}.get(word, word)
    return LaunchCost(name, component, word, base.median, new.median, ratio, cases)


def _said(remarks: Iterable[_Remark]) -> tuple[str, ...]:
    """Write remarks, the components of one curve together where they are the same."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, component, what in remarks:
        found.setdefault((name, what), []).append(component)
    return tuple(
        f"launch cost of {name} ({', '.join(components)}) is not compared{what}"
        for (name, what), components in found.items()
    )
