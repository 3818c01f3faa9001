"""What a rack is expected to reach: a TOML file of limits, each for the rows that it selects.

A file has ``[[cell]]`` tables. Any of ``SELECTORS`` select rows, each by a value or a list; ``tokens`` also
takes the text ``"1..512"``. ``clock`` names what must have timed the rows, as another clock measures another
quantity. At least one of ``LIMITS`` says what each row must keep. ``each`` lists tables that add to theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from typing import TypeAlias

import pytest

from pytest_ep.matrix.cells import MODES
from pytest_ep.matrix.cells import PRECISIONS
from pytest_ep.matrix.fields import Fields
from pytest_ep.results.record import CLOCKS
from pytest_ep.results.record import COMPONENTS
from pytest_ep.results.sides import PARAMS
from pytest_ep.results.sides import Case
from pytest_ep.results.sides import ResultError
from pytest_ep.results.sides import RowKey

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SELECTORS = (*PARAMS, "component")
_NUMBERS = ("ep_size", "tokens")
_KNOWN = {"mode": MODES, "precision": PRECISIONS, "component": COMPONENTS}

Choice: TypeAlias = "str | int | range"
"""A value that a selector admits; a range of tokens from its first to its last."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit by its ``name`` in the file, of ``extra_info``'s ``key``: the most it may be, or the least.

    With ``between_launches`` it limits how far the launches lie apart, in percent of their median.
    """

    name: str
    key: str
    unit: str
    most: bool = True
    between_launches: bool = False


LIMITS = (
    Limit("max_us", "p50_us", "us"),
    Limit("min_gbps", "gbps", "GB/s", most=False),
    Limit("max_spread_us", "spread_us", "us"),
    Limit("max_launch_spread_percent", "p50_us", "%", between_launches=True),
)


@dataclass(frozen=True, slots=True)
class Expectation:
    """Limits, by name, for the rows that it selects; ``where`` is its place in the file."""

    where: str
    clock: str
    selects: Mapping[str, tuple[Choice, ...]]
    limits: Mapping[str, float]

    def __str__(self) -> str:
        chosen = (f"{name}={shown(choices)}" for name, choices in self.selects.items())
        return " ".join([self.where, *chosen])

    def selects_row(self, key: RowKey) -> bool:
        """Whether a row is meant, whatever its clock."""
        return all(admits(choices, value_of(key, name)) for name, choices in self.selects.items())

    def covers(self, case: Case) -> bool:
        """Whether rows of a case are meant; tokens 0 stands for all sizes, a probe for all of its key."""
        any_value = {"component"}
        if case.whole:
            any_value.add("tokens")
        elif case.probe:
            any_value |= {"routing", "token_skew", "tokens"}
        chosen = {name: choices for name, choices in self.selects.items() if name not in any_value}
        return all(admits(choices, getattr(case, name)) for name, choices in chosen.items())


def admits(choices: tuple[Choice, ...], value: str | int) -> bool:
    """Whether a value is among the choices."""
    return any(value in one if isinstance(one, range) else value == one for one in choices)


def value_of(key: RowKey, selector: str) -> str | int:
    """Return what a row has for a selector."""
    value: str | int = key.component if selector == "component" else getattr(key.case, selector)
    return value


def shown(choices: tuple[Choice, ...]) -> str:
    """Write choices as the file may have them: ``1..512,1024``."""
    return ",".join(f"{one[0]}..{one[-1]}" if isinstance(one, range) else str(one) for one in choices)


def load(path: Path) -> tuple[Expectation, ...]:
    """Read a file of expectations. Raises ResultError, one line, for what it does not understand."""
    try:
        return tuple(_expectations(str(path), tomllib.loads(path.read_text(encoding="utf-8"))))
    except OSError as error:
        raise ResultError(f"{path}: cannot be read, {error.strerror}: give what expect wrote") from None
    except ValueError as error:  # TOMLDecodeError is one
        raise ResultError(f"{path}: not TOML: {error}") from None
    except pytest.UsageError as error:
        raise ResultError(str(error)) from None


def _expectations(file: str, content: Mapping[str, Any]) -> Iterator[Expectation]:
    with Fields(file, "the file", content) as fields:
        cells = _tables(fields, "cell")
    if not cells:
        raise fields.error("has no [[cell]]")
    for number, cell in enumerate(cells, 1):
        with Fields(file, f"[[cell]] {number}", cell) as fields:
            several = _tables(fields, "each")
            shared, fields.left = fields.left, {}
        for place, entry in enumerate(several or [{}], 1):
            where = f"[[cell]] {number}, each {place}" if several else f"[[cell]] {number}"
            yield _expectation(file, where, {**shared, **entry})


def _tables(fields: Fields, name: str) -> list[dict[str, Any]]:
    """Take a list of tables; none where it is left out, but not an empty one."""
    fields.known.append(name)
    if name not in fields.left:
        return []
    tables = fields.left.pop(name)
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise fields.error(f"{name} must be a list of tables, not {tables!r}")
    return tables


def _expectation(file: str, where: str, table: Mapping[str, Any]) -> Expectation:
    with Fields(file, where, table) as fields:
        selects = {name: choices for name in SELECTORS if (choices := _choices(fields, name))}
        limits = {limit.name: bound for limit in LIMITS if (bound := fields.speed(limit.name)) is not None}
        clock = fields.choice("clock", fields.text("clock"), CLOCKS)
        fields.known.append("each")
    if not limits:
        raise fields.error(f"has no limit, known: {', '.join(limit.name for limit in LIMITS)}")
    return Expectation(where, clock, selects, limits)


def _choices(fields: Fields, name: str) -> tuple[Choice, ...]:
    fields.known.append(name)
    if name not in fields.left:
        return ()
    given = fields.left.pop(name)
    values = given if isinstance(given, list) else [given]
    if not values:
        raise fields.error(f"{name} is an empty list, which selects nothing")
    return tuple(_choice(fields, name, value) for value in values)


def _choice(fields: Fields, name: str, value: object) -> Choice:
    if name not in _NUMBERS:
        if not isinstance(value, str):
            raise fields.error(f"{name} must be text or a list of texts, not {value!r}")
        return fields.choice(name, value, _KNOWN.get(name, ()))
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if name == "tokens" and isinstance(value, str):
        first, _, last = (part.strip() for part in value.partition(".."))
        if first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last):
            return range(int(first), int(last) + 1)
    ranges = ' or a range as "1..512",' if name == "tokens" else ""
    raise fields.error(f"{name} must be a positive whole number,{ranges} or a list of such, not {value!r}")
