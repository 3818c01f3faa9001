"""Who may write the files of a run where each host is on its own."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ep.results import artifact


def writes(result: Path | None, junit: Path | None) -> Any:
    values = {"benchmark_json": str(result) if result else None, "xmlpath": str(junit) if junit else None}
    return SimpleNamespace(getoption=lambda name, default=None: values.get(name, default))


def test_one_host_at_a_time_writes_and_one_that_writes_nothing_leaves_nothing(tmp_path: Path) -> None:
    config, began = writes(tmp_path / "new" / "out.json", tmp_path / "junit.xml"), time.time()
    with artifact.claimed(config, began) as first, artifact.claimed(config, began) as second:
        assert (first, second) == (True, False)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    with artifact.claimed(config, began) as again:
        assert again
        (tmp_path / "new" / "out.json").write_text("{}")
    with artifact.claimed(config, began) as late:
        assert not late


@pytest.mark.parametrize("result", [None, "out.json"])
def test_a_junit_file_of_this_run_is_kept_and_one_of_an_earlier_run_is_not(
    tmp_path: Path, result: str | None
) -> None:
    junit = tmp_path / "junit.xml"
    config = writes(tmp_path / result if result else None, junit)
    junit.write_text("<earlier/>")
    with artifact.claimed(config, time.time() + 5) as ours:
        assert ours
    with artifact.claimed(config, time.time() - 5) as ours:
        assert not ours


def test_a_run_without_files_may_report(tmp_path: Path) -> None:
    with artifact.claimed(writes(None, None), 0.0) as ours:
        assert ours


def test_what_a_killed_host_left_keeps_no_later_run_from_writing(tmp_path: Path) -> None:
    config = writes(tmp_path / "out.json", tmp_path / "junit.xml")
    for name in ("out.json.claim", "junit.xml.claim"):
        (tmp_path / name).touch()
    assert artifact.prepare(config) == ""
    with artifact.claimed(config, time.time()) as ours:
        assert ours
