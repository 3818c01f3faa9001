"""What README.md says is so: its examples run, and its lists are those of the code."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from pytest_ep.backends.flashinfer_setup import REFUSALS
from pytest_ep.matrix.platforms import load
from tests.launching import Torchrun
from tests.launching import python

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
CODE_CALLS = ("Skip", "BackendUnavailable")


def part(title: str) -> str:
    """The text under a heading."""
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def example(title: str) -> str:
    """The one Python module under a heading."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", part(title), re.MULTILINE | re.DOTALL)
    return str(code)


def keys(text: str) -> set[str]:
    """The names in the first column of the tables of a text."""
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result file of the README's own backend on two ranks."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "test_all_gather.py").write_text(example("A backend of your own"))
    tokens, iterations = "--ep-tokens=1,64", "--ep-iterations=6"
    run = Torchrun(folder)(
        2, "-v", "-Werror", "--ep-exact", tokens, iterations, "--benchmark-json=result.json"
    )
    assert run.ret == 0, run.stdout.str() + run.stderr.str()
    return dict(json.loads((folder / "result.json").read_text()))


def test_a_backend_of_one_s_own_passes_the_oracle_on_two_ranks(result: dict[str, Any]) -> None:
    rows = [(row["params"]["tokens"], row["params"]["component"]) for row in result["benchmarks"]]
    assert rows == [(tokens, name) for tokens in (1, 64) for name in ("dispatch", "combine", "roundtrip")]
    assert {row["params"]["backend"] for row in result["benchmarks"]} == {"all_gather"}
    assert {row["extra_info"]["bit_exact"] for row in result["benchmarks"]} == {1.0}


def test_three_lines_have_all_cases_of_a_backend(tmp_path: Path) -> None:
    code = example("From a wheel")
    assert len([line for line in code.splitlines() if line]) == 3
    (tmp_path / "test_three_lines.py").write_text(code)
    run = python(tmp_path, "-m", "pytest", "-k", "test_case", "--ep-tokens=1,2", "--ep-iterations=6")
    assert run.ret == 0
    run.assert_outcomes(passed=2, skipped=9)  # 4 EP sizes in BF16, 5 in FP8


def test_the_commands_exist_and_can_be_run() -> None:
    for command in re.findall(r"\./ci/\w+", TEXT):
        assert os.access(ROOT / command, os.X_OK), command


def test_the_options_are_those_of_the_help(tmp_path: Path) -> None:
    described = re.findall(r"^- `(--ep-[^`]+)`:", part("Options"), re.MULTILINE)
    helped = python(tmp_path, "-m", "pytest", "--help").stdout.str()
    assert described == re.findall(r"^  (--ep-\S+)", helped, re.MULTILINE)


def test_the_skip_codes_are_those_of_the_platforms_and_the_code() -> None:
    codes = {code for _, code, _ in REFUSALS}
    codes |= {refusal.skip.code for book in load(None).books for refusal in book.refusals}
    for path in (ROOT / "pytest_ep").rglob("*.py"):
        codes |= codes_in(ast.parse(path.read_text()))
    assert keys(part("Skip codes")) == codes


def codes_in(tree: ast.AST) -> set[str]:
    """The literal codes that a module makes skips with."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    firsts = [
        call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id in CODE_CALLS
    ]
    return {
        first.value for first in firsts if isinstance(first, ast.Constant) and isinstance(first.value, str)
    }


def test_the_keys_of_a_result_file_are_described(result: dict[str, Any]) -> None:
    rows, _, section = part("Result file").partition("machine_info.pytest_ep")
    always = rows.partition("Others join")[0]
    for row in result["benchmarks"]:
        assert keys(always) <= set(row["extra_info"]) <= keys(rows)
        assert all(f"`{name}`" in always for name in row["params"])
    assert keys(section) == set(result["pytest_ep"])
    assert {"pytest_ep"} <= set(result["machine_info"]) & set(result["commit_info"])


def test_the_columns_of_the_summary_are_described() -> None:
    from pytest_ep.results import summary

    shown = {title for title, _, _ in summary._COLUMNS}
    assert keys(part("What a run prints")) == shown


def test_the_checks_of_the_oracle_are_described() -> None:
    from pytest_ep.oracle import checks

    assert keys(part("Reading a failure")) == {*checks._ORDER, "inputs"}
