"""What the plugin costs before any case runs: neither torch nor numpy, and little time."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLAN_LIMIT = 2.0
IMPORT_LIMIT = 0.030
"""Both in seconds of processor time: the clock on the wall also counts what else this machine is doing."""

LOADED = """
import sys

def pytest_unconfigure():
    print("heavy:", sorted({"torch", "numpy"} & set(sys.modules)))
"""


@pytest.fixture(autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Python keep what it compiles, as it does unless it is told otherwise."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.getbasetemp() / "compiled"))


def seconds(folder: Path, *arguments: str, output: int = subprocess.DEVNULL) -> float:
    """Processor time of one pytest run that succeeds or collects nothing."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *arguments],
        cwd=folder,
        stdout=output,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return used.ru_utime + used.ru_stime


def test_the_whole_plan_is_printed_without_torch_and_numpy(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(loaded=LOADED)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)
    printed = pytester.path / "plan"

    def once() -> float:
        with printed.open("w") as output:
            return seconds(ROOT, "cases", "--ep-sku", "all", "-p", "loaded", output=output.fileno())

    fastest = min(once() for _ in range(3))
    plan = printed.read_text()
    assert plan.rstrip().endswith("heavy: []")
    for backend in sorted(path.stem.removeprefix("test_") for path in (ROOT / "cases").glob("test_*.py")):
        for sku in ("cpu", "h100", "gb300", "mi355x"):
            assert re.search(
                rf"^cases/test_{backend}\.py::\w+::test_case\[{sku}-ep08-normal-bf16-", plan, re.M
            )
    assert fastest < PLAN_LIMIT


def test_an_empty_folder_is_collected_nearly_as_fast_as_without_the_plugin(tmp_path: Path) -> None:
    without = ("-p", "no:ep", "-p", "no:pytest_ep.plugin")
    seconds(tmp_path)  # compiles

    def median_of_nine() -> float:
        return statistics.median(seconds(tmp_path) - seconds(tmp_path, *without) for _ in range(9))

    # A neighbour's load can only add, so what is never under the limit is over it.
    assert any(median_of_nine() < IMPORT_LIMIT for _ in range(3))
