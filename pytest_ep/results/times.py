"""The times of two sides, compared: rows and curves."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from pytest_ep.results.record import COMPONENTS
from pytest_ep.results.sides import Case
from pytest_ep.results.sides import Row
from pytest_ep.results.sides import RowKey
from pytest_ep.results.sides import Side
from pytest_ep.results.verdicts import SAME
from pytest_ep.results.verdicts import UNCLEAR
from pytest_ep.results.verdicts import Floor
from pytest_ep.results.verdicts import geometric_mean
from pytest_ep.results.verdicts import judge
from pytest_ep.timing import ratios
from pytest_ep.timing.ratios import LaunchNoise
from pytest_ep.timing.ratios import Measured
from pytest_ep.timing.ratios import Ratio
from pytest_ep.timing.ratios import launch_noise

Pair: TypeAlias = tuple[Sequence[Row], Sequence[Row]]
"""The rows of one key, of the launches of BASE and of NEW that have it."""

NO_CHANGE = Ratio(1.0, 1.0, 1.0)
"""Of the very same figures, whatever their noise."""
DEVICE_CLOCKS = ("graph", "kernel")
"""Their rows hold what the device did, and no launch cost."""
GROUPS_APART = 0.03
"""The least gap, as a share, between two groups of launches."""


@dataclass(frozen=True, slots=True)
class RowVerdict:
    """A row of both sides. ``base_us`` and ``new_us`` are geometric means of the launches' medians.

    ``clock`` is what timed them. ``ratio`` is None where the launches of a side are in two groups, as
    ``reason`` says; ``launches`` are those of BASE and of NEW that timed it.
    """

    key: RowKey
    clock: str
    word: str
    base_us: float
    new_us: float
    ratio: Ratio | None
    reason: str
    launches: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Curve:
    """The rows of one curve, in order of T; ``mean`` is the geometric mean of its ``counted`` ratios.

    ``device`` has the rows' verdicts by a device clock that was timed beside, where the clock is not one.
    """

    name: str
    component: str
    clock: str
    rows: tuple[RowVerdict, ...]
    mean: float | None
    counted: int
    device: tuple[RowVerdict, ...] = ()


def pairs(base: Side, new: Side, cases: Collection[Case]) -> dict[RowKey, Pair]:
    """Return the rows of these cases that both sides have, in order of T."""
    before, after = (_by_key(side, cases) for side in (base, new))
    return {key: (before[key], after[key]) for key in sorted(set(before) & set(after))}


def _by_key(side: Side, cases: Collection[Case]) -> dict[RowKey, list[Row]]:
    found: dict[RowKey, list[Row]] = {}
    for launch in side.launches:
        for key, row in launch.rows.items():
            if key.case in cases:
                found.setdefault(key, []).append(row)
    return found


def curves(pairs: Mapping[RowKey, Pair], floor: Floor) -> Iterator[Curve]:
    """Judge all rows, curve by curve."""
    for (name, clock, component), those in by_curve(pairs):
        rows = tuple(_verdicts(those, clock, component, floor))
        found = [row.ratio.value for row in rows if row.ratio is not None]
        mean = geometric_mean(found) if found else None
        device = () if clock in DEVICE_CLOCKS else tuple(_device(those, component, floor))
        yield Curve(name, component, clock, rows, mean, len(found), device)


def by_curve(pairs: Mapping[RowKey, Pair]) -> list[tuple[tuple[str, str, str], dict[RowKey, Pair]]]:
    """Return the rows of each curve with its name, clock and component, components in their own order."""
    found: dict[tuple[str, str, str], dict[RowKey, Pair]] = {}
    for key, pair in pairs.items():
        found.setdefault((key.case.curve, pair[0][0].clock, key.component), {})[key] = pair
    return sorted(found.items(), key=lambda one: (*one[0][:2], COMPONENTS.index(one[0][2])))


def _verdicts(pairs: Mapping[RowKey, Pair], clock: str, component: str, floor: Floor) -> Iterator[RowVerdict]:
    """Judge the rows of one curve by their samples."""
    noise = launch_noise(clock, component)
    measured = {key: (_measure(pair[0]), _measure(pair[1])) for key, pair in pairs.items()}
    scaled = _scale(measured, noise)
    for key, (before, after) in pairs.items():
        if sorted(row.seconds for row in before) == sorted(row.seconds for row in after):
            yield _verdict(key, clock, measured[key], NO_CHANGE, SAME)
        elif slow := _groups(measured[key], noise, floor):
            yield _verdict(key, clock, measured[key], None, UNCLEAR, reason=slow)
        else:
            ratio = ratios.ratio(*measured[key], noise, scaled)
            yield _verdict(key, clock, measured[key], ratio, judge(ratio, floor.of(measured[key][0].median)))


def _device(pairs: Mapping[RowKey, Pair], component: str, floor: Floor) -> Iterator[RowVerdict]:
    """Judge the rows of one curve by the medians of a device clock beside, where all launches have it."""
    for clock in DEVICE_CLOCKS:
        noise = launch_noise(clock, component)
        name = f"{clock}_p50_us"
        measured = {
            key: (_measure(pair[0], name), _measure(pair[1], name))
            for key, pair in pairs.items()
            if all(row.info.get(name) for rows in pair for row in rows)
        }
        scaled = _scale(measured, noise)
        for key, two in measured.items():
            before, after = (sorted(float(row.info[name]) for row in rows) for rows in pairs[key])
            if before == after:
                yield _verdict(key, clock, two, NO_CHANGE, SAME)
            else:
                ratio = ratios.ratio(*two, noise, scaled)
                yield _verdict(key, clock, two, ratio, judge(ratio, floor.of(two[0].median)))
        if measured:
            return


def _measure(rows: Sequence[Row], name: str = "") -> Measured:
    """Measure one side's rows by their samples, or by the median that ``name`` is of."""
    if name:
        return ratios.measure([float(row.info[name]) for row in rows])
    return ratios.measure(
        [float(row.info["p50_us"]) for row in rows], [np.array(row.seconds) for row in rows]
    )


def _scale(measured: Mapping[RowKey, tuple[Measured, Measured]], noise: LaunchNoise) -> float:
    """Return the curve's scale; launches in two groups would make every row's interval wide."""
    both = [one for two in measured.values() for one in two]
    return ratios.scale([one for one in both if not ratios.slow_launches(one, noise, GROUPS_APART)], noise)


def _groups(measured: tuple[Measured, Measured], noise: LaunchNoise, floor: Floor) -> str:
    """Say which side's launches are in two groups."""
    least = max(GROUPS_APART, 3 * floor.of(measured[0].median))
    slow = [(one, ratios.slow_launches(one, noise, least)) for one in measured]
    return ", ".join(
        f"{name} bimodal, {count} of {one.launches} slow"
        for name, (one, count) in zip(("BASE", "NEW"), slow, strict=True)
        if count
    )


def _verdict(
    key: RowKey,
    clock: str,
    measured: tuple[Measured, Measured],
    ratio: Ratio | None,
    word: str,
    *,
    reason: str = "",
) -> RowVerdict:
    before, after = measured
    launches = (before.launches, after.launches)
    return RowVerdict(key, clock, word, before.median, after.median, ratio, reason, launches)


def assumed(pairs: Mapping[RowKey, Pair]) -> Iterator[str]:
    """Say what the intervals of rows that one launch timed rest on."""
    sides: dict[str, None] = {}
    components: dict[LaunchNoise, dict[str, None]] = {}
    for key, pair in pairs.items():
        for name, rows in zip(("BASE", "NEW"), pair, strict=True):
            if len(rows) == 1:
                sides[name] = None
                components.setdefault(launch_noise(rows[0].clock, key.component), {})[key.component] = None
    if sides:
        noises = ", ".join(f"{noise} ({', '.join(those)})" for noise, those in components.items())
        yield (
            f"one launch of {' and of '.join(sides)}: the intervals assume that launches differ by {noises};"
            " two more would show"
        )
