"""The ``pytest-ep`` command."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_ep.results import compare
from pytest_ep.results import expect
from pytest_ep.results import export
from pytest_ep.results import sweep
from pytest_ep.results.journal import SUFFIX
from pytest_ep.results.journal import JournalError
from pytest_ep.results.journal import journal_path
from pytest_ep.results.journal import recovered
from pytest_ep.results.newfile import write_new
from pytest_ep.results.sides import ResultError

CANNOT = 2
"""Exit code: the question could not be answered."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return its exit code. Errors are one line on stderr."""
    parser = argparse.ArgumentParser(prog="pytest-ep", description="Work with result files of EP cases")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for one in (compare, expect, export, sweep):
        one.add_parser(commands)
    recover = commands.add_parser("recover", help="make the result file of a run that did not get to it")
    recover.add_argument("journal", type=Path, metavar=f"FILE{SUFFIX}", help="the journal it left")
    recover.add_argument("-o", "--output", type=Path, metavar="FILE", help="result file (the journal's name)")
    recover.set_defaults(run=_recover)
    chosen = parser.parse_args(arguments)
    try:
        code = int(chosen.run(chosen))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Who reads has enough (head). What is still buffered must not fail again as the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CANNOT
    except (JournalError, ResultError, OSError) as error:
        print(f"pytest-ep: {error}", file=sys.stderr)
        return CANNOT


def _recover(chosen: argparse.Namespace) -> int:
    output = chosen.output or chosen.journal.with_name(chosen.journal.name.removesuffix(SUFFIX))
    if output == chosen.journal:
        raise JournalError(f"{output} is the journal itself: name the result file with --output")
    result = recovered(chosen.journal)
    if journal_path(output) == chosen.journal and _is_cut_short(output):
        output.unlink()
    write_new(output, json.dumps(result, indent=4))
    print(f"{output}: {len(result['benchmarks'])} rows of {len(result['pytest_ep']['cases'])} finished cases")
    return 0


def _is_cut_short(path: Path) -> bool:
    """Whether this is what a run left of its result file, as on a full disk: its journal has all of it."""
    try:
        json.loads(path.read_text())
    except FileNotFoundError:
        return False
    except ValueError:
        return True
    return False
