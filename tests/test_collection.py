"""What a module of suites makes, and what it may not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ep import EPSuite
from pytest_ep.backends.torch_a2a import TorchA2A
from pytest_ep.results.cli import main
from pytest_ep.session import EPSession
from pytest_ep.suite import check_suite
from tests.launching import python

SMALL = ("--ep-shape=hidden=64,experts=16,top_k=4", "--ep-tokens=1", "--ep-iterations=3")
BASELINE = """
import pytest
from pytest_ep import EPSuite
from pytest_ep.backends.torch_a2a import TorchA2A

class Broken(TorchA2A):
    def combine(self, problem, handle, staged):
        return super().combine(problem, handle, staged) * 0

class TestBaseline(EPSuite):
    backend = "torch_a2a"
"""
MORE = """
    @pytest.fixture(params=["a", "b"], autouse=True)
    def variant(self, request):
        return request.param

@pytest.mark.skip(reason="mine")
class TestSkipped(EPSuite):
    backend = TorchA2A

class Named(Broken):
    name = "broken"

@pytest.mark.xfail(reason="known")
class TestExpected(EPSuite):
    backend = Named
"""
AGAIN = """
class TestAgain(EPSuite):
    backend = Broken
"""
BESIDE = """
def test_plain(benchmark):
    benchmark.pedantic(lambda: None, rounds=3)
"""
FULL_DISK = """
import resource

import pytest

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish():
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    return (yield)
"""
NORMAL = TorchA2A.modes["normal"]


def launch(folder: Path, *options: str, module: str = BASELINE) -> pytest.RunResult:
    (folder / "test_it.py").write_text(module)
    (folder / "occupied.txt").write_text("a file, where a folder would be")
    return python(folder, "-m", "pytest", "--ep-precision=bf16", *SMALL, *options)


def refused(result: pytest.RunResult) -> str:
    """The one line of a refusal."""
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if line.strip()]
    assert "Traceback" not in result.stdout.str()
    assert "exit code 5" not in result.stdout.str()
    return line


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({}, "has no backend: give a name or a subclass of EPBackend"),
        ({"backend": 5}, "has the backend 5: give a name or a subclass of EPBackend"),
        ({"backend": NORMAL.__class__}, "has the backend <class '.*ModeFacts'>: give a name or a subclass"),
        ({"name": "torch-a2a"}, "its backend's name is 'torch-a2a': give an identifier"),
        ({"modes": {"fast": NORMAL}}, "mine.modes must have some of normal, low_latency and nothing else"),
        ({"modes": {}}, "mine.modes must have some of normal, low_latency and nothing else"),
        (
            {"modes": {"normal": replace(NORMAL, layout="token-expert")}},
            "mine normal has a token-expert layout with unweighted-rank-sum: there is an oracle for",
        ),
    ],
)
def test_a_backend_that_cannot_be_planned_or_judged_is_refused(attributes: dict[str, Any], said: str) -> None:
    if attributes and "backend" not in attributes:
        attributes = {"backend": type("Mine", (TorchA2A,), {"name": "mine", **attributes})}
    with pytest.raises(pytest.UsageError, match=rf"^tests\.test_collection\.TestMine:? {said}"):
        check_suite(type("TestMine", (EPSuite,), {"__module__": __name__, **attributes}))


def test_the_right_ones_are_not() -> None:
    for backend in ("torch_a2a", TorchA2A):
        check_suite(type("TestMine", (EPSuite,), {"backend": backend}))


def test_two_classes_of_one_name_are_refused_as_either_would_serve_the_others_cases(tmp_path: Path) -> None:
    said = refused(launch(tmp_path, "--collect-only", module=BASELINE + AGAIN))
    assert "test_it.TestAgain: test_it.Broken and " in said
    assert said.endswith("TorchA2A are both named 'torch_a2a': give each a name of its own")


def test_without_pytest_benchmark_cases_are_refused(tmp_path: Path) -> None:
    assert "drop -p no:benchmark" in refused(launch(tmp_path, "--collect-only", "-p", "no:benchmark"))


def test_a_case_that_overlapping_arguments_select_twice_is_refused(tmp_path: Path) -> None:
    said = refused(launch(tmp_path, "-k", "test_case", "--keep-duplicates", "test_it.py", "test_it.py"))
    assert said.endswith("T00001] is selected twice: drop --keep-duplicates, or the argument that overlaps")


def test_a_plain_benchmark_beside_cases_is_recorded_shown_and_passes_by_itself(tmp_path: Path) -> None:
    result = launch(tmp_path, "-k", "test_plain", "--benchmark-json=out.json", module=BASELINE + BESIDE)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["* benchmark: 1 tests *"])
    (row,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert row["name"] == "test_plain"


def test_a_disk_that_is_full_at_the_end_loses_no_case(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(FULL_DISK)
    result = launch(tmp_path, "--ep-size=1", "-k", "test_case", "--benchmark-json=out.json")
    assert result.ret == pytest.ExitCode.INTERNAL_ERROR
    result.stderr.fnmatch_lines(
        ["Exit: the files *: File too large: *, pytest-ep recover out.json.jsonl makes *"]
    )
    assert "Traceback" not in result.stderr.str()
    assert main(["recover", str(tmp_path / "out.json.jsonl")]) == 0
    assert len(json.loads((tmp_path / "out.json").read_text())["benchmarks"]) == 3


def test_the_count_is_of_what_is_listed_also_where_pytest_would_refuse_a_test_without_parameters(
    tmp_path: Path,
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nempty_parameter_set_mark = fail_at_collect\n")
    result = launch(tmp_path, "--collect-only", "-q", "--ep-size=2,4")  # of one rank: there are no probes
    assert len([line for line in result.outlines if "::" in line]) == 2
    result.stdout.fnmatch_lines(["2 tests collected in *"])


def test_a_result_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    said = refused(launch(tmp_path, "--ep-size=1", "--benchmark-json=/proc/out.json"))
    assert said == "ERROR: --benchmark-json=/proc/out.json: cannot write there: No such file or directory"


def test_a_comparison_with_nothing_is_refused_as_pytest_benchmark_does(tmp_path: Path) -> None:
    options = ("--ep-size=1", "-k", "test_case", "--benchmark-compare-fail=median:1%")
    result = launch(tmp_path, *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --benchmark-compare-fail requires valid --benchmark-compare."])


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[pytest.RunResult, dict[str, Any]]:
    """One rank: a suite with another fixture's parameters, a skipped one, no folder for pytest's cache."""
    folder = tmp_path_factory.mktemp("ran")
    options = ("--ep-size=1", "-k", "test_case", "-o", "cache_dir=occupied.txt/cache")
    more = ("--ep-precision=bf16,fp8", "--benchmark-json=out.json")
    result = launch(folder, *options, *more, module=BASELINE + MORE)
    return result, json.loads((folder / "out.json").read_text())


def test_a_suite_takes_parameters_of_other_fixtures_and_runs_without_pytests_cache(
    ran: tuple[pytest.RunResult, dict[str, Any]],
) -> None:
    result, file = ran
    result.assert_outcomes(passed=2, skipped=4, xfailed=1, deselected=36, warnings=1)
    assert len(file["benchmarks"]) == 2 * 3


def test_a_skip_of_a_tests_own_says_its_reason_and_no_place(
    ran: tuple[pytest.RunResult, dict[str, Any]],
) -> None:
    result, file = ran
    result.stdout.fnmatch_lines(["skipped 1: skipped: mine"])
    assert [one["reason"] for one in file["pytest_ep"]["skipped"] if one["code"] == "skipped"] == ["mine"]


def test_a_skip_of_the_matrix_says_its_source(ran: tuple[pytest.RunResult, dict[str, Any]]) -> None:
    reasons = [one["reason"] for one in ran[1]["pytest_ep"]["skipped"] if one["code"] == "no-fp8"]
    assert reasons
    assert all(re.fullmatch(r"the baseline sends .* \(https://\S+\)", reason) for reason in reasons)


@pytest.mark.parametrize("wish", ["compare", "compare_fail", "histogram", ""])
def test_rows_of_cases_are_in_pytest_benchmarks_own_output_only_where_it_is_asked_for_something(
    wish: str,
) -> None:
    config = SimpleNamespace(getoption=lambda name, default: name == f"benchmark_{wish}")
    hook: Any = EPSession.pytest_benchmark_group_stats
    groups = [("case", [{"params": {"component": "combine"}}]), ("plain", [{"params": None}])]
    shown = hook(object(), config)
    next(shown)
    with pytest.raises(StopIteration) as ended:
        shown.send(groups)
    assert [name for name, _ in ended.value.value] == (["case", "plain"] if wish else ["plain"])


def test_an_expected_failure_fails_no_run_and_leaves_its_reason_and_no_row(
    ran: tuple[pytest.RunResult, dict[str, Any]],
) -> None:
    result, file = ran
    assert result.ret == 0
    (expected,) = [one for one in file["pytest_ep"]["skipped"] if one["code"] == "xfail"]
    assert expected["reason"].startswith("known: combine_values: error ")
