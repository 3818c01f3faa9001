"""``pytest-ep compare`` as a person or a CI job calls it: exit codes, options, formats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_ep.results.cli import main
from pytest_ep.results.comparison_text import WIDTH
from tests.result_files import MEDIANS
from tests.result_files import ResultFile

Printed = pytest.CaptureFixture[str]

BASELINES = Path(__file__).parents[1] / "ci" / "baselines" / "h200-x2"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Result files by the names that the tests use, in the current folder."""
    monkeypatch.chdir(tmp_path)
    slow = {component: 1.5 * median for component, median in MEDIANS.items()}
    for number in (1, 2, 3):
        for name, us in (("base", MEDIANS), ("slow", slow), ("same", MEDIANS)):
            ResultFile().timed(1, us, seed=number).timed(4096, us, seed=number).write(
                Path(name, f"{number}.json")
            )
    for name, file in (
        ("wrong", ResultFile().timed(1).failed(4096)),
        ("skipped", ResultFile().timed(1).skipped(4096)),
        ("missing", ResultFile().timed(1)),
        ("more", ResultFile().timed(1).timed(2).timed(4096)),
        ("costly", ResultFile().timed(1, launch_us=900.0).timed(4096, launch_us=900.0)),
        ("cheap", ResultFile().timed(1, launch_us=9.0).timed(4096, launch_us=9.0)),
        ("none", ResultFile().skipped(0, "not for this GPU")),
        ("gb200", ResultFile().timed(1, of={**_params(), "sku": "gb200"})),
    ):
        file.write(Path(f"{name}.json"))


def _params() -> dict[str, Any]:
    params: dict[str, Any] = ResultFile().timed(1).rows[0]["params"]
    return {name: value for name, value in params.items() if name != "component"}


def compared(*arguments: str) -> int:
    return main(["compare", *arguments])


@pytest.mark.parametrize(
    ("new", "code", "last"),
    [
        ("same", 0, "rows: 6 same; passes"),
        ("slow", 1, "rows: 6 slower; FAILS on slower"),
        ("wrong.json", 1, "cases: 1 newly wrong; FAILS on newly wrong"),
        ("missing.json", 1, "cases: 1 missing; FAILS on missing"),
        ("skipped.json", 0, "cases: 1 newly skipped; passes"),
        ("more.json", 0, "cases: 1 new; passes"),
    ],
)
def test_the_exit_code_is_1_for_slower_newly_wrong_and_missing(
    capsys: Printed, new: str, code: int, last: str
) -> None:
    assert compared("base", new) == code
    assert capsys.readouterr().out.splitlines()[-1].endswith(last)


def test_fixed_is_no_failure(capsys: Printed) -> None:
    assert compared("wrong.json", "same") == 0
    assert "1 fixed; passes" in capsys.readouterr().out


def test_the_reference_is_the_first_whatever_its_name(capsys: Printed) -> None:
    assert compared("slow", "base") == 0
    out = capsys.readouterr().out
    assert out.startswith("base (3 launches) against slow (3 launches)\n")
    assert "6 faster" in out


def test_each_new_is_compared_with_base_and_the_worst_gives_the_exit_code(capsys: Printed) -> None:
    assert compared("base", "same", "slow") == 1
    assert compared("base", "slow", "same") == 1
    assert compared("base", "same", "base") == 0
    assert capsys.readouterr().out.count("against base (3 launches)") == 6


def test_a_glob_is_a_side(capsys: Printed) -> None:
    assert compared("base/*.json", "slow/[12].json") == 1
    assert capsys.readouterr().out.startswith("slow/[12].json (2 launches) against base/*.json (3 launches)")


def test_fail_on_names_what_fails_in_place_of_the_default(capsys: Printed) -> None:
    assert compared("base", "slow", "--fail-on", "newly wrong,missing") == 0
    assert compared("base", "skipped.json", "--fail-on", "newly-skipped") == 1
    assert compared("base", "same", "--fail-on=same,unclear") == 1
    assert "FAILS on same" in capsys.readouterr().out


def test_launch_cost_fails_only_where_fail_on_names_it(capsys: Printed) -> None:
    assert compared("cheap.json", "costly.json") == 0
    assert compared("cheap.json", "costly.json", "--fail-on", "launch") == 1
    assert "launch costs: 3 higher; FAILS on launch" in capsys.readouterr().out
    assert compared("cheap.json", "cheap.json", "--fail-on", "launch") == 0


def test_a_launch_cost_that_cannot_be_told_is_no_pass_where_fail_on_names_it(capsys: Printed) -> None:
    assert compared("cheap.json", "base") == 0
    assert "is not compared: base/1.json has none" in " ".join(capsys.readouterr().out.split())
    assert compared("cheap.json", "base", "--fail-on", "launch") == 2
    assert capsys.readouterr().err == (
        "pytest-ep: --fail-on launch: launch cost of flashinfer_ep h200 EP2 normal bf16 deepseek_v3 uniform"
        " (dispatch, combine, roundtrip) is not compared: base/1.json has none\n"
    )
    assert compared("base", "same", "--fail-on", "launch") == 2
    assert "neither base nor same has launch costs" in capsys.readouterr().err
    assert compared("base", "slow", "--fail-on", "slower,launch") == 1


def test_fail_on_none_reports_and_passes(capsys: Printed) -> None:
    assert compared("base", "slow", "wrong.json", "--fail-on", "none") == 0
    assert "rows: 6 slower; passes" in capsys.readouterr().out


def test_a_floor_sets_what_matters() -> None:
    assert compared("base", "slow", "--floor", "60%") == 0
    assert compared("base", "slow", "--floor", "100us") == 0
    assert compared("base", "slow", "--floor", "40%,1us") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--floor", "much"), "'much' is no floor"),
        (("--floor", "1%,2%"), "'1%,2%' has two floors in %: write one, as 1%,0.1us"),
        (("--fail-on", "worse"), "'worse' is no word of a comparison, known: slower, faster, same, unclear"),
        (("--fail-on", "slower,none"), "'none' is no word of a comparison"),
        (("--format", "html"), "invalid choice: 'html'"),
    ],
)
def test_a_wrong_option_is_refused(capsys: Printed, arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(SystemExit) as caught:
        compared("base", "same", *arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("base", "gb200.json"), "different SKUs: base has h200, gb200.json has gb200"),
        (("base", "gone.json"), "gone.json: cannot be read"),
        (("base",), "only base: give BASE and NEW"),
        (("base", "same", "--expect", "e.toml", "--floor", "1%"), "leave out --floor and --fail-on"),
        (("base", "same", "--expect", "e.toml", "--fail-on", "none"), "leave out --floor and --fail-on"),
        (("base", "none.json"), "no case that ran in base ran in none.json: no-kernel: not for this GPU"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_exit_code_2(
    capsys: Printed, arguments: tuple[str, ...], said: str
) -> None:
    assert compared(*arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("pytest-ep: ")
    assert said in err
    assert err.count("\n") == 1


def test_nothing_is_printed_where_one_of_several_cannot_be_compared(capsys: Printed) -> None:
    assert compared("base", "same", "gone.json") == 2
    assert not capsys.readouterr().out


def test_text_fits_a_log_and_ends_with_what_matters(capsys: Printed) -> None:
    assert (
        compared(*(str(BASELINES / f"flashinfer-{wheel}") for wheel in ("0.6.15.post1", "0.6.16.post4"))) == 1
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert all(line.isascii() for line in lines)
    assert lines[1].strip() == "flashinfer_ep flashinfer-python 0.6.15.post1 -> 0.6.16.post4"
    row = next(line for line in lines if line.startswith("  8192 "))
    assert row.split()[-1] == "slower"
    assert len(row.split()) == 1 + 3 * 5
    assert any(line.startswith("slower: combine ") for line in lines[-8:])
    assert lines[-1].endswith("FAILS on slower")


def test_columns_of_long_times_stay_apart_and_all_lines_of_a_table_are_aligned(capsys: Printed) -> None:
    long = dict.fromkeys(MEDIANS, 125000000.0)
    for name, us in (("a.json", MEDIANS), ("b.json", long)):
        ResultFile().timed(1, us, launch_us=us["combine"]).timed(1234567, long).write(Path(name))
    assert compared("a.json", "b.json") == 1
    lines = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.split()[:1] == ["T"])
    heads, small, large = lines[first + 1 : first + 4]
    assert small.split()[:3] == ["1", "10.0", "125000000"]
    assert large.split() == ["1234567", *(["125000000", "125000000", "+0.0", "+-0.0", "same"] * 3)]
    assert [small.rindex("125000000"), large.rindex("125000000")] == [heads.rindex("new") - 6] * 2
    (cost,) = (line for line in lines if line.startswith("  combine, 1 T"))
    assert cost.split()[3:5] == ["20.0", "125000000"]


def test_several_curves_are_told_apart_in_what_matters(capsys: Printed) -> None:
    for name, factor in (("a.json", 1.0), ("b.json", 2.0)):
        us = {component: factor * median for component, median in MEDIANS.items()}
        file = ResultFile().timed(1, us)
        file.timed(1, us, of={**_params(), "precision": "fp8"}).write(Path(name))
    assert compared("a.json", "b.json") == 1
    out = capsys.readouterr().out
    assert out.count("\nslower: ") == 6
    assert (
        "slower: flashinfer_ep h200 EP2 normal fp8 deepseek_v3 uniform graph combine +100.0 % at T=1" in out
    )


def test_markdown_has_what_matters_before_the_fold(capsys: Printed) -> None:
    assert compared("base", "slow", "--format", "markdown") == 1
    first, folded = capsys.readouterr().out.split("<details>")
    assert "**rows: 6 slower; FAILS on slower**" in first
    assert "- **slower**: combine +50.0 % at T=1,4096" in first
    assert "| combine | 4096 | 20.0 | 30.0 |" in folded
    assert folded.rstrip().endswith("</details>")


def test_markdown_shows_other_software_before_the_fold_and_other_circumstances_within(
    capsys: Printed,
) -> None:
    for name, torch, host in (("a", "2.11.0", "x"), ("b", "2.12.0", "y")):
        ResultFile(software={"torch": torch, "host": host}).timed(1).write(Path(f"{name}.json"))
    assert compared("a.json", "b.json", "--format", "markdown") == 0
    first, folded = capsys.readouterr().out.split("<details>")
    assert "- torch 2.11.0 -> 2.12.0" in first
    assert "- also differs: host x -> y" in folded
    assert compared("a.json", "b.json") == 0
    assert capsys.readouterr().out.splitlines()[1:3] == [
        "  torch 2.11.0 -> 2.12.0",
        "  also differs: host x -> y",
    ]


def test_markdown_of_a_wrong_case_names_it_before_the_fold(capsys: Printed) -> None:
    assert compared("base", "wrong.json", "--format", "markdown") == 1
    wrong = capsys.readouterr().out
    assert "- **newly wrong**: flashinfer\\_ep" in wrong.split("<details>")[0]


def test_json_has_every_row_and_case(capsys: Printed) -> None:
    assert compared("base", "slow", "wrong.json", "--format", "json") == 1
    slow, wrong = json.loads(capsys.readouterr().out)["comparisons"]
    assert slow["base"] == {"name": "base", "files": ["base/1.json", "base/2.json", "base/3.json"]}
    assert (slow["words"], slow["fails"], slow["floor"]) == (
        {"slower": 6},
        ["slower"],
        {"percent": 1.0, "us": 0.1},
    )
    row = next(row for row in slow["rows"] if row["component"] == "combine" and row["params"]["tokens"] == 1)
    assert row["word"] == "slower"
    assert row["ratio"] == pytest.approx(1.5)
    assert row["interval"][0] < 1.5 < row["interval"][1]
    assert (row["base_launches"], row["new_launches"], row["clock"]) == (3, 3, "graph")
    assert [curve["geometric_mean"] for curve in slow["curves"]] == pytest.approx([1.5] * 3)
    (case,) = wrong["cases"]
    assert (case["word"], case["params"]["tokens"]) == ("newly wrong", 4096)


def test_json_has_the_device_clock_beside_as_its_own_field(capsys: Printed) -> None:
    ResultFile(clock="event").timed(1, graph_p50_us=5.0).write(Path("a.json"))
    assert compared("a.json", "a.json", "--format", "json") == 0
    ((found,),) = (one["curves"][:1] for one in json.loads(capsys.readouterr().out)["comparisons"])
    assert [(row["clock"], row["word"], row["reason"]) for row in found["device"]] == [("graph", "same", "")]


def test_recover_says_in_one_line_that_its_file_exists(capsys: Printed) -> None:
    head = {"machine_info": {}, "commit_info": {}, "datetime": "", "version": "", "selected": []}
    Path("a.json.jsonl").write_text(json.dumps({"pytest_ep_journal": 1, **head}) + "\n")
    assert main(["recover", "a.json.jsonl"]) == 0
    assert main(["recover", "a.json.jsonl"]) == 2
    said = "pytest-ep: a.json exists and is not overwritten: name another file\n"
    assert capsys.readouterr().err == said
    for command in (["export", "base", "--csv"], ["expect", "base"]):
        assert main([*command, "-o", "a.json"]) == 2
        assert capsys.readouterr().err == said
        assert main([*command, "-o", "gone/a.json"]) == 2
        assert capsys.readouterr().err.startswith("pytest-ep: gone/a.json: cannot be written, No such file")


def test_recover_replaces_what_was_cut_short_and_no_other_file_that_is_no_result() -> None:
    head = {"machine_info": {}, "commit_info": {}, "datetime": "", "version": "", "selected": []}
    Path("a.json.jsonl").write_text(json.dumps({"pytest_ep_journal": 1, **head}) + "\n")
    for name in ("a.json", "b.json"):
        Path(name).write_text('{"machine_info": {')
    assert main(["recover", "a.json.jsonl", "-o", "b.json"]) == 2
    assert main(["recover", "a.json.jsonl"]) == 0
    assert json.loads(Path("a.json").read_text())["benchmarks"] == []


def test_the_command_answers_without_torch_and_numpy() -> None:
    code = (
        "import sys; from pytest_ep.results.cli import main\n"
        "try: main(['compare', '--help'])\n"
        "except SystemExit: print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "BASE" in out
    assert out.splitlines()[-1] == "[]"


def test_a_reader_that_has_enough_ends_it_without_a_word() -> None:
    command = [sys.executable, "-m", "pytest_ep", "export", "base", "--csv"]
    root = str(Path(__file__).parents[1])
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, check=False, env={**os.environ, "PYTHONPATH": root}
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (2, b"")
