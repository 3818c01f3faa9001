"""The ``pytest-ep`` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_ep.results.journal import SUFFIX
from pytest_ep.results.journal import JournalError
from pytest_ep.results.journal import recovered

CANNOT = 2
"""Exit code: the question could not be answered."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return its exit code. Errors are one line on stderr."""
    parser = argparse.ArgumentParser(prog="pytest-ep", description="Work with result files of EP cases")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    recover = commands.add_parser("recover", help="make the result file of a run that did not get to it")
    recover.add_argument("journal", type=Path, metavar=f"FILE{SUFFIX}", help="the journal it left")
    recover.add_argument("-o", "--output", type=Path, metavar="FILE", help="result file (the journal's name)")
    recover.set_defaults(run=_recover)
    chosen = parser.parse_args(arguments)
    try:
        return int(chosen.run(chosen))
    except (JournalError, OSError) as error:
        print(f"pytest-ep: {error}", file=sys.stderr)
        return CANNOT


def _recover(chosen: argparse.Namespace) -> int:
    output = chosen.output or chosen.journal.with_name(chosen.journal.name.removesuffix(SUFFIX))
    if output == chosen.journal:
        raise JournalError(f"{output} is the journal itself: name the result file with --output")
    result = recovered(chosen.journal)
    with output.open("x") as file:  # exclusive: a result file is never overwritten
        json.dump(result, file, indent=4)
    print(f"{output}: {len(result['benchmarks'])} rows of {len(result['pytest_ep']['cases'])} finished cases")
    return 0
