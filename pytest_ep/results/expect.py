"""``pytest-ep expect``: writes what the result files of a good rack let one expect of others."""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from decimal import ROUND_CEILING
from decimal import Decimal
from pathlib import Path
from statistics import median
from typing import Any
from typing import TextIO

from pytest_ep.results.expectations import SELECTORS
from pytest_ep.results.expectations import value_of
from pytest_ep.results.newfile import write_new
from pytest_ep.results.sides import Launch
from pytest_ep.results.sides import ResultError
from pytest_ep.results.sides import Row
from pytest_ep.results.sides import RowKey
from pytest_ep.results.sides import load_side

MARGIN = 5.0
"""Percent: what good racks of one kind may differ by."""
_DIGITS = 4


def add_parser(commands: Any) -> None:
    """Add ``expect`` to the subcommands of argparse."""
    parser = commands.add_parser("expect", help="write expectations from the result files of a good rack")
    parser.add_argument("files", nargs="+", metavar="FILE", help="a result file, a folder of them, or a glob")
    parser.add_argument(
        "--margin", type=_percent, default=MARGIN, metavar="PERCENT", help=f"allowance ({MARGIN:g}%%)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="OUT", help="a new file (standard output)")
    parser.set_defaults(run=_run)


def write(launches: Sequence[Launch], margin: float, file: TextIO) -> None:
    """Write expectations that these launches meet, with ``margin`` percent to spare.

    ``max_us`` is the median of the launches' medians and the margin; ``max_spread_us`` the largest of their
    spreads and the margin of that median. Raises ResultError where the launches are of no good rack.
    """
    _refuse_failed(launches)
    curves: dict[RowKey, dict[int, list[Row]]] = {}
    for launch in launches:
        for key, row in launch.rows.items():
            curve = RowKey(replace(key.case, tokens=0), key.component)
            curves.setdefault(curve, {}).setdefault(key.case.tokens, []).append(row)
    if not curves:
        raise ResultError(f"{launches[0].path}: no timed case to expect anything from")
    for line in _header(launches, margin):
        print(f"# {' '.join(line.split())}".rstrip(), file=file)
    for curve, by_tokens in curves.items():
        print(file=file)
        for line in _cell(curve, by_tokens, margin):
            print(line, file=file)


def _run(chosen: argparse.Namespace) -> int:
    launches = [launch for text in chosen.files for launch in load_side(text).launches]
    text = io.StringIO()
    write(launches, chosen.margin, text)  # which may refuse when it has written a part
    if chosen.output is None:
        sys.stdout.write(text.getvalue())
    else:
        write_new(chosen.output, text.getvalue())
    return 0


def _refuse_failed(launches: Iterable[Launch]) -> None:
    for launch in launches:
        for outcome in (*launch.outcomes.values(), *launch.unplaced.values()):
            if outcome.what == "failed":
                raise ResultError(
                    f"{launch.path}: {outcome.nodeid} failed: make expectations from a rack that is right"
                )


def _header(launches: Sequence[Launch], margin: float) -> Iterator[str]:
    yield "Expectations of pytest-ep, for: pytest-ep compare --expect THIS-FILE NEW..."
    yield f"Made with: pytest-ep expect --margin {margin:g}% {' '.join(str(one.path) for one in launches)}"
    yield "max_us is the median of the launches' medians, plus the margin; max_spread_us the largest spread"
    yield "between ranks of a launch, plus the margin of that median. Edit them, or add min_gbps, as needed."
    yield from dict.fromkeys(f"machine: {_machine(launch.machine)}" for launch in launches)
    yield from dict.fromkeys(f"software: {_software(launch.software)}" for launch in launches)


def _machine(facts: Mapping[str, Any]) -> str:
    said = f"{facts.get('devices')} x {facts.get('product')} a host (sku {facts.get('sku')})"
    for name in ("driver", "link", "ranks_by_host"):
        said += f", {name} {facts[name]}" if facts.get(name) else ""
    return said


def _software(facts: Mapping[str, Any]) -> str:
    named = [f"{name} {facts[name]}" for name in ("pytest_ep", "torch", "cuda", "nccl") if facts.get(name)]
    for backend, versions in facts.get("backends", {}).items():
        named.append(f"{backend} ({', '.join(f'{name} {is_}' for name, is_ in versions.items())})")
    return ", ".join(named)


def _cell(curve: RowKey, by_tokens: Mapping[int, Sequence[Row]], margin: float) -> Iterator[str]:
    """Write one curve: what all of its rows share, then a line a size."""
    clocks = sorted({row.clock for rows in by_tokens.values() for row in rows})
    if len(clocks) > 1:
        raise ResultError(
            f"{curve}: timed by {' and '.join(clocks)}, which are different quantities:"
            " measure again with one --ep-clock"
        )
    yield "[[cell]]"
    for name in SELECTORS:
        if name != "tokens":
            yield f"{name} = {_toml(value_of(curve, name))}"
    yield f"clock = {_toml(clocks[0])}"
    yield "each = ["
    width = len(str(max(by_tokens)))
    for tokens, rows in sorted(by_tokens.items()):
        middle = median(float(row.info["p50_us"]) for row in rows)
        allowance = middle * margin / 100
        spread = max(float(row.info["spread_us"]) for row in rows) + allowance
        size = f"{tokens},".ljust(width + 1)
        most = f"{_up(middle + allowance)},".ljust(_DIGITS + 3)
        yield f"  {{ tokens = {size} max_us = {most} max_spread_us = {_up(spread)} }},"
    yield "]"


def _up(value: float) -> str:
    """Round up to a few digits, so that what it was made of is within it."""
    if value <= 0:
        return "0.001"  # a limit is positive
    exact = Decimal(repr(value))
    digits = Decimal(1).scaleb(exact.adjusted() + 1 - _DIGITS)
    return f"{exact.quantize(digits, ROUND_CEILING):f}"


def _toml(value: str | int) -> str:
    """Write a value; the escapes of a JSON string are TOML's too, but for DEL, which TOML wants escaped."""
    if isinstance(value, int):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _percent(text: str) -> float:
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage such as {MARGIN:g}%")
    return value
