"""SKUs, what runs on them, and what does not and why: ``platforms.toml`` and a user's own file."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_ep.matrix.cells import MODES
from pytest_ep.matrix.cells import PRECISIONS
from pytest_ep.matrix.cells import Key
from pytest_ep.matrix.cells import Skip
from pytest_ep.matrix.fields import Fields

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EVIDENCE = ("measured", "upstream", "expected")
UNLISTED_EP_SIZES = (1, 2, 4, 8, 16)
"""EP sizes listed for a device, or a backend, that the file does not know."""

_BUILT_IN = Path(__file__).with_name("platforms.toml")


@dataclass(frozen=True, slots=True)
class Sku:
    """A product. ``gbps`` is GB/s per device in one direction, None where no link is known.

    ``gpus_per_node`` and ``scale_up_domain`` count devices; ``patterns`` are regular expressions that the
    whole device name must match; ``any_ep_size`` admits EP sizes beside the listed ``ep_sizes``.
    """

    name: str
    gpus_per_node: int
    scale_up_domain: int
    link: str = ""
    gbps: float | None = None
    ep_sizes: tuple[int, ...] = UNLISTED_EP_SIZES
    any_ep_size: bool = False
    patterns: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """Cells that run, and on what evidence. Empty ``skus`` or ``ep_sizes`` mean all."""

    backend: str
    mode: str
    precisions: tuple[str, ...]
    skus: tuple[str, ...]
    ep_sizes: tuple[int, ...]
    evidence: str
    source: str

    def covers(self, key: Key) -> bool:
        """Whether this claim speaks of a key."""
        return (
            key.backend == self.backend
            and key.mode == self.mode
            and key.precision in self.precisions
            and (not self.skus or key.sku in self.skus)
            and (not self.ep_sizes or key.ep_size in self.ep_sizes)
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """Cells that do not run, and why. An empty tuple means all.

    With ``above_tokens`` it refuses only cases of more tokens per rank than that.
    """

    backends: tuple[str, ...]
    modes: tuple[str, ...]
    precisions: tuple[str, ...]
    skus: tuple[str, ...]
    ep_sizes: tuple[int, ...]
    above_tokens: int | None
    skip: Skip

    def covers(self, key: Key, tokens: int) -> bool:
        """Whether this refusal speaks of a key at so many tokens per rank; 0 stands for any."""
        return (
            (not self.backends or key.backend in self.backends)
            and (self.above_tokens is None or tokens > self.above_tokens)
            and (not self.modes or key.mode in self.modes)
            and (not self.precisions or key.precision in self.precisions)
            and (not self.skus or key.sku in self.skus)
            and (not self.ep_sizes or key.ep_size in self.ep_sizes)
        )


@dataclass(frozen=True, slots=True)
class Book:
    """The claims and refusals of one file, in its order."""

    claims: tuple[Claim, ...]
    refusals: tuple[Refusal, ...]

    def backends(self) -> Iterator[str]:
        """Every backend that the file names, as often as it does."""
        for claim in self.claims:
            yield claim.backend
        for refusal in self.refusals:
            yield from refusal.backends


@dataclass(frozen=True, slots=True)
class Platforms:
    """What is known about SKUs and backends. A user's ``skus`` come first, ``backends`` as in the files."""

    skus: Mapping[str, Sku]
    backends: tuple[str, ...]
    books: tuple[Book, ...]

    def sku(self, name: str, devices: int = 1) -> Sku:
        """A sku by name. An unlisted one has no link, and its domain is the ``devices`` of its node."""
        here = max(devices, 1)
        return self.skus.get(name) or Sku(name, here, here, any_ep_size=True, source="not listed")

    def match(self, product: str) -> str | None:
        """The sku that a device name belongs to; a user's wins over a built-in one."""
        for sku in self.skus.values():
            if any(re.fullmatch(pattern, product, re.IGNORECASE) for pattern in sku.patterns):
                return sku.name
        return None

    def modes(self, backend: str) -> tuple[str, ...]:
        """The modes of a backend that the files speak of, those that never run included."""
        modes = {claim.mode for book in self.books for claim in book.claims if claim.backend == backend}
        for book in self.books:
            for refusal in book.refusals:
                if backend in refusal.backends:
                    modes.update(refusal.modes)
        return tuple(mode for mode in MODES if mode in modes)

    def claim(self, key: Key) -> Claim | None:
        """The first claim on a key, None where nobody speaks of it."""
        return next((claim for book in self.books for claim in book.claims if claim.covers(key)), None)

    def refusal(self, key: Key, tokens: int = 0) -> Skip | None:
        """Why a key does not run at so many tokens per rank; without ``tokens``, at any.

        A user's file is asked first: what it claims, no later file refuses. A key of which nobody speaks is
        refused as ``not-claimed``, unless nobody claims anything of its backend.
        """
        for book in self.books:
            for refusal in book.refusals:
                if refusal.covers(key, tokens):
                    return refusal.skip
            if any(claim.covers(key) for claim in book.claims):
                return None
        if not any(claim.backend == key.backend for book in self.books for claim in book.claims):
            return None
        what = f"{key.backend} {key.mode} {key.precision} at EP{key.ep_size} on {key.sku}"
        return Skip("not-claimed", f"nobody claims {what}; to try it, claim it in a file for --ep-platforms")


def load(path: Path | None) -> Platforms:
    """The built-in platforms, with a user's file read over them where ``path`` names one.

    Raises pytest.UsageError with one line that names the file and the field.
    """
    sources = [(_BUILT_IN.name, _parse(_BUILT_IN))]
    if path is not None:
        sources.append((str(path), _parse(path)))
    tables: dict[str, Any] = {}
    skus: dict[str, Sku] = {}
    for file, raw in sources:
        read: dict[str, Sku] = {}
        for name, table in _tables(file, raw, "sku").items():
            tables[name] = {**tables.get(name, {}), **table}
            read[name] = _sku(file, name, tables[name])
        skus = read | {name: sku for name, sku in skus.items() if name not in read}
    backends = dict.fromkeys(name for file, raw in sources for name in _tables(file, raw, "backend"))
    books = tuple(_book(file, raw, skus, backends) for file, raw in reversed(sources))
    named = [name for book in reversed(books) for name in book.backends()]
    return Platforms(skus, tuple(dict.fromkeys(named)), books)


def _parse(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw: dict[str, Any] = tomllib.load(file)
        repr(raw)  # a number in hexadecimal may be too long to be shown, as an error about it would
    except OSError as error:
        raise pytest.UsageError(f"--ep-platforms {path}: cannot be read, {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not only its own: of long numbers, of deep nesting
        raise pytest.UsageError(f"--ep-platforms {path}: not TOML, {error}") from None
    for name in raw:
        if name not in ("sku", "backend", "refused"):
            raise pytest.UsageError(f"{path}: unknown table {name}, known: sku, backend, refused")
    return raw


def _tables(file: str, raw: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """The sub-tables of a table, their names checked: they reach test ids and ``-k``."""
    tables = raw.get(name, {})
    if not isinstance(tables, dict):
        raise pytest.UsageError(f"{file}: {name} must be tables [{name}.NAME]")
    for key, table in tables.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]*", key):
            raise pytest.UsageError(f"{file}: [{name}.{key}] must be named in a-z, 0-9 and _")
        if not isinstance(table, dict):
            raise pytest.UsageError(f"{file}: {name}.{key} must be a table")
    return tables


def _sku(file: str, name: str, table: Any) -> Sku:
    with Fields(file, f"[sku.{name}]", table) as fields:
        if name == "all":
            raise fields.error("is what --ep-sku calls every sku: give it another name")
        sku = Sku(
            name=name,
            gpus_per_node=fields.count("gpus_per_node"),
            scale_up_domain=fields.count("scale_up_domain"),
            link=fields.text("link", ""),
            gbps=fields.speed("gbps"),
            ep_sizes=fields.counts("ep_sizes", UNLISTED_EP_SIZES),
            any_ep_size=fields.flag("any_ep_size"),
            patterns=fields.texts("patterns"),
            source=fields.text("source"),
        )
        for pattern in sku.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise fields.error(f"patterns: {pattern!r} is no regular expression, {error}") from None
    return sku


def _book(file: str, raw: Mapping[str, Any], skus: Mapping[str, Sku], backends: Collection[str]) -> Book:
    claimed = _tables(file, raw, "backend")
    claims = (claim for name, modes in claimed.items() for claim in _claims(file, name, modes, skus))
    refused = raw.get("refused", [])
    if not isinstance(refused, list):
        raise pytest.UsageError(f"{file}: refused must be tables [[refused]]")
    refusals = (_refusal(file, number, table, skus, backends) for number, table in enumerate(refused, 1))
    return Book(tuple(claims), tuple(refusals))


def _claims(file: str, backend: str, modes: Mapping[str, Any], skus: Mapping[str, Sku]) -> Iterator[Claim]:
    for mode, tables in modes.items():
        where = f"[[backend.{backend}.{mode}]]"
        if mode not in MODES:
            raise pytest.UsageError(f"{file}: {where} is of no known mode, known: {', '.join(MODES)}")
        if not isinstance(tables, list):
            raise pytest.UsageError(f"{file}: backend.{backend}.{mode} must be tables {where}")
        for number, table in enumerate(tables, 1):
            with Fields(file, f"{where} {number}", table) as fields:
                claim = Claim(
                    backend=backend,
                    mode=mode,
                    precisions=fields.texts("precisions", PRECISIONS) or PRECISIONS,
                    skus=fields.texts("skus", skus),
                    ep_sizes=fields.counts("ep_sizes"),
                    evidence=fields.choice("evidence", fields.text("evidence"), EVIDENCE),
                    source=fields.text("source"),
                )
            yield claim


def _refusal(
    file: str, number: int, table: Any, skus: Mapping[str, Sku], backends: Collection[str]
) -> Refusal:
    with Fields(file, f"[[refused]] {number}", table) as fields:
        refusal = Refusal(
            backends=fields.texts("backends"),
            modes=fields.texts("modes", MODES),
            precisions=fields.texts("precisions", PRECISIONS),
            skus=fields.texts("skus", skus),
            ep_sizes=fields.counts("ep_sizes"),
            above_tokens=fields.optional_count("above_tokens"),
            skip=Skip(fields.text("code"), fields.text("reason"), fields.text("link", "")),
        )
        if not re.fullmatch(r"[a-z0-9-]+", refusal.skip.code):
            raise fields.error(f"code must be in a-z, 0-9 and -, not {refusal.skip.code!r}")
        for name in refusal.backends:
            if name not in backends:
                known = f"known: {', '.join(backends)}; one of your own needs a table [backend.NAME]"
                raise fields.error(f"backends has no {name!r}, {known}")
    return refusal
