"""With the plugin installed, a suite without EP cases behaves exactly as without it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.launching import python

SUITE = """
import sys
import warnings

import pytest

print("printed at import")


@pytest.fixture
def fragile():
    yield 1
    raise RuntimeError("in teardown")


def test_passes(record_property):
    record_property("answer", 42)


@pytest.mark.parametrize("backend", ["torch_a2a", "other"])
def test_parametrised_by_a_name_of_ours(backend):
    assert backend == "torch_a2a"


def test_prints_and_fails():
    print("to stdout")
    print("to stderr", file=sys.stderr)
    assert {"tokens": 1} == {"tokens": 2}


@pytest.mark.skip(reason="not today")
def test_skips():
    raise AssertionError


@pytest.mark.xfail(strict=True)
def test_is_expected_to_fail():
    raise AssertionError


def test_warns():
    warnings.warn("careful", UserWarning)


def test_fails_in_teardown(fragile):
    pass


class TestGroup:
    def test_is_slow_to_tell(self, tmp_path, capfd):
        (tmp_path / "file").touch()


def test_is_a_benchmark(benchmark):
    benchmark.pedantic(lambda: None, rounds=3)
"""

CONFTEST = """
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    print("conftest configures")


@pytest.hookimpl(trylast=True)
def pytest_report_header(config):
    return "a line of the header"


def pytest_collection_modifyitems(items):
    items.reverse()


def pytest_unconfigure(config):
    print("conftest is done")
"""

RANK = """
import os
import subprocess
import sys

rank = os.environ.setdefault("RANK", "0")
arguments = [os.path.expandvars(argument) for argument in sys.argv[1:]]
with open(f"stdout.{rank}", "w") as out, open(f"stderr.{rank}", "w") as err:
    code = subprocess.call([sys.executable, "-m", "pytest", *arguments], stdout=out, stderr=err)
open(f"code.{rank}", "w").write(str(code))
"""
# torchrun kills the other ranks once one ends with another code than 0, so no rank tells it its own.

ALWAYS = (
    "-p",
    "no:randomly",
    "-o",
    "cache_dir=cache-$RANK",
    "--benchmark-columns=rounds",
    "--benchmark-time-unit=ms",
)
"""A cache for each rank; counts alone in what benchmarks print."""
FILES = ("--junit-xml=junit-$RANK.xml", "--benchmark-json=benchmark-$RANK.json")


@dataclass(frozen=True)
class Behaviour:
    """All that can be seen of a run from outside, without its durations."""

    codes: dict[str, str]
    printed: dict[str, list[str]]
    files: dict[str, Any]


WITHOUT = ("-p", "no:ep", "-p", "no:pytest_ep.plugin")
"""Blocks the plugin, loaded as an entry point or by its module's name."""


@pytest.fixture
def folder(pytester: pytest.Pytester, pytestconfig: pytest.Config) -> Path:
    assert any(pytestconfig.pluginmanager.has_plugin(name) for name in ("ep", "pytest_ep.plugin"))
    pytester.makepyfile(test_unrelated=SUITE)
    pytester.makeconftest(CONFTEST)
    return pytester.path


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("-v", *FILES), id="verbose"),
        pytest.param(("-q", "-s", "-x"), id="uncaptured"),
        pytest.param(("-rA", "--durations=0", "--durations-min=9", "-k", "not backend"), id="summary"),
        pytest.param(("--collect-only",), id="collecting"),
        pytest.param(("-n1", "-v"), id="distributed"),
        pytest.param(("nowhere.py",), id="wrong_file"),
        pytest.param(("-k", "nothing_of_this_name"), id="nothing_selected"),
        pytest.param(("--no-such-option",), id="wrong_option"),
        pytest.param(("--fixtures", "-v"), id="fixtures"),
    ],
)
def test_one_process_behaves_as_without_the_plugin(folder: Path, arguments: tuple[str, ...]) -> None:
    assert_the_same(behaviour(folder, 1, *arguments), behaviour(folder, 1, *WITHOUT, *arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("-v", *FILES), id="verbose"),
        pytest.param(("-q", "-s", "-x"), id="uncaptured"),
        pytest.param(("--collect-only",), id="collecting"),
        pytest.param(("nowhere.py",), id="wrong_file"),
    ],
)
def test_two_ranks_of_torchrun_behave_as_without_the_plugin(folder: Path, arguments: tuple[str, ...]) -> None:
    assert_the_same(behaviour(folder, 2, *arguments), behaviour(folder, 2, *WITHOUT, *arguments))


def test_a_module_that_cannot_be_imported_is_reported_by_every_rank(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_broken="import no_such_module")
    ours = behaviour(pytester.path, 2)
    assert_the_same(ours, behaviour(pytester.path, 2, *WITHOUT))
    for rank in range(2):
        assert "E   ModuleNotFoundError: No module named 'no_such_module'" in ours.printed[f"stdout.{rank}"]


def test_variables_like_a_launcher_s_do_not_matter_to_an_unrelated_suite(folder: Path) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1"}
    ours = behaviour(folder, 1, "-v", env=env)
    assert_the_same(ours, behaviour(folder, 1, "-v", *WITHOUT, env=env))


def assert_the_same(ours: Behaviour, theirs: Behaviour) -> None:
    assert ours.codes == theirs.codes
    for stream, lines in theirs.printed.items():
        assert ours.printed[stream] == lines, stream
    assert ours.files == theirs.files


def behaviour(sources: Path, ranks: int, *arguments: str, env: dict[str, str] | None = None) -> Behaviour:
    """Run pytest in a new folder that holds the Python files of ``sources``, and look at what it leaves."""
    folder = Path(tempfile.mkdtemp(dir=sources)) / "suite"
    folder.mkdir()
    names = [path.name for path in sources.glob("*.py")]
    for name in names:
        shutil.copy(sources / name, folder)
    command = ["rank.py", *ALWAYS, *arguments]
    if ranks > 1:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        command = [*launcher, *command]
    (folder / "rank.py").write_text(RANK)
    assert python(folder, *command, env=env).ret == 0
    left = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    read = {
        name: path.read_text().replace(str(folder), "<folder>")
        for name, path in left.items()
        if "pycache" not in name
    }
    for name in (*names, "rank.py"):
        del read[name]
    return Behaviour(
        {name: read.pop(name) for name in list(read) if name.startswith("code")},
        {name: _timeless(read.pop(name)).splitlines() for name in list(read) if name.startswith("std")},
        {name: _content(name, text) for name, text in read.items()},
    )


def _timeless(text: str) -> str:
    for pattern, stands_for in (
        (r"^plugins: .*$", "plugins: <list>"),
        (r"\d+\.\d+s\b( \(\d+:\d+:\d+\))?", "<time>"),
        (r"[=_-]{2,}", "<rule>"),  # as wide as the durations in the line leave room for
    ):
        text = re.sub(pattern, stands_for, text, flags=re.MULTILINE)
    return text


def _content(name: str, text: str) -> Any:
    """What a file says, without times."""
    if name.endswith(".json"):
        document = json.loads(text)
        rows = [{**row, "stats": sorted(row["stats"])} for row in document["benchmarks"]]
        return {**document, "datetime": "", "commit_info": "", "machine_info": "", "benchmarks": rows}
    return re.sub(r'(time|timestamp)="[^"]*"', r'\1=""', text) if name.endswith(".xml") else text
