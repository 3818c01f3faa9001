"""``pytest-ep export``: result files as one table, for pandas, duckdb and sheets."""

from __future__ import annotations

import argparse
import csv
import io
import json
import statistics
import sys
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from typing import TextIO

from pytest_ep.results.newfile import write_new
from pytest_ep.results.sides import PARAMS
from pytest_ep.results.sides import Case
from pytest_ep.results.sides import Launch
from pytest_ep.results.sides import Outcome
from pytest_ep.results.sides import Row
from pytest_ep.results.sides import load_side

COLUMNS = (
    "file",
    "case",
    *PARAMS,
    "component",
    "probe",
    "outcome",
    "code",
    "reason",
    "versions",
    "min_us",
    "median_us",
    "mean_us",
    "stddev_us",
    "max_us",
    "rounds",
)
"""What every line has, before the keys of ``extra_info``; the statistics are of the stored samples."""


def add_parser(commands: Any) -> None:
    """Add ``export`` to the subcommands of argparse."""
    parser = commands.add_parser("export", help="write result files as one table")
    parser.add_argument("files", nargs="+", metavar="FILE", help="a result file, a folder of them, or a glob")
    parser.add_argument("--csv", action="store_true", required=True, help="as RFC 4180 has it")
    parser.add_argument("-o", "--output", type=Path, metavar="OUT", help="a new file (standard output)")
    parser.set_defaults(run=_run)


def lines(launches: Iterable[Launch]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the columns and the lines of a table: a line a row, and one for each case that left none.

    The columns are ``COLUMNS``, then all keys of ``extra_info`` in the order in which they come up.
    """
    table = [line for launch in launches for line in _lines(launch)]
    extra = dict.fromkeys(name for line in table for name in line if name not in COLUMNS)
    return [*COLUMNS, *extra], table


def write(launches: Iterable[Launch], file: TextIO) -> None:
    """Write the table as CSV: null is empty, lists are joined by ``;``, mappings are JSON."""
    columns, table = lines(launches)
    writer = csv.DictWriter(file, columns, restval="")
    writer.writeheader()
    writer.writerows({name: _text(value) for name, value in line.items()} for line in table)


def _run(chosen: argparse.Namespace) -> int:
    launches = [launch for text in chosen.files for launch in load_side(text).launches]
    text = io.StringIO()
    write(launches, text)
    if chosen.output is None:
        sys.stdout.write(text.getvalue())
    else:
        write_new(chosen.output, text.getvalue())
    return 0


def _lines(launch: Launch) -> Iterator[dict[str, Any]]:
    timed = {row.key.case for row in launch.rows.values()}
    for row in launch.rows.values():
        outcome = launch.outcomes[row.key.case]
        # Ours last: a key of the same name in extra_info must not take a column's place.
        yield {
            **row.info,
            **_about(launch, outcome, row.key.case),
            "component": row.key.component,
            **_statistics(row),
        }
    for case, outcome in launch.outcomes.items():
        if case not in timed:
            yield _about(launch, outcome, case)
    for outcome in launch.unplaced.values():
        yield _about(launch, outcome)


def _about(launch: Launch, outcome: Outcome, case: Case | None = None) -> dict[str, Any]:
    said = {
        "file": str(launch.path),
        "case": outcome.nodeid,
        "outcome": outcome.what,
        "code": outcome.code,
        "reason": outcome.reason,
    }
    if case is None:
        return said
    versions: Mapping[str, str] = launch.software.get("backends", {}).get(case.backend, {})
    return {**said, **asdict(case), "versions": [f"{name}={is_}" for name, is_ in versions.items()]}


def _statistics(row: Row) -> dict[str, float | int]:
    us = [second * 1e6 for second in row.seconds]
    return {
        "min_us": min(us),
        "median_us": statistics.median(us),
        "mean_us": statistics.fmean(us),
        "stddev_us": statistics.stdev(us) if len(us) > 1 else 0.0,
        "max_us": max(us),
        "rounds": len(us),
    }


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return json.dumps(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ";".join(map(_text, value))
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
