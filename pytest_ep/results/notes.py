"""What stands under a block of the summary: what its rows' marks mean, and what all its rows say together."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from pytest_ep.results import curves
from pytest_ep.results.record import COMPONENTS
from pytest_ep.results.record import CaseResult

UNSURE, SKEWED, THROTTLED = "~", "s", "t"
DRIFTED = 0.05
"""A ratio further from 1 than this is said."""
SHOWN = 4
"""Cases named in one note."""


def marks(result: CaseResult) -> str:
    """Return the letters after a timed case's row."""
    rows: list[Any] = list(result.rows.values())
    said = (
        (UNSURE, any(row.get("target_met") is False for row in rows)),
        (SKEWED, any(row.get("skewed") for row in rows)),
        (THROTTLED, any(row.get("throttled") for row in rows)),
    )
    return "".join(mark for mark, holds in said if holds)


def notes(timed: Sequence[CaseResult], drift: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield what is to be said of a block's timed cases, in order of T; ``drift`` is of ``drift.entry``."""
    yield from _marked(timed)
    yield from _launch(timed)
    yield from _slowest(timed)
    yield from _fit(timed)
    if drift is not None and any(abs(ratio - 1) > DRIFTED for ratio in drift["ratio"].values()):
        ratios = ", ".join(f"{one} {drift['ratio'][one]:.2f}" for one in COMPONENTS)
        yield f"drift: T={drift['tokens']} after the last case took, as multiples of before: {ratios}"


def _marked(timed: Sequence[CaseResult]) -> Iterator[str]:
    def of(mark: str) -> list[CaseResult]:
        return [result for result in timed if mark in marks(result)]

    if unsure := of(UNSURE):
        row: Any = unsure[0].rows[COMPONENTS[0]]
        yield (
            f"{UNSURE} a median is known less well than the {row['target_ci']:g} % of --ep-target-ci:"
            " --ep-time-budget or the most samples came first"
        )
    if skewed := of(SKEWED):
        yield (
            f"{SKEWED} the ranks differ by half of the median or more: {_few(map(_most_skewed, skewed))};"
            " of ranks that end together, the one that begins late is fastest"
        )
    if throttled := of(THROTTLED):
        yield f"{THROTTLED} a GPU was held back: {_few(map(_throttle, throttled))}"


def _most_skewed(result: CaseResult) -> str:
    def share(component: str) -> float:
        row: Any = result.rows[component]
        return float(row["spread_us"] / row["p50_us"])

    worst = max((one for one in COMPONENTS if result.rows[one].get("skewed")), key=share)
    row: Any = result.rows[worst]
    slowest = f"slowest rank {row['slowest_rank']} in {100 * row['slowest_share']:.0f} %"
    fastest = f"fastest rank {row['fastest_rank']} in {100 * row['fastest_share']:.0f} %"
    return f"T={result.cell.tokens} {worst} ({slowest}, {fastest} of iterations)"


def _throttle(result: CaseResult) -> str:
    row: Any = result.rows[COMPONENTS[0]]
    return f"T={result.cell.tokens} {', '.join(row['throttle_reasons'])} ({min(row['sm_clock_mhz'])} MHz)"


def _launch(timed: Sequence[CaseResult]) -> Iterator[str]:
    found = [result for result in timed if "launch_us" in result.rows[COMPONENTS[0]]]
    if found:
        costs = (f"{one} {_range(_values(found, one, 'launch_us'), '.1f')}" for one in COMPONENTS)
        tokens = _range([result.cell.tokens for result in found], "d")
        yield f"launch cost (event less graph, us) over T={tokens}: {', '.join(costs)}"


def _slowest(timed: Sequence[CaseResult]) -> Iterator[str]:
    rows: list[Any] = [result.rows["roundtrip"] for result in timed if result.cell.key.ep_size > 1]
    by_rank: dict[int, list[float]] = {}
    for row in rows:
        if "slowest_rank" in row:
            by_rank.setdefault(row["slowest_rank"], []).append(100 * row["slowest_share"])
    if not by_rank:
        return
    often = sorted(by_rank.items(), key=lambda found: (-len(found[1]), found[0]))
    said = _few(f"rank {rank} at {len(shares)} T ({_range(shares, '.0f')} %)" for rank, shares in often)
    late = sum(row["late"] for row in rows if "late" in row)
    yield f"slowest in most roundtrips: {said}; roundtrips of 3 medians or more: {late}"


def _fit(timed: Sequence[CaseResult]) -> Iterator[str]:
    found: list[Any] = curves.fits(curves.rows_of(timed))
    if found:
        lines = (
            f"{one['component']} {_interval(one['latency_us'], one['latency_interval_us'])} us"
            f" and {_interval(one['gbps'], one['gbps_interval'])} GB/s"
            for one in found
        )
        yield f"latency + bytes / bandwidth (95 % intervals): {', '.join(lines)}"


def _interval(value: float, ends: Sequence[float | None]) -> str:
    low, high = ("any" if end is None else _figure(end) for end in ends)
    return f"{_figure(value)} ({low} to {high})"


def _figure(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _values(results: Iterable[CaseResult], component: str, name: str) -> list[Any]:
    return [result.rows[component][name] for result in results]


def _range(numbers: Sequence[float], form: str) -> str:
    low, high = format(min(numbers), form), format(max(numbers), form)
    return low if low == high else f"{low} to {high}"


def _few(texts: Iterable[str]) -> str:
    every = list(texts)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(every[:SHOWN]) + more
