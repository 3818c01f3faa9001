"""The options: what they mean, and the one line that each error is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_ep.matrix.machine import Machine
from pytest_ep.matrix.platforms import load
from pytest_ep.matrix.shapes import SHAPES
from pytest_ep.options import Options
from pytest_ep.options import parse_options
from pytest_ep.options import platforms_file

pytest_plugins = ["pytester"]

PLATFORMS = load(None)
CPU = Machine("cpu", 0, "cpu")
H200 = Machine("h200", 8, "NVIDIA H200")
A100 = Machine("a100_sxm4_80gb", 1, "NVIDIA A100-SXM4-80GB")

PLUGIN = """
from pytest_ep.options import add_options

def pytest_addoption(parser):
    add_options(parser)
"""


@pytest.fixture
def run_pytest(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    pytester.makepyfile(only_options=PLUGIN)

    def run(*args: str) -> pytest.RunResult:
        return pytester.runpytest_subprocess("-p", "no:ep", "-p", "only_options", *args)

    return run


@pytest.fixture
def configure(pytester: pytest.Pytester) -> Callable[..., pytest.Config]:
    pytester.makepyfile(only_options=PLUGIN)
    pytester.syspathinsert()

    def configured(*args: str) -> pytest.Config:
        return pytester.parseconfig("-p", "no:ep", "-p", "only_options", *args)

    return configured


@pytest.fixture
def parse(configure: Callable[..., pytest.Config]) -> Callable[..., Options]:
    def parsed(*args: str, machine: Machine = CPU, ranks: int = 1) -> Options:
        return parse_options(configure(*args), PLATFORMS, lambda: machine, ranks)

    return parsed


def test_without_options_everything_of_the_machine_is_selected(parse: Callable[..., Options]) -> None:
    options = parse()
    assert options.selection.sku == ""
    assert options.selection.ep_sizes is None
    assert options.selection.tokens is None
    assert options.selection.modes is None
    assert options.selection.precisions is None
    assert options.selection.shapes == (SHAPES["deepseek_v3"],)
    assert (options.exact, options.rank_timeout) == (False, 60.0)
    assert (options.allow_skips, options.iterations) == (False, None)
    assert (options.clocks, options.target_ci, options.time_budget) == (("auto",), 1.0, 2.0)
    assert (options.flush_l2, options.idle, options.profile) == (False, (), None)


def test_the_machine_is_not_looked_at_unless_a_value_needs_it(
    configure: Callable[..., pytest.Config],
) -> None:
    def machine() -> Machine:
        raise AssertionError("looked at")

    assert parse_options(configure("--ep-sku", "h200"), PLATFORMS, machine, 1).selection.sku == "h200"
    assert parse_options(configure("--ep-sku", "all"), PLATFORMS, machine, 1).selection.sku == "all"
    with pytest.raises(AssertionError, match="looked at"):
        parse_options(configure("--ep-size", "2"), PLATFORMS, machine, 1)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1,64", (1, 64)),
        ("64, 1", (1, 64)),
        ("1..8192", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)),
        ("3..9", (4, 8)),
        ("8..8", (8,)),
        ("7,100..200,65536", (7, 128, 65536)),
    ],
)
def test_tokens_are_lists_and_ranges(
    parse: Callable[..., Options], text: str, tokens: tuple[int, ...]
) -> None:
    assert parse("--ep-tokens", text).selection.tokens == tokens


def test_sizes_modes_precisions_models_and_shapes_select(parse: Callable[..., Options]) -> None:
    options = parse(
        "--ep-size=3,1..8",
        "--ep-mode=low_latency",
        "--ep-precision=fp8,bf16",
        "--ep-model=kimi_k2,deepseek_v3",
        "--ep-shape=hidden=4096,experts=128,top_k=8",
    )
    assert options.selection.ep_sizes == (1, 2, 3, 4, 8)
    assert options.selection.modes == ("low_latency",)
    assert options.selection.precisions == ("fp8", "bf16")
    names = [shape.name for shape in options.selection.shapes]
    assert names == ["kimi_k2", "deepseek_v3", "h4096e128k8"]


def test_all_models_and_a_shape_alone(parse: Callable[..., Options]) -> None:
    for text in ("all", " all"):
        assert parse(f"--ep-model={text}").selection.shapes == tuple(SHAPES.values())
    (shape,) = parse("--ep-shape=hidden=64,experts=4,top_k=2").selection.shapes
    assert (shape.name, shape.hidden, shape.experts, shape.top_k) == ("h64e4k2", 64, 4, 2)


def test_the_options_of_a_run(parse: Callable[..., Options]) -> None:
    options = parse(
        "--ep-exact",
        "--ep-rank-timeout=2.5",
        "--ep-allow-skips",
        "--ep-iterations=7",
        "--ep-clock=host",
    )
    assert (options.exact, options.rank_timeout, options.allow_skips) == (True, 2.5, True)
    assert (options.iterations, options.clocks) == (7, ("host",))


def test_the_options_of_timing(parse: Callable[..., Options], tmp_path: Path) -> None:
    options = parse(
        "--ep-clock=graph,event,kernel",
        "--ep-target-ci=0.5",
        "--ep-time-budget=500ms",
        "--ep-flush-l2",
        "--ep-idle=1ms,250us,2s",
        f"--ep-profile={tmp_path / 'new'}",
        machine=H200,
    )
    assert options.clocks == ("graph", "event", "kernel")
    assert (options.target_ci, options.time_budget, options.flush_l2) == (0.5, 0.5, True)
    assert (options.idle, options.profile) == (("1ms", "250us", "2s"), tmp_path / "new")
    folder = tmp_path / "new"
    assert parse(f"--ep-profile={folder}").profile == folder, "an empty folder will do"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--ep-clock=graph", "--ep-clock graph: this machine has no accelerator, use auto or host"),
        ("--ep-clock=host,kernel", "--ep-clock kernel: this machine has no accelerator, use auto or host"),
        ("--ep-flush-l2", "--ep-flush-l2: this machine has no accelerator, drop it"),
    ],
)
def test_what_needs_an_accelerator_is_refused_without_one(
    parse: Callable[..., Options], option: str, message: str
) -> None:
    with pytest.raises(pytest.UsageError) as raised:
        parse(option)
    assert str(raised.value) == message


def test_traces_are_not_mixed_with_what_is_in_a_folder(parse: Callable[..., Options], tmp_path: Path) -> None:
    (tmp_path / "trace.json").touch()
    for path in (tmp_path, tmp_path / "trace.json"):
        with pytest.raises(pytest.UsageError) as raised:
            parse(f"--ep-profile={path}")
        assert (
            str(raised.value) == f"--ep-profile {path}: is there already and not empty, name another folder"
        )


def test_the_folder_of_traces_is_made_at_once_unless_nothing_is_run(
    parse: Callable[..., Options], tmp_path: Path
) -> None:
    folder = tmp_path / "a" / "b"
    parse("--collect-only", f"--ep-profile={folder}")
    assert not folder.parent.exists()
    parse(f"--ep-profile={folder}")
    assert folder.is_dir()


def test_a_folder_of_traces_that_cannot_be_made_is_one_line(
    parse: Callable[..., Options], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for path, why in {
        "/proc/x": "No such file or directory",
        tmp_path / "file" / "x": "Not a directory",
        tmp_path / ("x" * 300): "File name too long",
    }.items():
        with pytest.raises(pytest.UsageError) as raised:
            parse(f"--ep-profile={path}")
        assert str(raised.value) == f"--ep-profile {path}: cannot be made, {why}: name another folder"


def test_the_platforms_file_is_a_path(configure: Callable[..., pytest.Config]) -> None:
    assert platforms_file(configure()) is None
    assert str(platforms_file(configure("--ep-platforms", "mine.toml"))) == "mine.toml"


def test_the_machines_own_sku_may_be_named_where_it_is_not_listed(parse: Callable[..., Options]) -> None:
    assert parse("--ep-sku", "a100_sxm4_80gb", machine=A100).selection.sku == "a100_sxm4_80gb"
    with pytest.raises(pytest.UsageError) as raised:
        parse("--ep-sku", "h300", machine=A100)
    text = str(raised.value)
    assert text.startswith("--ep-sku: no 'h300', known: h100, h200, b200,")
    assert text.endswith("cpu, a100_sxm4_80gb, all")


def test_an_ep_size_that_no_selected_sku_has_is_an_error(parse: Callable[..., Options]) -> None:
    with pytest.raises(pytest.UsageError) as raised:
        parse("--ep-size", "8,32", machine=H200, ranks=8)
    assert str(raised.value) == "--ep-size: no 32 on h200, known: 1, 2, 4, 8, 16"
    assert parse("--ep-size", "6", machine=H200, ranks=6).selection.ep_sizes == (6,)
    assert parse("--ep-size", "32", "--ep-sku", "gb300", machine=H200).selection.ep_sizes == (32,)
    assert parse("--ep-size", "3").selection.ep_sizes == (3,)
    assert parse("--ep-size", "3", machine=A100).selection.ep_sizes == (3,)


WRONG = [
    ("--ep-sku", "", "is empty, give a value or drop the option"),
    ("--ep-platforms", " ", "is empty, give a value or drop the option"),
    ("--ep-resume", "", "is empty, give a value or drop the option"),
    ("--ep-profile", "", "is empty, give a value or drop the option"),
    ("--ep-size", "0", "'0' is not a whole number from 1 to 1024"),
    ("--ep-size", "x", "'x' is not a whole number from 1 to 1024"),
    ("--ep-size", "2,2", "2 is given twice"),
    ("--ep-tokens", "0", "'0' is not a whole number from 1 to 65536"),
    ("--ep-tokens", "-1", "'-1' is not a whole number from 1 to 65536"),
    ("--ep-tokens", "65537", "'65537' is not a whole number from 1 to 65536"),
    ("--ep-tokens", "9" * 5000, f"'{'9' * 5000}' is not a whole number from 1 to 65536"),
    ("--ep-tokens", "", "'' is not a whole number from 1 to 65536"),
    ("--ep-tokens", "1,", "'' is not a whole number from 1 to 65536"),
    ("--ep-tokens", "4..1", "no power of two in 4..1"),
    ("--ep-tokens", "5..7", "no power of two in 5..7"),
    ("--ep-tokens", "1..", "'' is not a whole number from 1 to 65536"),
    ("--ep-tokens", "2,1..4", "2 is given twice"),
    ("--ep-mode", "fast", "no 'fast', known: normal, low_latency"),
    ("--ep-mode", "normal,normal", "normal is given twice"),
    ("--ep-precision", "fp4", "no 'fp4', known: bf16, fp8"),
    ("--ep-model", "gpt5", "no 'gpt5', known: deepseek_v3, deepseek_v4_pro, kimi_k2, qwen3_235b"),
    ("--ep-model", "all,mixtral_8x7b", "all means every model: name the models, or give all only"),
    ("--ep-shape", "hidden=4096", "experts and top_k missing"),
    ("--ep-nproc", "0", "'0' is not a whole number from 1 to 1024"),
    ("--ep-nproc", "two", "'two' is not a whole number from 1 to 1024"),
    ("--ep-rank-timeout", "0", "'0' is not a positive number of seconds"),
    ("--ep-rank-timeout", "nan", "'nan' is not a positive number of seconds"),
    ("--ep-rank-timeout", "1e300", "is more than 10000000 seconds"),
    ("--ep-case-timeout", "10000001", "is more than 10000000 seconds"),
    ("--ep-session-budget", "2778h", "is more than 10000000 seconds"),
    ("--ep-repeat", "1e300h", "is more than 10000000 seconds"),
    ("--ep-rank-timeout", "soon", "'soon' is not a positive number of seconds"),
    ("--ep-require", "flashinfer_ep and", "at column 18 expected not OR left parenthesis OR identifier; got"),
    ("--ep-require", "torch_a2a,mori_ep", "at column 10 expected end of input; got ,, give an expression as"),
    ("--ep-require", "torch_a2a(x=1)", "has a '=', which expressions as for -k do not"),
    ("--ep-require", " ", "is empty, give an expression as for -k, as 'flashinfer_ep and ep08'"),
    ("--ep-iterations", "0", "'0' is not a whole number from 1 to 1000000"),
    ("--ep-clock", "sundial", "no 'sundial', known: auto, host, event, graph, kernel"),
    ("--ep-clock", "auto,host", "auto chooses alone"),
    ("--ep-target-ci", "0", "'0' is not a positive number of percent"),
    ("--ep-time-budget", "2", "'2' is no duration: a number and us, ms, s, m or h"),
    ("--ep-time-budget", "2sm", "'2sm' is no duration"),
    ("--ep-time-budget", "0s", "'0' is not a positive number of seconds"),
    ("--ep-idle", "1.5ms", "'1.5ms' is no pause up to 10s: a whole number and us, ms or s"),
    ("--ep-idle", "11s", "'11s' is no pause up to 10s"),
    ("--ep-idle", "1ms,1ms", "1ms is given twice"),
]


@pytest.mark.parametrize(("option", "value", "message"), WRONG)
def test_a_wrong_value_is_one_line(
    configure: Callable[..., pytest.Config], option: str, value: str, message: str
) -> None:
    with pytest.raises(pytest.UsageError) as raised:
        configure(f"{option}={value}")
    assert str(raised.value).startswith(f"{option} {value}: {message}")
    assert "\n" not in str(raised.value)


def test_pytest_prints_the_line_and_exits_with_4(run_pytest: Callable[..., pytest.RunResult]) -> None:
    result = run_pytest("--ep-tokens=0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    errors = [line for line in result.errlines if line]
    assert errors == ["ERROR: --ep-tokens 0: '0' is not a whole number from 1 to 65536"]


def test_help_shows_every_option_in_one_group(run_pytest: Callable[..., pytest.RunResult]) -> None:
    result = run_pytest("--help")
    assert result.ret == 0
    text = result.stdout.str()
    assert "expert-parallel cases:" in text
    for option, *_ in WRONG:
        assert f"  {option}=" in text


def test_values_are_plain_so_that_xdist_can_send_them(configure: Callable[..., pytest.Config]) -> None:
    config = configure("--ep-shape=hidden=64,experts=4,top_k=2", "--ep-platforms=x", "--ep-size=1..4")
    values = [value for name, value in vars(config.option).items() if name.startswith("ep_")]
    assert len(values) > 15
    assert all(isinstance(value, (str, int, float, bool, tuple, type(None))) for value in values)
