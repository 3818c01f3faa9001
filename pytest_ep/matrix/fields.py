"""The fields of one TOML table, taken by type, with errors for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from typing import TypeVar

import pytest

Number = TypeVar("Number", int, float)

MOST = 2**20
"""The largest number that any field takes."""


class Fields:
    """One table's fields, taken by type; what is left over at the end is an error."""

    def __init__(self, file: str, where: str, table: Any) -> None:
        if not isinstance(table, dict):
            raise pytest.UsageError(f"{file}: {where} must be a table")
        self.where = f"{file}: {where}"
        self.left = dict(table)
        self.known: list[str] = []

    def __enter__(self) -> Fields:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self.left:
            raise self.error(f"unknown field {next(iter(self.left))}, known: {', '.join(self.known)}")

    def error(self, text: str) -> pytest.UsageError:
        """An error that names the file, the table and the field."""
        return pytest.UsageError(f"{self.where} {text}")

    def _take(self, name: str, default: Any, kind: type | tuple[type, ...], what: str) -> Any:
        self.known.append(name)
        value = self.left.pop(name, default)
        if value is None:
            raise self.error(f"lacks {name}")
        # bool is an int in Python, but `true` is not a count.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"{name} must be {what}, not {value!r}")
        return value

    def _bounded(self, name: str, value: Number) -> Number:
        if value > MOST:
            raise self.error(f"{name} must be at most {MOST}, not {value}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A text; required, and not empty, unless it has a default."""
        value = str(self._take(name, default, str, "text"))
        if default is None and not value.strip():
            raise self.error(f"{name} must not be empty")
        return value

    def flag(self, name: str) -> bool:
        """True or false; false where it is left out."""
        return bool(self._take(name, False, bool, "true or false"))

    def count(self, name: str) -> int:
        """A positive whole number."""
        value = int(self._take(name, None, int, "a positive whole number"))
        if value < 1:
            raise self.error(f"{name} must be a positive whole number, not {value}")
        return self._bounded(name, value)

    def optional_count(self, name: str) -> int | None:
        """A positive whole number, None where it is left out."""
        if name in self.left:
            return self.count(name)
        self.known.append(name)
        return None

    def speed(self, name: str) -> float | None:
        """A positive number, None where it is left out."""
        if name not in self.left:
            self.known.append(name)
            return None
        value = self._take(name, None, (int, float), "a positive number")
        if not value > 0:
            raise self.error(f"{name} must be a positive number, not {value}")
        return float(self._bounded(name, value))

    def counts(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """A list of positive whole numbers."""
        values = self._take(name, list(default), list, "a list of positive whole numbers")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise self.error(f"{name} must be a list of positive whole numbers, not {value!r}")
            self._bounded(name, value)
        return tuple(values)

    def texts(self, name: str, known: Iterable[str] = ()) -> tuple[str, ...]:
        """A list of texts, each of them one of ``known`` where any are."""
        values = self._take(name, [], list, "a list of texts")
        for value in values:
            if not isinstance(value, str):
                raise self.error(f"{name} must be a list of texts, not {value!r}")
            self.choice(name, value, known)
        return tuple(values)

    def choice(self, name: str, value: str, known: Iterable[str]) -> str:
        """A value that must be one of ``known`` where any are."""
        if (names := tuple(known)) and value not in names:
            raise self.error(f"{name} has no {value!r}, known: {', '.join(names)}")
        return value
