"""Result files as one CSV table that loses nothing."""

from __future__ import annotations

import argparse
import csv
import io
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_ep.results import export
from pytest_ep.results.sides import ResultError
from pytest_ep.results.sides import load_launch
from tests.result_files import ResultFile
from tests.result_files import params

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    export.add_parser(parser.add_subparsers(required=True))
    chosen = parser.parse_args(["export", "--csv", *arguments])
    return int(chosen.run(chosen))


def table(*files: Path) -> list[dict[str, str]]:
    """What a reader of the CSV of some files sees."""
    text = io.StringIO()
    export.write(map(load_launch, files), text)
    return list(csv.DictReader(io.StringIO(text.getvalue(), newline="")))


def test_a_row_has_its_params_its_statistics_in_us_and_every_key_of_extra_info(tmp_path: Path) -> None:
    file = ResultFile().timed(64, late=3, throttle_reasons=["power cap", "power brake"])
    lines = table(file.write(tmp_path / "a.json"))
    assert [line["component"] for line in lines] == ["dispatch", "combine", "roundtrip"]
    us = [second * 1e6 for second in file.rows[0]["stats"]["data"]]
    first = lines[0]
    assert first.items() >= {name: str(value) for name, value in params(64).items()}.items()
    assert (first["outcome"], first["token_skew"], first["rounds"]) == ("timed", "none", "16")
    assert float(first["median_us"]) == statistics.median(us)
    assert float(first["min_us"]) == min(us)
    assert float(first["max_us"]) == max(us)
    assert float(first["mean_us"]) == pytest.approx(10, rel=0.01)
    assert float(first["stddev_us"]) == statistics.stdev(us)
    assert set(file.rows[0]["extra_info"]) <= set(first)
    assert (first["late"], first["throttle_reasons"]) == ("3", "power cap;power brake")
    assert first["versions"] == "flashinfer-python=0.6.15.post1"


def test_cases_without_rows_have_lines_that_say_why(tmp_path: Path) -> None:
    file = ResultFile().timed(1).failed(2, "wrong at token 3").skipped(0).checked(4).not_run(8)
    lines = table(file.write(tmp_path / "a.json"))[3:]
    said = [(line["outcome"], line["tokens"], line["code"], line["reason"]) for line in lines]
    assert sorted(said) == [
        ("checked", "4", "", "several ranks on one device"),
        ("failed", "2", "combine_values", "wrong at token 3"),
        ("not_run", "", "", "the session's budget is spent"),
        ("skipped", "0", "no-kernel", "no such kernel"),
    ]
    assert {line["median_us"] for line in lines} == {""}
    assert all(line["case"].startswith("cases/test_x.py::") for line in lines)


def test_columns_are_in_a_fixed_order_and_the_union_over_all_rows_of_all_files(tmp_path: Path) -> None:
    one = load_launch(ResultFile().timed(1, first=1).write(tmp_path / "1.json"))
    two = load_launch(ResultFile().timed(2, second=2).write(tmp_path / "2.json"))
    columns, lines = export.lines([one, two])
    assert columns[: len(export.COLUMNS)] == list(export.COLUMNS)
    assert columns[len(export.COLUMNS) :] == [*one.rows[next(iter(one.rows))].info, "second"]
    assert [line["file"] for line in lines] == [str(one.path)] * 3 + [str(two.path)] * 3
    assert [table(one.path, two.path)[place]["second"] for place in (0, 3)] == ["", "2"]


def test_text_that_would_break_a_line_is_quoted_and_nested_values_are_json(tmp_path: Path) -> None:
    kernels = [{"name": 'a,"b"', "count": 2}, {"name": "c", "count": 1}]
    file = ResultFile().timed(1, kernels=kernels, link_share=None, skewed=False)
    file.failed(2, 'got "0", expected 1,\nin column 5')
    lines = table(file.write(tmp_path / "a.json"))
    assert list(map(json.loads, lines[0]["kernels"].split(";"))) == kernels
    assert (lines[0]["link_share"], lines[0]["skewed"]) == ("", "false")
    assert lines[3]["reason"] == 'got "0", expected 1,\nin column 5'


def test_a_key_of_extra_info_does_not_take_a_column_s_place(tmp_path: Path) -> None:
    (line, *_) = table(ResultFile().timed(1, rounds=5, file="x").write(tmp_path / "a.json"))
    assert (line["rounds"], line["file"]) == ("16", str(tmp_path / "a.json"))


def test_the_output_is_a_new_file_of_crlf_lines_or_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(ResultFile().timed(1).write(tmp_path / "a.json"))
    assert run(file) == 0
    printed = capsys.readouterr().out
    assert printed.count("\r\n") == 4
    output = tmp_path / "a.csv"
    assert run(file, "-o", str(output)) == 0
    assert output.read_bytes().decode() == printed
    with pytest.raises(ResultError, match=r"a\.csv exists and is not overwritten"):
        run(file, "-o", str(output))


def test_a_folder_is_all_its_files_and_an_unknown_file_is_one_line(tmp_path: Path) -> None:
    for number in (2, 10):
        ResultFile().timed(1).write(tmp_path / f"{number}.json")
    run(str(tmp_path), "-o", str(tmp_path / "all.csv"))
    lines = list(csv.DictReader((tmp_path / "all.csv").open(newline="")))
    assert [Path(line["file"]).name for line in lines] == ["2.json"] * 3 + ["10.json"] * 3
    with pytest.raises(ResultError, match=r"none\.json"):
        run(str(tmp_path / "none.json"))


def test_a_real_result_file_is_exported_without_numpy_and_torch() -> None:
    file = next((ROOT / "ci/baselines").rglob("*.json"))
    program = (
        "import sys; from pytest_ep.results import export, sides;"
        f"export.write([sides.load_launch(sides.Path({str(file)!r}))], sys.stdout);"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, cwd=ROOT)
    lines = list(csv.DictReader(io.StringIO(said.stdout.decode(), newline="")))
    rows = json.loads(file.read_text())["benchmarks"]
    timed = [line for line in lines if line["outcome"] == "timed"]
    assert len(timed) == len(rows)
    for line, row in zip(timed, rows, strict=True):
        assert {**row["params"], **row["extra_info"]}.keys() <= line.keys()
        for name in ("min", "median", "mean", "stddev", "max"):
            assert float(line[f"{name}_us"]) == pytest.approx(row["stats"][name] * 1e6)
