"""The journal beside a result file, and what a later run takes over from either."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ep.reports import Reports
from pytest_ep.results import artifact
from pytest_ep.results import journal
from pytest_ep.results.cli import main
from tests.result_files import ResultFile
from tests.result_files import nodeid
from tests.result_files import params

FIRST, SECOND = (nodeid(params(tokens)) for tokens in (1, 2))
PLAIN: list[dict[str, Any]] = [
    {"fullname": "test_x.py::test_plain", "params": None},
    {"fullname": "test_x.py::test_plain[x]", "params": {"component": "x"}},
]


def test_rows_of_tests_beside_the_cases_are_no_cases_to_resume(tmp_path: Path) -> None:
    file = ResultFile().timed(1).timed(2)
    file.rows[2:2] = PLAIN
    finished = journal.finished(file.write(tmp_path / "a.json"))
    assert {case: len(entry["rows"]) for case, entry in finished.items()} == {FIRST: 3, SECOND: 3}


def test_a_binary_file_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\x89PNG\xff\xfe\x00")
    with pytest.raises(pytest.UsageError, match=rf"^--ep-resume: {path} is neither a result file nor a jou"):
        artifact.resumable(path)
    assert main(["recover", str(path), "-o", str(tmp_path / "b.json")]) == 2
    one = str(path)
    for command in (["export", "--csv"], ["expect"], ["compare", one], ["compare", "--expect", one]):
        assert main([*command, one]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert all(line.startswith(f"pytest-ep: {path}") for line in lines)
    assert lines[0].endswith("is no journal of pytest_ep: give the .jsonl file beside the result file")


def test_a_journal_that_ends_in_other_bytes_counts_up_to_there(tmp_path: Path) -> None:
    written = resumed_journal(tmp_path)
    with written.open("ab") as file:
        file.write(b'{"case": "\xff\x00\x00')
    assert list(journal.finished(written)) == [FIRST, SECOND]


def resumed_journal(folder: Path) -> Path:
    """The journal of a run that resumes two cases and has got to neither."""
    earlier = journal.finished(ResultFile().timed(1).timed(2).write(folder / "a.json"))
    artifact.open_journal(folder / "b.json", [FIRST, SECOND, "third"], {}, {}, earlier.values())
    return folder / "b.json.jsonl"


def test_a_resumed_run_that_ends_at_once_loses_nothing_of_what_it_resumed(tmp_path: Path) -> None:
    written = resumed_journal(tmp_path)
    assert journal.finished(written) == journal.finished(tmp_path / "a.json")
    result = journal.recovered(written)
    assert result["benchmarks"] == json.loads((tmp_path / "a.json").read_text())["benchmarks"]
    assert [one["case"] for one in result["pytest_ep"]["not_run"]] == ["third"]


def test_a_resumed_case_is_not_written_again_when_it_is_reached() -> None:
    written: list[str] = []
    run: Any = SimpleNamespace(
        began=0.0,
        journal=SimpleNamespace(add=lambda result, rows: written.append(result.nodeid)),
        ledger=SimpleNamespace(of=lambda nodeid: SimpleNamespace(nodeid=nodeid)),
        resumed={FIRST: {}},
    )
    for case in (FIRST, SECOND):
        item: Any = SimpleNamespace(nodeid=case)
        Reports(run)._journal(item)
    assert written == [SECOND]
