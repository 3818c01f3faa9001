"""The result files of one side of a comparison, read."""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields
from pathlib import Path
from typing import Any
from typing import Literal

from pytest_ep.matrix.skew import NO_SKEW
from pytest_ep.results.environment import NO_COMMIT
from pytest_ep.results.journal import SUFFIX
from pytest_ep.results.natural import natural
from pytest_ep.results.record import CLOCKS
from pytest_ep.results.record import COMPONENTS
from pytest_ep.results.record import SCHEMA

PROBE = "::test_probe["
"""What the node id of a probe has and that of a case has not."""


class ResultError(ValueError):
    """What keeps result files from answering; one line that says what, where and what to do."""


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """Which case: its cell's coordinates as rows carry them.

    ``tokens`` is 0 for all of a key that cannot run; ``probe`` names the probe that this is, if it is one.
    """

    backend: str
    sku: str
    ep_size: int
    mode: str
    precision: str
    model: str
    routing: str
    token_skew: str
    tokens: int
    probe: str = ""

    @property
    def whole(self) -> bool:
        """Whether this is all of a key that cannot run."""
        return not self.tokens and not self.probe

    @property
    def key(self) -> str:
        """What one live transport served, as people read it: all but routing, skew and tokens."""
        return f"{self.backend} {self.sku} EP{self.ep_size} {self.mode} {self.precision} {self.model}"

    @property
    def curve(self) -> str:
        """What a curve over tokens is of, as people read it, component and clock apart."""
        skew = "" if self.token_skew == NO_SKEW.name else f" skew {self.token_skew}"
        return f"{self.key} {self.routing}{skew}"

    def __str__(self) -> str:
        if self.probe:
            return f"{self.key} probe {self.probe}"
        return f"{self.curve} T={self.tokens or 'any'}"


PARAMS = tuple(field.name for field in fields(Case) if field.name != "probe")
"""The coordinates of a case, by name."""


@dataclass(frozen=True, slots=True, order=True)
class RowKey:
    """Which row: a case and a component, whatever file and test it stood in."""

    case: Case
    component: str

    def __str__(self) -> str:
        return f"{self.case} {self.component}"


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One row: its ``extra_info`` as ``info``, and the stored samples in seconds, in time order."""

    key: RowKey
    info: Mapping[str, Any]
    seconds: tuple[float, ...]

    @property
    def clock(self) -> str:
        """What timed it."""
        return str(self.info["clock"])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one case or probe in one launch. ``reason`` and ``code`` as in ``CaseResult``."""

    nodeid: str
    what: Literal["timed", "checked", "probed", "failed", "skipped", "not_run"]
    reason: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class Construction:
    """What constructing the transport of one key took, in bytes and seconds; None where no one says.

    ``build`` is what building kernels took, beside ``seconds``.
    """

    name: str
    memory: float | None
    seconds: float | None
    build: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One result file.

    ``outcomes`` are of the cases whose coordinates the file tells, ``unplaced`` those of which it names the
    node id alone. ``construction`` has one entry a key; ``machine`` and ``software`` are the ``pytest_ep``
    of ``machine_info`` and ``commit_info``; ``commit`` is what the folder of the run had checked out, if any.
    """

    path: Path
    rows: Mapping[RowKey, Row]
    outcomes: Mapping[Case, Outcome]
    unplaced: Mapping[str, Outcome]
    construction: Sequence[Construction]
    machine: Mapping[str, Any]
    software: Mapping[str, Any]
    commit: str

    def reaches(self, case: Case) -> bool:
        """Whether it was on the machine, and of as many ranks, as a case needs."""
        here = (self.machine.get("sku", case.sku), self.machine.get("ranks", case.ep_size))
        return (case.sku, case.ep_size) == here


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One side of a comparison: at least one launch, in the natural order of their names."""

    name: str
    launches: tuple[Launch, ...]


def load_side(text: str) -> Side:
    """Read the files that ``text`` names: a file, a folder (its *.json), or a glob. Raises ResultError.

    A folder's name or the text names the side.
    """
    path = Path(text)
    if path.is_dir():
        name, files = path.resolve().name, list(path.glob("*.json"))
        if not files:
            raise ResultError(
                f"{text}: no *.json in this folder: give the folder that holds the result files"
            )
    elif path.exists() or not glob.has_magic(text):
        name, files = text, [path]
    else:
        name, files = text, [Path(found) for found in glob.glob(text, recursive=True)]
        if not files:
            raise ResultError(f"{text}: no file matches: give a result file, a folder of them, or a glob")
    return Side(name, tuple(load_launch(file) for file in sorted(files, key=lambda file: natural(str(file)))))


def load_launch(path: Path) -> Launch:
    """Read one result file. Raises ResultError where it is none, or says two things of one row."""
    result = _parsed(path)
    try:
        return _launch(path, result)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ResultError):
            raise
        raise ResultError(
            f"{path}: rows or sections are not those of pytest-ep ({type(error).__name__}: {error}):"
            " give what --benchmark-json of a run of EP cases wrote"
        ) from None


def _parsed(path: Path) -> Any:
    if path.name.endswith(SUFFIX):
        raise ResultError(
            f"{path} is the journal of an unfinished run: pytest-ep recover makes its result file"
        )
    try:
        result = json.loads(path.read_text())
    except OSError as error:
        raise ResultError(f"{path}: cannot be read, {error.strerror}: give a result file") from None
    except ValueError:
        raise ResultError(f"{path}: not JSON: give what --benchmark-json wrote") from None
    if not isinstance(result, dict) or not isinstance(result.get("pytest_ep"), dict):
        raise ResultError(f"{path}: no result file of pytest-ep: give what --benchmark-json wrote")
    if result["pytest_ep"].get("schema") != SCHEMA:
        schema = result["pytest_ep"].get("schema")
        raise ResultError(
            f"{path}: schema {schema!r}, this pytest-ep reads {SCHEMA}: use the one that wrote it"
        )
    return result


def _launch(path: Path, result: Mapping[str, Any]) -> Launch:
    rows: dict[RowKey, Row] = {}
    outcomes: dict[Case, Outcome] = {}
    unplaced: dict[str, Outcome] = {}
    for entry in result["benchmarks"]:
        row = _row(entry)
        if row.key in rows:
            raise ResultError(f"{path}: two rows for {row.key}: run one of the tests that measure it")
        rows[row.key] = row
        outcomes[row.key.case] = Outcome(_nodeid(entry["fullname"], row.key.component), "timed")
    section = result["pytest_ep"]
    placed = {outcome.nodeid: case for case, outcome in outcomes.items()}
    for outcome, told in _outcomes(section):
        if case := placed.get(outcome.nodeid, told):
            outcomes[case] = outcome
        else:
            unplaced[outcome.nodeid] = outcome
    return Launch(
        path,
        rows,
        outcomes,
        unplaced,
        tuple(map(_construction, section.get("construction", []))),
        result["machine_info"]["pytest_ep"],
        result["commit_info"]["pytest_ep"],
        _commit(result["commit_info"]),
    )


def _row(entry: Mapping[str, Any]) -> Row:
    case = _case(entry["params"])
    seconds = tuple(float(second) for second in entry["stats"]["data"])
    if not seconds or not all(0 < second < float("inf") for second in seconds):
        raise ValueError(f"{entry['fullname']} has no samples that are durations")
    info, component = entry["extra_info"], entry["params"]["component"]
    if component not in COMPONENTS or info["clock"] not in CLOCKS or not info["p50_us"] > 0:
        raise ValueError(f"{entry['fullname']} has a component, clock or median that no row has")
    return Row(RowKey(case, component), info, seconds)


def _outcomes(section: Mapping[str, Any]) -> Iterator[tuple[Outcome, Case | None]]:
    """Yield what the section says of each case, with its coordinates where it has them; the worst last."""
    for entry in section["cases"]:
        yield _outcome(entry, entry["outcome"])
    for what in ("checked", "probed", "not_run", "skipped", "failed"):
        for entry in section[what]:
            yield _outcome(entry, what)


def _outcome(entry: Mapping[str, Any], what: Any) -> tuple[Outcome, Case | None]:
    outcome = Outcome(entry["case"], what, entry.get("reason", ""), entry.get("code", ""))
    params = entry.get("params")
    return outcome, _case(params, entry.get("probe") or _probe(outcome.nodeid)) if params else None


def _probe(nodeid: str) -> str:
    """Return the probe of a node id, which ends in [<key>-<name>], the name without hyphens; or nothing."""
    return nodeid.rpartition("-")[2].removesuffix("]") if PROBE in nodeid else ""


def _case(params: Mapping[str, Any], probe: str = "") -> Case:
    return Case(
        str(params["backend"]),
        str(params["sku"]),
        int(params["ep_size"]),
        str(params["mode"]),
        str(params["precision"]),
        str(params["model"]),
        str(params["routing"]),
        str(params.get("token_skew", NO_SKEW.name)),
        int(params["tokens"]),
        probe,  # whose params are those of a case of as many tokens
    )


def _construction(entry: Mapping[str, Any]) -> Construction:
    def told(what: str) -> float | None:
        value = entry.get(what)
        if value is not None and not math.isfinite(value):
            raise ValueError(f"construction has {value} as {what}")
        return value

    name = f"{entry['backend']} {entry['key']}"
    return Construction(name, told("device_memory_bytes"), told("construction_s"), told("build_s"))


def _commit(info: Mapping[str, Any]) -> str:
    """Return the commit, shortened, and whether anything was changed since; empty where there is none."""
    found = info.get("id")
    if not found or found in NO_COMMIT:
        return ""
    return f"{found[:7]}{' (dirty)' if info.get('dirty') else ''}"


def _nodeid(fullname: str, component: str) -> str:
    """Return the case of a row's name: ``record.label`` put the component at its end."""
    for tail, rest in ((f"-{component}]", "]"), (f"[{component}]", "")):
        if fullname.endswith(tail):
            return fullname.removesuffix(tail) + rest
    return fullname
