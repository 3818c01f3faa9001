"""The files of a run: never overwritten, written by the reporting rank alone, complete after a crash."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from datetime import datetime
from datetime import timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from pytest_ep.results import journal
from pytest_ep.results.journal import Journal


def result_path(config: pytest.Config) -> Path | None:
    """Return the path of --benchmark-json."""
    path = config.getoption("benchmark_json", None)
    return Path(path) if path else None


def prepare(config: pytest.Config) -> str:
    """Make the folder of the result file now; return why the run may not write there, or ""."""
    path = result_path(config)
    for file in filter(None, (path, config.getoption("xmlpath", None))):
        with contextlib.suppress(OSError):  # of a run that was killed while it wrote
            _claim_path(Path(file)).unlink(missing_ok=True)
    if path is None:
        return ""
    beside = journal.journal_path(path)
    if path.exists():
        return f"--benchmark-json={path} exists and is not overwritten: name another file or remove it"
    if beside.exists():
        return (
            f"{beside} holds an unfinished run: pytest-ep recover {beside} makes its result file; "
            "go on with --ep-resume and another --benchmark-json, or remove it"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.open("x").close()
        beside.unlink()
    except OSError as error:
        return f"--benchmark-json={path}: cannot write there: {error.strerror}"
    return ""


@contextlib.contextmanager
def claimed(config: pytest.Config, began: float) -> Iterator[bool]:
    """Keep the result and JUnit files to this rank while it writes them; False where another host's has them.

    ``began`` is when the run began, in seconds since 1970: a JUnit file may be left from an earlier one.
    """
    result, junit = result_path(config), config.getoption("xmlpath", None)
    files = [Path(path) for path in (result, junit) if path]
    taken: list[Path] = []
    try:
        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = _claim_path(path)
            beside.open("x").close()
            taken.append(beside)
        ours = not any(path.exists() and (path == result or path.stat().st_mtime > began) for path in files)
    except OSError:
        ours = False
    try:
        yield ours
    finally:
        for beside in taken:
            beside.unlink(missing_ok=True)


def _claim_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.claim")


def open_journal(
    path: Path,
    selected: Iterable[str],
    machine_info: Mapping[str, Any],
    commit_info: Mapping[str, Any],
    resumed: Iterable[Mapping[str, Any]],
) -> Journal:
    """Begin the journal beside a result file; the descriptions are those of ``describe``.

    It has what is resumed at once: this run may end before it gets to it.
    """
    head = {
        "machine_info": machine_info,
        "commit_info": commit_info,
        "datetime": datetime.now(timezone.utc).isoformat(),
        "version": metadata.version("pytest-benchmark"),
        "selected": list(selected),
    }
    return Journal(journal.journal_path(path), head, resumed)


def describe(config: pytest.Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return pytest-benchmark's ``machine_info``, which takes it a second, and ``commit_info``."""
    hook = config.hook
    machine_info = hook.pytest_benchmark_generate_machine_info(config=config)
    hook.pytest_benchmark_update_machine_info(config=config, machine_info=machine_info)
    commit_info = hook.pytest_benchmark_generate_commit_info(config=config)
    hook.pytest_benchmark_update_commit_info(config=config, commit_info=commit_info)
    return machine_info, commit_info


def write_without_rows(config: pytest.Config) -> None:
    """Write the result file of a run that timed nothing: pytest-benchmark would write none."""
    path = result_path(config)
    if path is None:
        return
    machine_info, commit_info = describe(config)
    output = config.hook.pytest_benchmark_generate_json(
        config=config, benchmarks=[], include_data=True, machine_info=machine_info, commit_info=commit_info
    )
    config.hook.pytest_benchmark_update_json(config=config, benchmarks=[], output_json=output)
    path.write_text(json.dumps(output, indent=4))


def unwritten(config: pytest.Config, error: OSError) -> str:
    """Say what to do where the files of a run that has ended could not be written, as on a full disk."""
    path = result_path(config)
    assert path is not None
    return (
        f"the files of this run could not be written: {error.strerror}: no finished case is lost, "
        f"pytest-ep recover {journal.journal_path(path)} makes the result file once there is room"
    )


def silence(config: pytest.Config) -> None:
    """Stop what would write a result file, JUnit file or cache: the reporter alone writes."""
    manager = config.pluginmanager
    for plugin in list(manager.get_plugins()):
        if type(plugin).__name__ == "LogXML":  # its own pytest_unconfigure wants to find it registered
            plugin.logfile = os.devnull
    silence_benchmark(config)
    for name in ("lfplugin", "nfplugin", "stepwiseplugin"):
        if manager.has_plugin(name):
            manager.unregister(name=name)


def silence_benchmark(config: pytest.Config) -> None:
    """Stop pytest-benchmark from writing and from saying that it has nothing to write."""
    if config.pluginmanager.has_plugin("benchmark"):
        config.pluginmanager.unregister(name="benchmark")


def resumable(path: Path) -> dict[str, dict[str, Any]]:
    """Return what an earlier run finished, by node id. Raises pytest.UsageError."""
    try:
        return journal.finished(path)
    except journal.JournalError as error:
        raise pytest.UsageError(f"--ep-resume: {error}") from None


def still_holds(entry: Mapping[str, Any], identity: str) -> bool:
    """Whether a finished case is the same case, of transports whose installed versions are the same."""
    return entry["identity"] == identity and all(
        _same_version(name, version) for name, version in entry["versions"].items()
    )


def _same_version(distribution: str, version: str) -> bool:
    try:
        installed = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    # torch says 2.11.0+cu130 of itself where its metadata says 2.11.0
    return installed.partition("+")[0] == version.partition("+")[0]
