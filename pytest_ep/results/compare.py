"""``pytest-ep compare``: result files of one side against those of others."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any
from typing import TypeVar

from pytest_ep.results.sides import ResultError
from pytest_ep.results.sides import load_side
from pytest_ep.results.verdicts import FAILING
from pytest_ep.results.verdicts import KNOWN
from pytest_ep.results.verdicts import LAUNCH
from pytest_ep.results.verdicts import NONE
from pytest_ep.results.verdicts import Floor
from pytest_ep.results.verdicts import parse_floor
from pytest_ep.results.verdicts import parse_words

if TYPE_CHECKING:
    from pytest_ep.results.comparison import Comparison

FORMATS = ("text", "markdown", "json")
_Parsed = TypeVar("_Parsed")


def add_parser(commands: Any) -> None:
    """Add ``compare`` to the subcommands of argparse."""
    parser = commands.add_parser(
        "compare",
        help="say what is slower, faster, wrong or missing in other result files",
        description="Compare each NEW with BASE. A side is a result file, a folder of them, or a glob: the"
        " launches of that side. Exit codes: 0; 1 where a word of --fail-on applies; 2 cannot compare.",
        usage="pytest-ep compare [options] BASE NEW [NEW ...]",
    )
    parser.add_argument("sides", nargs="+", metavar="SIDE", help="BASE, then NEW once or more often")
    parser.add_argument(
        "--floor",
        type=_argument(parse_floor),
        metavar="FLOOR",
        help=f"a change must exceed both to matter ({str(Floor()).replace('%', '%%')})",
    )
    parser.add_argument(
        "--fail-on",
        type=_argument(parse_words),
        metavar="WORDS",
        help=f"what gives exit code 1 ({','.join(FAILING)}); known: {', '.join(KNOWN)}, or {NONE}",
    )
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help=f"({FORMATS[0]})")
    parser.add_argument(
        "--expect", type=Path, metavar="FILE", help="no BASE: judge each NEW by a file of expectations"
    )
    parser.set_defaults(run=_run)


def _argument(parse: Callable[[str], _Parsed]) -> Callable[[str], _Parsed]:
    def parsed(text: str) -> _Parsed:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _run(chosen: argparse.Namespace) -> int:
    if chosen.expect is not None:
        return _qualify(chosen)
    base, *news = chosen.sides
    if not news:
        raise ResultError(f"only {base}: give BASE and NEW, or --expect FILE for a rack without a base")
    from pytest_ep.results.comparison import compare

    side = load_side(base)
    comparisons = [compare(side, load_side(new), chosen.floor or Floor()) for new in news]
    fail_on = FAILING if chosen.fail_on is None else chosen.fail_on
    failing = any(comparison.failing(fail_on) for comparison in comparisons)
    for comparison in comparisons:
        if not failing and (untold := comparison.untold(fail_on)):
            raise ResultError(f"--fail-on {LAUNCH}: {untold}")
    _write(comparisons, fail_on, chosen.format)
    return int(failing)


def _qualify(chosen: argparse.Namespace) -> int:
    if chosen.floor is not None or chosen.fail_on is not None:
        raise ResultError("--expect judges by its file alone: leave out --floor and --fail-on")
    from pytest_ep.results.qualify import qualify

    return qualify(chosen.expect, chosen.sides, chosen.format)


def _write(comparisons: Sequence[Comparison], fail_on: Sequence[str], style: str) -> None:
    if style == "json":
        from pytest_ep.results.comparison_json import document

        documents = [document(comparison, fail_on) for comparison in comparisons]
        print(json.dumps({"comparisons": documents}, indent=2))
        return
    if style == "markdown":
        from pytest_ep.results.comparison_markdown import lines
    else:
        from pytest_ep.results.comparison_text import lines
    for number, comparison in enumerate(comparisons):
        if number:
            print()
        print("\n".join(lines(comparison, fail_on)))
