"""The journal beside a result file: one JSON line per finished case, so that a crash loses none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from pytest_ep.matrix.cells import Cell
from pytest_ep.results.record import SCHEMA
from pytest_ep.results.record import CaseResult
from pytest_ep.results.record import parameters
from pytest_ep.results.record import section

SUFFIX = ".jsonl"


class JournalError(ValueError):
    """A file that is no journal and no result file; one line that says which and why."""


def journal_path(result: Path) -> Path:
    """Return where the journal of a result file is."""
    return result.with_name(result.name + SUFFIX)


def identity(cell: Cell, **settings: object) -> str:
    """Return a digest of a case: its cell, its shape and the settings that its numbers depend on."""
    shape = (cell.shape.hidden, cell.shape.experts, cell.shape.top_k)
    said = json.dumps([SCHEMA, parameters(cell), shape, settings], sort_keys=True, default=str)
    return sha256(said.encode()).hexdigest()[:16]


class Journal:
    """Written by the reporting rank: a line is on disk before the next case begins."""

    def __init__(self, path: Path, head: Mapping[str, Any], resumed: Iterable[Mapping[str, Any]]) -> None:
        """Begin the file, which must not exist, with what holds for all cases and what ``finished`` gave."""
        self._path = path
        self._file = path.open("x")
        for line in ({"pytest_ep_journal": SCHEMA, **head}, *resumed):
            self._write(line)

    def add(self, result: CaseResult, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write one case with pytest-benchmark's rows of it."""
        self._write({**result.line(), "rows": list(rows)})

    def remove(self) -> None:
        """Delete the file: the result file is complete."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _write(self, line: Mapping[str, Any]) -> None:
        print(json.dumps(line), file=self._file, flush=True)
        os.fsync(self._file.fileno())


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a journal's head and its case lines; a last line cut short by a crash is left out.

    Raises JournalError.
    """
    parsed = list(_parsed(_text(path).splitlines()))
    if not parsed or "pytest_ep_journal" not in parsed[0]:
        raise JournalError(
            f"{path} is no journal of pytest_ep: give the {SUFFIX} file beside the result file"
        )
    return parsed[0], parsed[1:]


def recovered(path: Path) -> dict[str, Any]:
    """Return the result file, in pytest-benchmark's format, of a journal. Raises JournalError."""
    head, lines = read(path)
    commit_info = dict(head["commit_info"])
    backends = {row["params"]["backend"]: line["versions"] for line in lines for row in line["rows"]}
    commit_info["pytest_ep"] = {**commit_info.get("pytest_ep", {}), "backends": backends}
    done = {line["case"] for line in lines}
    return {
        "machine_info": head["machine_info"],
        "commit_info": commit_info,
        "benchmarks": [row for line in lines for row in line["rows"]],
        "datetime": head["datetime"],
        "version": head["version"],
        "pytest_ep": section(lines, [case for case in head["selected"] if case not in done], "the run ended"),
    }


def finished(path: Path) -> dict[str, dict[str, Any]]:
    """Return the timed and checked cases of a journal or of a result file, with their rows, by node id.

    Raises JournalError.
    """
    text = _text(path)
    if text.startswith('{"pytest_ep_journal"'):
        _, lines = read(path)
        return {line["case"]: line for line in lines if line["outcome"] in ("timed", "checked")}
    try:
        result = json.loads(text)
        cases = {case["case"]: {**case, "rows": []} for case in result["pytest_ep"]["cases"]}
        for row in result["benchmarks"]:
            component = (row["params"] or {}).get("component")
            case = cases.get(f"{row['fullname'].removesuffix(f'-{component}]')}]")
            if case is not None:  # else of a test beside the cases
                case["rows"].append(row)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise JournalError(
            f"{path} is neither a result file nor a journal of pytest_ep: "
            f"give what --benchmark-json wrote, or the {SUFFIX} file beside it"
        ) from None
    return cases


def _text(path: Path) -> str:
    try:
        # What is no text is no JSON either: that is said in one place, and a journal counts up to there.
        return path.read_text(errors="replace")
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror}") from None


def _parsed(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            return
        if isinstance(value, dict):
            yield value
