"""Result files are read by what they say, and refused in one line that says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_ep.results.sides import Case
from pytest_ep.results.sides import ResultError
from pytest_ep.results.sides import RowKey
from pytest_ep.results.sides import load_launch
from pytest_ep.results.sides import load_side
from tests.result_files import ResultFile
from tests.result_files import nodeid
from tests.result_files import params

CASE = Case("flashinfer_ep", "h200", 2, "normal", "bf16", "deepseek_v3", "uniform", "none", 64)


def refused(text: str | Path) -> str:
    with pytest.raises(ResultError) as caught:
        load_side(str(text))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_file_is_a_side_of_one_launch_and_its_rows_are_known_by_their_params(tmp_path: Path) -> None:
    side = load_side(str(ResultFile().timed(64).write(tmp_path / "a.json")))
    (launch,) = side.launches
    assert side.name == str(tmp_path / "a.json")
    assert set(launch.rows) == {RowKey(CASE, one) for one in ("dispatch", "combine", "roundtrip")}
    row = launch.rows[RowKey(CASE, "combine")]
    assert (row.clock, row.info["p50_us"], len(row.seconds)) == ("graph", 20.0, 16)
    assert str(row.key) == "flashinfer_ep h200 EP2 normal bf16 deepseek_v3 uniform T=64 combine"
    assert launch.outcomes[CASE].nodeid == nodeid(params(64))
    assert launch.machine["sku"] == "h200"
    assert launch.software["backends"] == {"flashinfer_ep": {"flashinfer-python": "0.6.15.post1"}}


def test_a_folder_is_a_side_of_its_files_in_natural_order_and_has_its_name(tmp_path: Path) -> None:
    for number in (10, 9, 1):
        ResultFile().timed(64).write(tmp_path / "0.6.15" / f"{number}.json")
    (tmp_path / "0.6.15" / "1.log").write_text("not a result")
    side = load_side(str(tmp_path / "0.6.15"))
    assert side.name == "0.6.15"
    assert [launch.path.name for launch in side.launches] == ["1.json", "9.json", "10.json"]


def test_a_glob_is_a_side_unless_a_file_has_that_very_name(tmp_path: Path) -> None:
    for name in ("a1.json", "a2.json", "a[12].json"):
        ResultFile().timed(64).write(tmp_path / name)
    assert len(load_side(str(tmp_path / "a?.json")).launches) == 2
    assert len(load_side(str(tmp_path / "a[12].json")).launches) == 1


def test_the_outcomes_of_cases_without_rows_are_known_by_their_params_or_else_by_node_id(
    tmp_path: Path,
) -> None:
    file = ResultFile().timed(1).failed(64).skipped(128).checked(2).not_run(4)
    launch = load_launch(file.write(tmp_path / "a.json"))
    found = {case.tokens: (outcome.what, outcome.code) for case, outcome in launch.outcomes.items()}
    assert found == {
        1: ("timed", ""),
        2: ("checked", ""),
        64: ("failed", "combine_values"),
        128: ("skipped", "no-kernel"),
    }
    assert launch.unplaced[nodeid(params(4))].what == "not_run"
    del file.section["failed"][0]["params"]  # as older files are
    assert nodeid(params(64)) in load_launch(file.write(tmp_path / "b.json")).unplaced


def test_files_are_in_natural_order_whatever_counts_as_a_digit(tmp_path: Path) -> None:
    for name in ("10\u00b23", "9\u00b23", "9\u00b220"):
        ResultFile().timed(64).write(tmp_path / f"{name}.json")
    names = [launch.path.stem for launch in load_side(str(tmp_path)).launches]
    assert names == ["9\u00b23", "9\u00b220", "10\u00b23"]


def test_a_failed_probe_is_no_case_of_as_many_tokens(tmp_path: Path) -> None:
    file = ResultFile().timed(8)
    name = nodeid(params(8)).replace("test_case[", "test_probe[").replace("uniform-T00008", "rank_powers")
    file.section["failed"].append(
        {"case": name, "params": params(8), "code": "payload", "reason": "payload: wrong"}
    )
    outcomes = load_launch(file.write(tmp_path / "a.json")).outcomes
    assert {(case.probe, outcome.what) for case, outcome in outcomes.items()} == {
        ("", "timed"),
        ("rank_powers", "failed"),
    }


def test_a_probe_has_its_name_from_its_entry_wherever_its_test_is(tmp_path: Path) -> None:
    file = ResultFile().timed(8).probe("probed", case="mine.py::TestMine::test_other[x]")
    found = load_launch(file.write(tmp_path / "a.json")).outcomes
    assert [(case.probe, str(case).split()[-2:], one.what) for case, one in found.items()] == [
        ("", ["uniform", "T=8"], "timed"),
        ("slots", ["probe", "slots"], "probed"),
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device_memory_bytes": None, "construction_s": 3}, ""),
        ({"device_memory_bytes": "much"}, "TypeError: must be real number, not str"),
        ({"construction_s": float("nan")}, "ValueError: construction has nan as construction_s"),
        (None, "KeyError: 'backend'"),
    ],
)
def test_what_construction_took_may_be_unknown_but_must_be_numbers(
    tmp_path: Path, change: dict[str, object] | None, said: str
) -> None:
    file = ResultFile().timed(64).constructed()
    if change is None:
        del file.section["construction"][0]["backend"]
    else:
        file.section["construction"][0].update(change)
    path = file.write(tmp_path / "a.json")
    if said:
        assert said in refused(path)
    else:
        assert len(load_launch(path).construction) == 1


def test_what_is_no_result_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.json").write_text("text")
    (tmp_path / "other.json").write_text('{"benchmarks": []}')
    (tmp_path / "r.json.jsonl").write_text("{}")
    assert "no *.json" in refused(tmp_path / "empty")
    assert "no file matches" in refused(tmp_path / "*.xml")
    assert "No such file" in refused(tmp_path / "gone.json")
    assert "not JSON" in refused(tmp_path / "text.json")
    assert "no result file of pytest-ep" in refused(tmp_path / "other.json")
    assert "pytest-ep recover" in refused(tmp_path / "r.json.jsonl")


def test_a_file_of_another_schema_or_with_broken_rows_is_refused(tmp_path: Path) -> None:
    file = ResultFile().timed(64)
    file.section["schema"] = 2
    assert "schema 2, this pytest-ep reads 1" in refused(file.write(tmp_path / "a.json"))
    file.section["schema"] = 1
    file.rows[0]["stats"]["data"] = [0.0]
    assert "no samples that are durations" in refused(file.write(tmp_path / "b.json"))
    file.rows[0]["stats"]["data"], file.rows[0]["extra_info"]["clock"] = [1e-5], "sundial"
    assert "clock or median that no row has" in refused(file.write(tmp_path / "d.json"))
    del file.rows[0]["params"]["tokens"]
    assert "KeyError: 'tokens'" in refused(file.write(tmp_path / "c.json"))


def test_two_rows_of_one_case_are_refused(tmp_path: Path) -> None:
    file = ResultFile().timed(64)
    file.test = "cases/test_y.py::TestY::test_case"
    assert "two rows for flashinfer_ep" in refused(file.timed(64).write(tmp_path / "a.json"))


def test_what_a_run_wrote_is_read_whole() -> None:
    folder = Path(__file__).parents[1] / "ci" / "baselines" / "h200-x2" / "flashinfer-0.6.15.post1"
    for launch in load_side(str(folder)).launches:
        written = json.loads(launch.path.read_text())
        assert len(launch.rows) == len(written["benchmarks"])
        timed = [outcome.nodeid for outcome in launch.outcomes.values() if outcome.what == "timed"]
        assert timed == [entry["case"] for entry in written["pytest_ep"]["cases"]]
