"""What else differs between two sides: what makes them incomparable, and what may explain a change."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pytest_ep.results.sides import Case
from pytest_ep.results.sides import Construction
from pytest_ep.results.sides import Launch
from pytest_ep.results.sides import ResultError
from pytest_ep.results.sides import Row
from pytest_ep.results.sides import RowKey
from pytest_ep.results.sides import Side

VERSIONS = ("python", "pytest_ep", "torch", "cuda", "hip", "nccl", "nccl_loaded", "backends")
"""The software that launches of one side share."""
ENVIRONMENT = "environment "
"""Of the software's facts, how the variables of the environment are named."""
FACTS = ("bytes", "metadata_bytes", "copies", "reduction", "max_tokens")
"""Keys of ``extra_info`` that a wheel or its options may change, and time with them."""
MEMORY_SHARE, MEMORY_BYTES = 0.01, 2**20
SECONDS_SHARE, SECONDS = 0.2, 0.5


@dataclass(frozen=True, slots=True)
class Change:
    """A fact that differs: what, on BASE, on NEW."""

    what: str
    base: str
    new: str

    def __str__(self) -> str:
        return f"{self.what} {self.base} -> {self.new}"


def refuse(base: Side, new: Side) -> None:
    """Raise ResultError where times of the two sides, or of a side's launches, are of different things."""
    for side in (base, new):
        _refuse_mixed(side)
    for what, name in (("SKU", "sku"), ("EP size", "ep_size"), ("model", "model")):
        there, here = ({getattr(case, name) for case in _ran(side)} for side in (base, new))
        if there and here and not there & here:
            raise ResultError(
                f"different {what}s: {base.name} has {_listed(there)}, {new.name} has {_listed(here)}:"
                " compare runs of the same"
            )
    others = _rows(new)
    for key, row in _rows(base).items():
        other = others.get(key)
        if other is not None and _method(other) != _method(row):
            raise ResultError(
                f"different clocks: {key} is timed by {_method(row)} in {base.name}, by {_method(other)} in"
                f" {new.name}: measure again with one --ep-clock"
            )


def software(base: Side, new: Side) -> list[Change]:
    """Return the versions that differ, and the commits of the folders that the runs were started in."""

    def told(launch: Launch) -> dict[str, str]:
        return {**_flat(_versions(launch)), **({"commit": launch.commit} if launch.commit else {})}

    return _changes(base, new, told)


def circumstances(base: Side, new: Side) -> list[Change]:
    """Return what else differs of how the sides were run: hardware, host, arguments, environment."""

    def told(launch: Launch) -> dict[str, str]:
        how = {name: fact for name, fact in launch.software.items() if name not in (*VERSIONS, "launch")}
        return _flat({**launch.machine, **how})

    return _changes(base, new, told)


def construction(base: Side, new: Side) -> list[Change]:
    """Return the memory and the construction times that differ, medians over launches."""
    before, after = _constructed(base), _constructed(new)
    found = []
    for name in before:
        sides = (before[name], after.get(name, []))
        memory, seconds, build = (
            [_median(entries, what) for entries in sides] for what in ("memory", "seconds", "build")
        )
        if _moved(memory, MEMORY_SHARE, MEMORY_BYTES):
            found.append(Change(f"{name}: device memory", *(f"{one / 2**20:.0f} MiB" for one in memory)))
        if _moved(seconds, SECONDS_SHARE, SECONDS):
            said = (
                f"{one:.1f} s" + (f" ({of:.1f} s builds kernels)" if of >= 0.1 else "")
                for one, of in zip(seconds, build, strict=True)
            )
            found.append(Change(f"{name}: construction", *said))
    return found


def facts(base: Side, new: Side, keys: Iterable[RowKey]) -> list[Change]:
    """Return the facts of rows that differ, of one curve as one, with its largest T as the example."""
    before, after = _rows(base), _rows(new)
    found: dict[tuple[str, str], list[tuple[RowKey, Any, Any]]] = {}
    for key in keys:
        for fact in FACTS:
            was, now = before[key].info.get(fact), after[key].info.get(fact)
            if was != now:
                found.setdefault((key.case.curve, fact), []).append((key, was, now))
    changes = []
    for (curve, fact), those in found.items():
        key, was, now = max(those, key=lambda one: one[0].case.tokens)
        rows = f"{len(those)} rows, as at T={key.case.tokens} {key.component}"
        changes.append(Change(f"{curve}: {fact} of {rows}", str(was), str(now)))
    return changes


def throttled(side: Side) -> list[tuple[Case, str]]:
    """Return the cases during which a GPU was held back, and by what."""
    found: dict[Case, dict[str, None]] = {}
    for launch in side.launches:
        for key, row in launch.rows.items():
            if row.info.get("throttled"):
                found.setdefault(key.case, {}).update(dict.fromkeys(row.info["throttle_reasons"]))
    return [(case, ", ".join(reasons)) for case, reasons in found.items()]


def _refuse_mixed(side: Side) -> None:
    first: dict[RowKey, tuple[Launch, str]] = {}
    for launch in side.launches:
        for key, row in launch.rows.items():
            other, method = first.setdefault(key, (launch, _method(row)))
            if method != _method(row):
                raise ResultError(
                    f"{side.name}: launches differ in clock: {key} is timed by {method} in {other.path},"
                    f" by {_method(row)} in {launch.path}: give each clock as a side"
                )
    versions: dict[str, tuple[Launch, str]] = {}
    for launch in side.launches:
        for name, version in _flat(_versions(launch)).items():
            other, known = versions.setdefault(name, (launch, version))
            if known != version:
                raise ResultError(
                    f"{side.name}: launches differ in {name}: {known} in {other.path}, {version} in"
                    f" {launch.path}: give each version as a side"
                )


def _changes(base: Side, new: Side, told: Any) -> list[Change]:
    """Return what both sides tell and differ in; of launches that differ among themselves, all values."""
    sides: list[dict[str, dict[str, None]]] = []
    for side in (base, new):
        values: dict[str, dict[str, None]] = {}
        for launch in side.launches:
            for name, value in told(launch).items():
                values.setdefault(name, {})[value] = None
        sides.append(values)
    before, after = sides
    found = []
    for name in dict.fromkeys((*before, *after)):
        unset = {"unset": None} if name.startswith(ENVIRONMENT) else {}
        was, now = before.get(name, unset), after.get(name, unset)
        if was and now and set(was) != set(now):
            found.append(Change(name, " and ".join(was), " and ".join(now)))
    return found


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested facts by the last parts of their names; null and empty ones are not told."""
    found: dict[str, str] = {}
    for name, fact in facts.items():
        if isinstance(fact, Mapping):
            found.update(_flat(fact, "" if name == "backends" else f"{prefix}{name} "))
        elif fact not in (None, "", []):
            found[prefix + name] = fact if isinstance(fact, str) else json.dumps(fact)
    return found


def _versions(launch: Launch) -> dict[str, Any]:
    return {name: launch.software[name] for name in VERSIONS if name in launch.software}


def _constructed(side: Side) -> dict[str, list[Construction]]:
    found: dict[str, list[Construction]] = {}
    for launch in side.launches:
        for entry in launch.construction:
            found.setdefault(entry.name, []).append(entry)
    return found


def _median(entries: Sequence[Construction], what: str) -> float:
    """Return the median over the launches that say it; NaN, which differs from nothing, where none does."""
    told = [value for entry in entries if (value := getattr(entry, what)) is not None]
    return median(told) if told else math.nan


def _moved(pair: Sequence[float], share: float, least: float) -> bool:
    return abs(pair[1] - pair[0]) > max(share * pair[0], least)


def _ran(side: Side) -> Iterator[Case]:
    for launch in side.launches:
        yield from (case for case, outcome in launch.outcomes.items() if outcome.what != "skipped")


def _rows(side: Side) -> dict[RowKey, Row]:
    """Return each row as the first launch that has it tells it."""
    return {key: row for launch in reversed(side.launches) for key, row in launch.rows.items()}


def _method(row: Row) -> str:
    return f"{row.clock}{' after an L2 flush' if row.info.get('l2_flushed') else ''}"


def _listed(values: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, values)))
