"""Expectations: written from a good rack, met by it, and not by one that is worse."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_ep.results import expect
from pytest_ep.results.expectations import load
from pytest_ep.results.judgement import Judgement
from pytest_ep.results.judgement import judge
from pytest_ep.results.qualify import qualify
from pytest_ep.results.sides import ResultError
from pytest_ep.results.sides import load_side
from tests.result_files import MEDIANS
from tests.result_files import ResultFile
from tests.result_files import nodeid
from tests.result_files import params

ROOT = Path(__file__).parents[1]
SIZES = (1, 64, 512)


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    expect.add_parser(parser.add_subparsers(required=True))
    chosen = parser.parse_args(["expect", *arguments])
    return int(chosen.run(chosen))


def launches(folder: Path, *factors: float, component: str = "combine", **info: Any) -> str:
    """A folder of launches; in each, one component takes ``factor`` of its usual time."""
    for number, factor in enumerate(factors, 1):
        file = ResultFile()
        for tokens in SIZES:
            file.timed(tokens, {**MEDIANS, component: MEDIANS[component] * factor}, seed=number, **info)
        file.write(folder / f"{number}.json")
    return str(folder)


def written(folder: Path, rack: str, *options: str) -> Path:
    """The expectations that a rack lets one have."""
    file = folder / "rack.toml"
    assert run(rack, "-o", str(file), *options) == 0
    return file


def judged(text: str, side: str, folder: Path) -> Judgement:
    """A side against a file of this text."""
    file = folder / "by_hand.toml"
    file.write_text(text)
    return judge(load(file), load_side(side))


def unmet(judgement: Judgement) -> list[tuple[str, str]]:
    return [(finding.what, f"{finding.subject}: {finding.reason}") for finding in judgement.unmet]


def test_what_is_written_is_met_by_the_files_it_was_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rack = launches(tmp_path / "good", 1.00004, 1.02, 0.97)
    assert qualify(written(tmp_path, rack, "--margin", "0"), [rack], "text") == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["  met: 18"]


@pytest.mark.parametrize(
    "us", [20.00000000001, 123.4000000000001, 1234.5, 98765.4321, 1e6 + 1e-9, 9999.9, 3e-5]
)
def test_no_limit_is_tighter_than_the_figure_that_it_was_made_of(tmp_path: Path, us: float) -> None:
    rack = str(
        ResultFile().timed(1, dict.fromkeys(MEDIANS, us), spread_us=us).write(tmp_path / "good/1.json")
    )
    file = written(tmp_path, rack, "--margin", "0")
    assert qualify(file, [rack], "text") == 0
    (first, *_) = load(file)
    assert dict(first.limits) == pytest.approx({"max_us": us, "max_spread_us": us}, rel=1e-3)


def test_a_rack_that_is_slower_than_the_margin_fails_and_says_where_and_by_how_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, launches(tmp_path / "good", 1), "--margin=5%")
    assert qualify(file, [launches(tmp_path / "near", 1.04, 1.04, 1.04)], "text") == 0
    capsys.readouterr()
    assert qualify(file, [launches(tmp_path / "slow", 1.1, 1.08, 1.2)], "text") == 1
    first, key, *lines, last = capsys.readouterr().out.splitlines()
    assert first.startswith("slow (3 launches) against ")
    assert key == "  flashinfer_ep h200 EP2 normal bf16 deepseek_v3"
    what = "22.00 us, max_us 21.00: 4.8 % over; worst launch 24.00 (3.json)"
    assert lines == [f"    over        uniform T={tokens} combine  {what}" for tokens in SIZES]
    assert last == "  not met: 3 over; met: 15"


def test_limits_are_the_median_of_the_launches_and_their_largest_spread_with_the_margin(
    tmp_path: Path,
) -> None:
    for number, (factor, spread) in enumerate(((1.0, 0.3), (1.5, 0.1), (0.9, 0.2))):
        us = {name: median * factor for name, median in MEDIANS.items()}
        ResultFile().timed(1, us, spread_us=spread).write(tmp_path / f"rack/{number}.json")
    (dispatch, *_) = load(written(tmp_path, str(tmp_path / "rack"), "--margin=10"))
    assert dispatch.selects["component"] == ("dispatch",)
    assert dispatch.limits == pytest.approx({"max_us": 11, "max_spread_us": 1.3})


def test_launches_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for host, factor in (("a", 1.0), ("b", 1.3), ("c", 1.2)):
        launches(tmp_path / host, factor)
    found = judged(expectation("max_us = 21"), str(tmp_path / "[abc]" / "1.json"), tmp_path)
    assert {finding.worst_launch for finding in found.unmet} == {str(tmp_path / "b" / "1.json")}
    assert {finding.launches for finding in found.unmet} == {3}


def test_the_median_of_the_launches_decides_not_the_worst(tmp_path: Path) -> None:
    text = expectation("max_us = 21")
    assert not judged(text, launches(tmp_path / "a", 1, 1, 1.3), tmp_path).unmet
    assert len(judged(text, launches(tmp_path / "b", 1, 1.3, 1.3), tmp_path).unmet) == 3


def expectation(*lines: str, clock: str = "graph", component: str = "combine") -> str:
    """A cell for one component."""
    return "\n".join(["[[cell]]", f'clock = "{clock}"', f'component = "{component}"', *lines, ""])


@pytest.mark.parametrize(
    ("limit", "info", "what"),
    [
        ("max_us = 20.1", {}, None),
        ("max_us = 19.9", {}, "over"),
        ("min_gbps = 45", {"gbps": 46.0}, None),
        ("min_gbps = 47", {"gbps": 46.0}, "under"),
        ("max_spread_us = 0.2", {"spread_us": 0.1}, None),
        ("max_spread_us = 0.2", {"spread_us": 0.3}, "over"),
        ("max_launch_spread_percent = 2", {}, None),
        ("max_launch_spread_percent = 0.5", {}, "over"),
    ],
)
def test_each_limit_holds_and_breaks(
    tmp_path: Path, limit: str, info: Mapping[str, Any], what: str | None
) -> None:
    side = launches(tmp_path / "a", 1, 1.01, 0.995, **info)
    found = judged(expectation(limit), side, tmp_path)
    assert {finding.what for finding in found.findings} == {what or "met"}
    assert all((finding.beyond > 0) == bool(what) for finding in found.findings)


def test_how_far_launches_lie_apart_cannot_be_said_of_one(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"max_launch_spread_percent of .* needs several launches, 1\.json"):
        judged(expectation("max_launch_spread_percent = 2"), launches(tmp_path / "a", 1), tmp_path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('mode = "low_latency"', "no row with mode low_latency; there: normal"),
        ('sku = ["h100", "b200"]', "no row with sku h100,b200; there: h200"),
        ("tokens = 2", "no row with tokens 2; there: 1, 64, 512"),
        ('tokens = "65..511"', "no row with tokens 65..511; there: 1, 64, 512"),
        ("tokens = [1, 2, 64]", "no row with tokens 2"),
        ('tokens = [1, "513..1024"]', "no row with tokens 513..1024"),
        ("ep_size = [2, 4]", "no row with ep_size 4"),
        ("ep_size = [2, 4]\ntokens = [1, 64]", "no row with ep_size 4"),
    ],
)
def test_what_selects_no_row_is_missing_and_says_what_is_there(
    tmp_path: Path, line: str, reason: str
) -> None:
    found = judged(expectation(line, "max_us = 99"), launches(tmp_path / "a", 1), tmp_path)
    assert [text.partition(": ")[2] for _, text in unmet(found)] == [reason]
    assert {what for what, _ in unmet(found)} == {"missing"}


def test_each_combination_of_listed_values_must_have_a_row(tmp_path: Path) -> None:
    file = ResultFile().timed(1).timed(64, of=params(64, ep_size=4)).timed(128, of=params(128, ep_size=4))
    rack = str(file.write(tmp_path / "a.json"))
    text = expectation("ep_size = [2, 4]", 'tokens = [1, "64..512"]', "max_us = 99")
    assert [reason.partition(": ")[2] for _, reason in unmet(judged(text, rack, tmp_path))] == [
        "no row with ep_size 2 and tokens 64..512",
        "no row with ep_size 4 and tokens 1",
    ]
    file.timed(64).timed(1, of=params(1, ep_size=4)).write(tmp_path / "a.json")
    assert not judged(text, rack, tmp_path).unmet


def test_expectations_that_are_missing_for_one_reason_are_one_line(tmp_path: Path) -> None:
    good = launches(tmp_path / "good", 1)
    file = written(tmp_path, good)
    text = file.read_text().replace('sku = "h200"', 'sku = "h100"')
    assert [reason for _, reason in unmet(judged(text, good, tmp_path))] == [
        "[[cell]] 1, each 1 backend=flashinfer_ep sku=h100 ep_size=2 mode=normal precision=bf16"
        " model=deepseek_v3 routing=uniform token_skew=none tokens=1 component=dispatch and 8 more:"
        " no row with sku h100; there: h200"
    ]


@pytest.mark.parametrize("tokens", ["", "tokens = 64", "tokens = [1, 64]", 'tokens = "1..64"'])
def test_any_subset_of_the_params_selects(tmp_path: Path, tokens: str) -> None:
    found = judged(expectation(tokens, "max_us = 99"), launches(tmp_path / "a", 1), tmp_path)
    assert {"T=64"} <= {finding.subject.split()[1] for finding in found.findings}
    assert found.unexpected == 9 - len(found.findings)
    assert not found.unmet


def test_a_skipped_case_is_missing_with_its_reason(tmp_path: Path) -> None:
    ResultFile().timed(1).skipped(64, "the wheel lacks it").write(tmp_path / "a.json")
    for tokens in ("tokens = 64", "tokens = [1, 64]", 'tokens = "1..64"', ""):
        found = judged(expectation(tokens, "max_us = 99"), str(tmp_path / "a.json"), tmp_path)
        assert unmet(found) == [("missing", "uniform T=64: skipped: the wheel lacks it")]
    assert not judged(expectation("tokens = 1", "max_us = 99"), str(tmp_path / "a.json"), tmp_path).unmet


def test_a_key_that_cannot_run_is_missing_where_it_is_asked_for_by_name(tmp_path: Path) -> None:
    rack = tmp_path / "a.json"
    ResultFile().timed(1, of=params(1, precision="fp8")).skipped(0, "the wheel lacks it").write(rack)
    asked = judged(expectation('precision = ["bf16", "fp8"]', "max_us = 99"), str(rack), tmp_path)
    assert [reason.partition(": ")[2] for _, reason in unmet(asked)] == [
        "no row with precision bf16; skipped: the wheel lacks it"
    ]
    assert not judged(expectation("max_us = 99"), str(rack), tmp_path).unmet


def test_a_case_that_some_launches_do_not_time_is_missing_with_how_many_and_why(tmp_path: Path) -> None:
    for number, file in enumerate(
        (
            ResultFile().timed(1).timed(2).timed(4),
            ResultFile().timed(1).not_run(2, "stopped").probe("probed"),
            ResultFile().timed(1).skipped(2, "no memory").checked(4, "one GPU"),
            ResultFile().skipped(0, "no link"),
        )
    ):
        file.write(tmp_path / f"rack/{number}.json")
    found = judged(expectation("max_us = 99"), str(tmp_path / "rack"), tmp_path)
    assert unmet(found) == [
        ("missing", "uniform T=1: in 1 of 4 launches: skipped: no link"),
        (
            "missing",
            "uniform T=2: in 3 of 4 launches: not run: stopped, skipped: no memory, skipped: no link",
        ),
        ("missing", "uniform T=4: in 3 of 4 launches: absent, checked: one GPU, skipped: no link"),
    ]
    spread = judged(expectation("max_launch_spread_percent = 5"), str(tmp_path / "rack"), tmp_path)
    assert unmet(spread) == unmet(found)
    only = judged(expectation("tokens = 4", "max_us = 99"), str(tmp_path / "rack"), tmp_path)
    assert [reason.split()[1] for _, reason in unmet(only)] == ["T=4:"]


def test_a_case_that_no_launch_reached_is_missing_even_where_nothing_tells_its_params(tmp_path: Path) -> None:
    file = ResultFile().timed(1).not_run(64, "stopped")
    file.section["not_run"].append({"case": "x.py::T::test_probe[h200-slots]", "reason": "stopped"})
    rack = str(file.write(tmp_path / "a.json"))
    found = judged(expectation('tokens = "1..512"', "max_us = 99"), rack, tmp_path)
    assert unmet(found) == [("missing", f"{nodeid(params(64))}: not run: stopped")]


def test_launches_of_another_ep_size_lack_no_case_of_this_one(tmp_path: Path) -> None:
    two = ResultFile(machine={"sku": "h200", "ranks": 2}).timed(1)
    four = ResultFile(machine={"sku": "h200", "ranks": 4}).timed(1, of=params(1, ep_size=4))
    four.skipped(1, "launch it with 2 ranks", "ep-size")
    for name, file in (("2", two), ("4", four)):
        file.write(tmp_path / f"rack/{name}.json")
    assert not judged(expectation("max_us = 99"), str(tmp_path / "rack"), tmp_path).unmet


def test_a_wrong_case_fails_what_selects_it_and_nothing_else(tmp_path: Path) -> None:
    for number in (1, 2):
        file = ResultFile().timed(1)
        (file.failed(64) if number == 2 else file.timed(64)).write(tmp_path / f"a/{number}.json")
    side = str(tmp_path / "a")
    found = judged(expectation('tokens = "1..64"', "max_us = 99"), side, tmp_path)
    assert unmet(found) == [("wrong", "uniform T=64: combine_values: error 1 (2.json)")]
    assert not judged(expectation("tokens = 1", "max_us = 99"), side, tmp_path).unmet
    only = judged(expectation("tokens = 64", "max_us = 99"), str(tmp_path / "a/2.json"), tmp_path)
    assert [what for what, _ in unmet(only)] == ["wrong"]


def test_a_failed_probe_fails_its_key_and_a_failed_case_without_params_fails_all(tmp_path: Path) -> None:
    probe = "cases/test_x.py::TestX::test_probe[h200-ep02-normal-bf16-deepseek_v3-slots]"
    entry = {"code": "probe", "reason": "slot 3", "diagnosis": "", "evidence": {}}
    file = ResultFile().timed(1)
    file.section["failed"] = [{"case": probe, "params": params(8), **entry}]
    path = str(file.write(tmp_path / "a.json"))
    found = judged(expectation("tokens = 1", "max_us = 99"), path, tmp_path)
    assert unmet(found) == [("wrong", "probe slots: slot 3 (a.json)")]
    zipf = judged(expectation('routing = "zipf:1"', "max_us = 99"), path, tmp_path)
    assert [what for what, _ in unmet(zipf)] == ["wrong", "missing"]
    other = judged(expectation("ep_size = 4", "max_us = 99"), path, tmp_path)
    assert [what for what, _ in unmet(other)] == ["missing"]
    file.section["failed"] = [{"case": "old[x]", **entry}]
    path = str(file.write(tmp_path / "b.json"))
    assert unmet(judged(expectation("max_us = 99"), path, tmp_path)) == [("wrong", "old[x]: slot 3 (b.json)")]


def test_rows_by_another_clock_are_another_quantity(tmp_path: Path) -> None:
    ResultFile(clock="event").timed(1).write(tmp_path / "a.json")
    found = judged(expectation("max_us = 99"), str(tmp_path / "a.json"), tmp_path)
    assert unmet(found) == [("other clock", "uniform T=1 combine: timed by event, expected by graph")]


def test_several_sides_are_judged_one_by_one_and_json_has_every_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, slow = launches(tmp_path / "good", 1), launches(tmp_path / "slow", 1.2)
    assert qualify(written(tmp_path, good), [good, slow], "json") == 1
    said = json.loads(capsys.readouterr().out)
    assert said["met"] is False
    assert [(side["side"], len(side["findings"])) for side in said["sides"]] == [("good", 18), ("slow", 18)]
    over = [finding for finding in said["sides"][1]["findings"] if finding["what"] == "over"]
    assert [finding["limit"] for finding in over] == ["max_us"] * 3
    assert over[0]["value"] == pytest.approx(24)


def test_markdown_is_a_table_of_what_is_not_met(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, slow = launches(tmp_path / "good", 1), launches(tmp_path / "slow", 1.2)
    qualify(written(tmp_path, good), [good, slow], "markdown")
    lines = capsys.readouterr().out.splitlines()
    assert [line.replace("\\", "") for line in lines if line.startswith("###")] == [
        f"### {name} (1 launch) against {tmp_path / 'rack.toml'}" for name in ("good", "slow")
    ]
    assert len([line for line in lines if line.startswith("| over | flashinfer\\_ep h200 EP2")]) == 3
    assert {line.count("|") for line in lines if line.startswith("|")} == {4}


def test_the_header_says_how_the_file_was_made(tmp_path: Path) -> None:
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    ResultFile().timed(1).write(first)
    ResultFile(software={"torch": "2.12\n[[cell]]"}).timed(1).write(second)
    text = io.StringIO()
    expect.write([*load_side(str(first)).launches, *load_side(str(second)).launches], 3.5, text)
    header = text.getvalue().partition("\n\n")[0].splitlines()
    assert all(line.startswith("# ") for line in header)
    assert f"# Made with: pytest-ep expect --margin 3.5% {first} {second}" in header
    assert [line for line in header if line.startswith(("# machine", "# software"))] == [
        "# machine: 2 x None a host (sku h200), driver 580.1",
        "# software: torch 2.11.0, nccl 2.28.9, flashinfer_ep (flashinfer-python 0.6.15.post1)",
        "# software: torch 2.12 [[cell]], flashinfer_ep (flashinfer-python 0.6.15.post1)",
    ]


def test_names_that_toml_must_quote_come_back_as_they_were(tmp_path: Path) -> None:
    odd = params(1, routing='a "b"\\c\n\x7f\u00e9', token_skew="linear")
    rack = str(ResultFile().timed(1, of=odd).write(tmp_path / "a.json"))
    (first, *_) = load(written(tmp_path, rack))
    assert first.selects["routing"] == (odd["routing"],)
    assert first.selects["token_skew"] == ("linear",)
    assert qualify(tmp_path / "rack.toml", [rack], "json") == 0


def test_a_rack_with_a_wrong_case_or_two_clocks_lets_one_expect_nothing(tmp_path: Path) -> None:
    wrong = str(ResultFile().timed(1).failed(2).write(tmp_path / "wrong.json"))
    with pytest.raises(ResultError, match=r"wrong\.json: .*T00002\] failed: make expectations from"):
        run(wrong)
    one = str(ResultFile().timed(1).write(tmp_path / "1.json"))
    other = str(ResultFile(clock="event").timed(1).write(tmp_path / "2.json"))
    with pytest.raises(ResultError, match="timed by event and graph, which are different quantities"):
        run(one, other)
    nothing = str(ResultFile().skipped(1).write(tmp_path / "3.json"))
    with pytest.raises(ResultError, match="no timed case"):
        run(nothing)


def test_a_refusal_leaves_no_file_and_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = str(ResultFile().timed(1).write(tmp_path / "1.json"))
    other = str(ResultFile(clock="event").timed(1).write(tmp_path / "2.json"))
    for output in (["-o", str(tmp_path / "rack.toml")], []):
        with pytest.raises(ResultError, match="timed by event and graph"):
            run(one, other, *output)
    assert not capsys.readouterr().out
    assert not (tmp_path / "rack.toml").exists()


def test_the_file_is_never_overwritten_and_a_margin_is_a_percentage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rack = launches(tmp_path / "good", 1)
    file = written(tmp_path, rack)
    with pytest.raises(ResultError, match=r"rack\.toml exists and is not overwritten"):
        run(rack, "-o", str(file))
    assert run(rack) == 0
    assert capsys.readouterr().out == file.read_text()
    for margin in ("5 apples", "-1", "inf"):
        with pytest.raises(SystemExit):
            run(rack, f"--margin={margin}")


def test_a_real_rack_meets_its_own_expectations_without_numpy_and_torch(tmp_path: Path) -> None:
    folder = next(path for path in sorted((ROOT / "ci/baselines").rglob("*")) if list(path.glob("*.json")))
    program = (
        "import sys; from pathlib import Path; from pytest_ep.results import expect, qualify, sides\n"
        f"folder, file = {str(folder)!r}, Path({str(tmp_path / 'rack.toml')!r})\n"
        "with file.open('w') as out: expect.write(sides.load_side(folder).launches, 5, out)\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
        "sys.exit(qualify.qualify(file, [folder], 'text'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n  met: " in done.stdout
