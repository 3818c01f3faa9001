"""Latency and bandwidth of each curve: a key's component over T."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Any

from pytest_ep.results.record import CaseResult
from pytest_ep.results.record import parameters

if TYPE_CHECKING:
    from pytest_ep.results.record import JSON

Row = tuple[Mapping[str, Any], Mapping[str, Any]]
"""``params`` and ``extra_info`` of a row."""


def rows_of(results: Iterable[CaseResult]) -> Iterator[Row]:
    """Yield the rows of the cases that were timed."""
    for result in results:
        for component, row in result.rows.items():
            yield {**parameters(result.cell), "component": component}, row


def fits(rows: Iterable[Row]) -> list[dict[str, JSON]]:
    """Fit latency + bytes / bandwidth to each curve of medians; only those that the fit explains."""
    curves: dict[tuple[tuple[str, Any], ...], list[tuple[float, float]]] = {}
    for params, row in rows:
        curve = {name: value for name, value in params.items() if name != "tokens"} | {"clock": row["clock"]}
        curves.setdefault(tuple(curve.items()), []).append((row["bytes"], row["p50_us"] / 1e6))
    if not curves:
        return []
    from pytest_ep.timing.fit import fit

    said: list[dict[str, JSON]] = []
    for names, points in curves.items():
        found = fit(*zip(*points, strict=True))
        if found is None:
            continue
        low, high = found.bandwidth_interval
        said.append(
            {
                **dict(names),
                "points": found.points,
                "latency_us": found.latency * 1e6,
                "latency_interval_us": [end * 1e6 for end in found.latency_interval],
                "gbps": found.bandwidth / 1e9,
                "gbps_interval": [low / 1e9, None if high is None else high / 1e9],
                "r2": found.r2,
                "transfer_share": found.transfer,
            }
        )
    return said
