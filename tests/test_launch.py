"""Starting ranks: --ep-nproc, what it returns, and a run that was started without any."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.launching import LIMIT
from tests.launching import python

SUITE = """
import pytest
from pytest_ep import EPSuite

class TestBaseline(EPSuite):
    backend = "torch_a2a"

    @pytest.fixture(autouse=True)
    def _print(self, ep_run):
        print("rank", ep_run.identity.rank, "of", ep_run.identity.size)

def test_unrelated():
    assert True

def test_failing_on_rank_1(request):
    from pytest_ep.run import RUN
    assert request.config.stash[RUN].identity.rank != 1, "not on rank 1"
"""
SHAPE = "--ep-shape=hidden=64,experts=16,top_k=4"

Launch = Callable[..., pytest.RunResult]


@pytest.fixture
def launch(pytester: pytest.Pytester) -> Launch:
    """Run plain pytest over the suite above."""
    pytester.makepyfile(test_it=SUITE)
    common = (SHAPE, "--ep-tokens=1", "--ep-precision=bf16", "--ep-iterations=3", "-p", "no:cacheprovider")

    def launched(*arguments: str, env: dict[str, str] | None = None) -> pytest.RunResult:
        return python(pytester.path, "-m", "pytest", *common, *arguments, env=env)

    return launched


def test_nproc_runs_as_many_ranks_and_returns_0_where_all_passed(launch: Launch) -> None:
    result = launch("--ep-nproc=2", "-k", "test_case or unrelated", "-s", "--ep-require=torch_a2a and EP02")
    assert result.ret == 0
    assert result.parseoutcomes()["passed"] == 2
    result.stdout.fnmatch_lines(["ep: 2 ranks on *"])
    for rank in (0, 1):
        result.stdout.fnmatch_lines([f"*rank {rank} of 2*"])
    assert sum("test session starts" in line for line in result.outlines) == 1, "more than one rank reports"


def test_nproc_returns_1_where_all_ranks_leave_as_if_all_were_well(
    launch: Launch, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest("import os\n\ndef pytest_runtest_call():\n    os._exit(0)\n")
    result = launch("--ep-nproc=2", "-k", "unrelated", "test_it.py")
    assert result.ret == 1
    result.stderr.fnmatch_lines(["pytest_ep: rank 0 left with exit code 0 before its session had ended*"])


def test_nproc_returns_1_where_a_test_failed_on_a_rank_that_is_silent(launch: Launch) -> None:
    result = launch("-k", "test_case or failing", env={"PYTEST_ADDOPTS": "--ep-nproc 2"})
    assert result.ret == 1
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["failed"]) == (1, 1)
    result.stdout.fnmatch_lines(["*rank 1 failed in call of test_it.py::test_failing_on_rank_1*"])
    result.stdout.fnmatch_lines(["*not on rank 1*"])
    assert "ChildFailedError" not in result.stderr.str(), "torchrun repeats what rank 0 has reported"


ENDS_IN_7 = """
import atexit
import os

if os.environ.get("RANK") == "1":
    atexit.register(os._exit, 7)
"""


def test_nproc_does_not_return_0_where_a_rank_fails_after_the_report(
    launch: Launch, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(ENDS_IN_7)
    result = launch("--ep-nproc=2", "-k", "test_case")
    assert result.parseoutcomes()["passed"] == 1
    assert result.ret == 1
    result.stderr.fnmatch_lines(["pytest_ep: rank 1 ended with exit code 7 after rank 0 reported a pass: *"])


STARTED = """
import os, signal, time
from pytest_ep.ranks.launch import _end_with

def end(number, frame):
    print("told to end", flush=True)
    os._exit(3)

signal.signal(signal.SIGTERM, end)
_end_with(os.getppid())
print("ready", flush=True)
time.sleep(120)
"""
STARTS = """
import subprocess, sys
from pytest_ep.ranks.launch import _wait
sys.exit(_wait(subprocess.Popen([sys.executable, "-c", sys.argv[1]])))
"""


def waiting(*before: str) -> subprocess.Popen[str]:
    """Start a process that waits for another, as --ep-nproc for torchrun."""
    command = [*before, sys.executable, "-c", STARTS, STARTED]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGTERM, 3), (signal.SIGHUP, 3), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_torchrun_is_told_to_end_by_what_ends_nproc(sent: signal.Signals, code: int) -> None:
    process = waiting()
    process.send_signal(sent)
    said, _ = process.communicate(timeout=LIMIT)
    assert (said, process.returncode) == ("told to end\n", code)


def test_nproc_under_nohup_outlives_its_terminal() -> None:
    process = waiting("nohup")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=LIMIT)[0] == "told to end\n"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--ep-tokens=0", "--ep-tokens 0: '0' is not a whole number from 1 to 65536"),
        ("--ep-sku=h300", "--ep-sku: no 'h300', known: h100, *"),
        ("--ep-nproc=two", "--ep-nproc two: 'two' is not a whole number from 1 to 1024"),
        ("--ep-platforms=absent.toml", "*absent.toml*"),
        ("--ep-clock=event", "--ep-clock event*accelerator*"),
        ("-n2", "--ep-nproc with -n or --dist: its ranks are processes already, drop one"),
        ("--dist=each", "--ep-nproc with -n or --dist: its ranks are processes already, drop one"),
        ("--ep-require=torch_a2a or", "--ep-require torch_a2a or: at column 13 expected*"),
    ],
)
def test_a_wrong_option_is_refused_once_in_one_line_and_returns_4(
    launch: Launch, option: str, said: str
) -> None:
    result = launch("--ep-nproc=2", option)
    assert result.ret == 4
    printed = [line for line in (*result.outlines, *result.errlines) if line.strip()]
    assert len(printed) == 1, printed
    result.stderr.fnmatch_lines([f"ERROR: {said}"])


def test_nproc_returns_5_where_nothing_was_executed_and_0_where_that_is_accepted(
    launch: Launch, pytester: pytest.Pytester
) -> None:
    arguments = pytester.path / "arguments"
    arguments.write_text("--ep-nproc=2\n")
    result = launch(f"@{arguments}", "-k", "test_case", "--ep-size=4")
    assert result.ret == 5
    result.stdout.fnmatch_lines(
        [
            "skipped 1: ep-size: needs 4 ranks, launched with 2: torchrun --nproc-per-node 4",
            "ep: no case was executed: exit code 5 (--ep-allow-skips to accept that)",
        ]
    )
    pytester.makeini("[pytest]\naddopts = --ep-nproc=2")
    allowed = launch("-k", "test_case", "--ep-size=4", "--ep-allow-skips")
    assert allowed.ret == 0
    allowed.stdout.fnmatch_lines(["ep: 2 ranks on *"])
    allowed.stdout.no_fnmatch_line("*no case was executed*")


RERUNS = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--reruns", type=int)

def pytest_collection_modifyitems(items):
    for item in items:
        if item.config.getoption("verbose"):
            item.add_marker(pytest.mark.flaky(reruns=1))
"""


@pytest.mark.parametrize(("option", "named"), [("--reruns=2", "--reruns"), ("-v", "the marker flaky")])
def test_what_runs_failed_cases_again_is_refused(
    launch: Launch, pytester: pytest.Pytester, option: str, named: str
) -> None:
    pytester.makeconftest(RERUNS)
    result = launch(option)
    assert result.ret == 4
    result.stderr.fnmatch_lines([f"ERROR: {named} with EP cases: a pass would hide the failure before it; *"])


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--help", "expert-parallel cases:"),
        ("-VV", "This is pytest version *"),
        ("--markers", "@pytest.mark.skipif*"),
        ("--fixtures", "capfd -- *"),
        ("--fixtures-per-test", "*fixtures used by test_one*"),
        ("--cache-show", "cachedir: *"),
    ],
)
def test_what_is_only_shown_needs_no_ranks(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, option: str, said: str
) -> None:
    pytester.makepyfile("def test_one(tmp_path): pass")
    monkeypatch.setattr("pytest_ep.ranks.launch.launch", lambda *launched: pytest.fail("ranks were started"))
    result = pytester.runpytest_inprocess("--ep-nproc=2", option)
    assert result.ret == 0
    result.stdout.fnmatch_lines([said])


def test_nproc_within_a_launcher_is_refused(launch: Launch) -> None:
    result = launch("--ep-nproc=2", env={"RANK": "0", "WORLD_SIZE": "1"})
    assert result.ret == 4
    assert result.outlines == []
    assert result.errlines[:1] == ["ERROR: --ep-nproc inside a launcher: drop it, or drop the launcher"]


def test_a_run_without_a_passed_case_of_each_requirement_fails_and_a_probe_is_no_case(launch: Launch) -> None:
    required = ("torch_a2a and ep01 and T00001", "torch_a2a and ep02", "test_probe", "not torch_a2a")
    result = launch("-k", "TestBaseline or unrelated", *(f"--ep-require={one}" for one in required))
    assert result.ret == 1
    assert "failed" not in result.parseoutcomes()
    complaints = [line for line in result.outlines if line.startswith("ep: --ep-require")]
    assert complaints == [
        f"ep: --ep-require {one!r}: no such case was executed and passed" for one in required[1:]
    ]


def test_a_run_that_collects_no_case_meets_no_requirement(launch: Launch) -> None:
    result = launch("--ep-require=torch_a2a", "-k", "unrelated", "test_it.py::test_unrelated")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["ep: --ep-require 'torch_a2a': no such case was executed and passed"])
    assert launch("--ep-require=x", "--collect-only", "test_it.py::test_unrelated").ret == 0


def test_without_ranks_the_run_is_ep1_and_says_how_to_get_more(launch: Launch) -> None:
    result = launch("-k", "test_case", "-v")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "ep: 1 rank on *; more with --ep-nproc N, or under torchrun",
            "*::test_case?cpu-ep01-normal-bf16-h64e16k4-uniform-T00001? PASSED *",
            "*::test_case?cpu-ep02-normal-bf16-h64e16k4-uniform-Tany? SKIPPED*",
        ]
    )
    assert result.parseoutcomes()["passed"] == 1
