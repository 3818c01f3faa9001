"""``pytest-ep sweep``: two versions of a small transport, on a CPU and without a package index."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_ep.results import cli
from pytest_ep.results import sweep
from pytest_ep.results import wheels
from pytest_ep.results import witness
from pytest_ep.results.wheels import Environment
from pytest_ep.results.wheels import Wheels
from pytest_ep.results.wheels import parse_wheels

SUITE = """
import time

import smalltransport

from pytest_ep import EPSuite
from pytest_ep.backends.torch_a2a import TorchA2A


class Small(TorchA2A):
    name = "small"

    def dispatch(self, problem):
        time.sleep(smalltransport.PAUSE)
        return super().dispatch(problem)


class TestSmall(EPSuite):
    backend = Small
"""
CASES = ("cases", "-k", "test_case", "-p", "no:cacheprovider", "--ep-shape=hidden=64,experts=16,top_k=4")
FEW = ("--ep-size=1", "--ep-tokens=8", "--ep-precision=bf16", "--ep-iterations=16")
BOTH = "smalltransport==1.0,2.0"


def write_wheel(folder: Path, name: str, version: str, source: str = "", needs: Sequence[str] = ()) -> None:
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": source,
        f"{info}/METADATA": "\n".join(
            ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
            + [f"Requires-Dist: {need}" for need in needs]
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{info}/RECORD"
    files[record] = "".join(f"{path},,\n" for path in (*files, record))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheels, and with the environments that the tests share."""
    folder = tmp_path_factory.mktemp("shelf")
    for version, pause in (("1.0", 0.005), ("2.0", 0.06)):
        write_wheel(folder, "smalltransport", version, f"PAUSE = {pause}\n")
    write_wheel(folder, "smalltransport", "3.0", needs=["numpy", "torch>=99"])
    write_wheel(folder, "smalltransport", "4.0", needs=["needed[more]>=1", "absent; extra == 'not-asked'"])
    write_wheel(folder, "smalltransport", "5.0", needs=["absent"])
    write_wheel(folder, "smalltransport", "6.0", needs=["present[more]"])
    write_wheel(folder, "needed", "1.0", needs=["further; extra == 'more'", "torch"])
    write_wheel(folder, "further", "1.0")
    return folder


@pytest.fixture
def here(tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; installers know the wheels of the shelf alone."""
    monkeypatch.chdir(tmp_path)
    for installer in ("PIP", "UV"):
        monkeypatch.setenv(f"{installer}_NO_INDEX", "1")
        monkeypatch.setenv(f"{installer}_FIND_LINKS", str(shelf))
    return tmp_path


def swept(shelf: Path, versions: str, *arguments: str) -> int:
    made = os.path.relpath(shelf / "made")
    return cli.main(["sweep", "--wheels", versions, "--dir", made, "--output=out", *arguments])


def launching(script: str) -> str:
    """--launch of a script in place of pytest; ``version``, ``evidence`` and ``result`` are there for it."""
    Path("instead.py").write_text(
        "import json, os, pathlib, sys\n"
        "from importlib import metadata\n"
        "version = metadata.version('smalltransport')\n"
        "evidence = {'version': version, 'folders': [f'{sys.prefix}/lib']}\n"
        "result = pathlib.Path(sys.argv[-1].partition('=')[2])\n"
        "def write(**sections):\n"
        "    case = {'outcome': 'timed'}\n"
        "    whole = {'benchmarks': [1, 2, 3], 'pytest_ep': {'cases': [case], 'failed': [], 'not_run': []}}\n"
        "    whole['pytest_ep_sweep'] = evidence\n"
        "    result.write_text(json.dumps({**whole, **sections}))\n" + script
    )
    return "--launch={python} instead.py"


def test_the_slower_of_two_versions_is_found(
    here: Path, shelf: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (here / "cases").mkdir()
    (here / "cases" / "test_small.py").write_text(SUITE)
    code = swept(shelf, BOTH, "--launches=1", "--", *CASES, *FEW)
    printed = capfd.readouterr()
    assert code == 1, printed
    lines = printed.out.splitlines()
    assert [line.partition(": ")[0] for line in lines[:2]] == [
        "environment of smalltransport 1.0",
        "environment of smalltransport 2.0",
    ]
    assert "2.0 (1 launch) against 1.0 (1 launch)" in printed.out
    cli.main(["compare", "out/1.0", "out/2.0", "--format=json"])
    (comparison,) = json.loads(capfd.readouterr().out)["comparisons"]
    words = {row["component"]: row["word"] for row in comparison["rows"]}
    assert (words["dispatch"], words["roundtrip"]) == ("slower", "slower")
    files = sorted(str(path.relative_to(here)) for path in (here / "out").rglob("*.json"))
    assert files == ["out/1.0/1.json", "out/2.0/1.json"]
    for file in files:
        said = json.loads(Path(file).read_text())[witness.SECTION]
        version = file.split("/")[1]
        assert said["version"] == version
        assert said["folders"] == [
            str(witness.site_packages(shelf / "made" / f"smalltransport-{version}")),
        ]
        assert "1 passed" in Path(file).with_suffix(".log").read_text()


@pytest.mark.parametrize("found", ["1.0", "2.0"])
def test_another_copy_on_pythonpath_is_refused_before_any_launch(
    here: Path,
    shelf: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    found: str,
) -> None:
    zipfile.ZipFile(next(shelf.glob(f"smalltransport-{found}-*"))).extractall(here / "other")
    monkeypatch.setenv("PYTHONPATH", str(here / "other"), prepend=os.pathsep)
    assert swept(shelf, "smalltransport==2.0,1.0", "--", "cases") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"smalltransport {found} comes from {here / 'other'}, not from " in line
    assert not (here / "out").exists()


def test_a_checkout_that_only_pytest_puts_first_is_refused_after_its_launch(
    here: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zipfile.ZipFile(next(shelf.glob("smalltransport-1.0-*"))).extract(
        "smalltransport/__init__.py", here / "src"
    )
    (here / "pytest.ini").write_text("[pytest]\npythonpath = src\n")
    (here / "test_plain.py").write_text(
        "import smalltransport\ndef test_plain(benchmark):\n    benchmark(lambda: smalltransport.PAUSE)\n"
    )
    assert swept(shelf, BOTH, "--", "test_plain.py") == 2
    error = capsys.readouterr().err.splitlines()
    assert error[0] == "no launch is complete"
    assert f"in the run smalltransport 1.0 comes from {here / 'src'}, not from " in error[1]
    assert [path.name for path in (here / "out" / "1.0").glob("1.json*")] == ["1.json.set-aside"]


def test_an_unknown_version_is_one_line_of_the_installer(
    here: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swept(shelf, "smalltransport==1.0,9.9", "--", "cases") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pytest-ep: smalltransport==9.9 cannot be installed: ")
    assert not (here / "out").exists()


def test_a_version_that_wants_another_torch_is_refused(
    here: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swept(shelf, "smalltransport==3.0,1.0", "--", "cases") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "smalltransport 3.0 needs torch>=99, and a sweep keeps torch " in line


def test_what_a_version_needs_is_installed_with_it_and_what_is_here_is_not(here: Path, shelf: Path) -> None:
    environment = Environment(shelf / "made" / "smalltransport-4.0", "smalltransport", "4.0")
    assert not wheels.prepare(environment, [])
    found = {path.stem.partition("-")[0] for path in environment.packages.glob("*.dist-info")}
    assert found == {"smalltransport", "needed", "further"}


def test_a_need_that_pythonpath_keeps_from_being_met_is_named(
    here: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(here, "needed", "0.5")
    monkeypatch.setenv("PYTHONPATH", str(here / "needed-0.5-py3-none-any.whl"), prepend=os.pathsep)
    environment = Environment(here / "made", "smalltransport", "4.0")
    with pytest.raises(
        wheels.SweepError, match=r"smalltransport 4.0 needs needed\[more\]>=1, .* needed 0.5,"
    ):
        wheels.prepare(environment, [])


def test_extras_of_what_is_here_are_installed(
    here: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(here, "present", "1.0", needs=["further; extra == 'more'"])
    monkeypatch.setenv("PYTHONPATH", str(here / "present-1.0-py3-none-any.whl"), prepend=os.pathsep)
    environment = Environment(here / "made", "smalltransport", "6.0")
    wheels.prepare(environment, [])
    found = {path.stem.partition("-")[0] for path in environment.packages.glob("*.dist-info")}
    assert found == {"smalltransport", "further"}


def test_what_cannot_be_had_can_be_done_without(
    here: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swept(shelf, "smalltransport==5.0,1.0", "--", "cases") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pytest-ep: absent cannot be installed: ")
    assert line.endswith("; with --no-deps in --pip-args a sweep does without")


def test_an_environment_is_used_again_while_it_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in ("_create", "_install", "_refuse_another", "_complete"):
        monkeypatch.setattr(wheels, step, lambda *_: None)
    environment = Environment(tmp_path, "smalltransport", "4.0")
    assert not wheels.prepare(environment, [])
    assert wheels.prepare(environment, [])
    assert not wheels.prepare(environment, ["--no-index"]), "the files that were installed may have changed"
    right = Environment(tmp_path, "smalltransport", "2.0")
    assert not wheels.prepare(right, []), "it holds another version"
    assert wheels.prepare(right, [])


@pytest.mark.parametrize("left", [b"", b'["smalltransport==2.0", [', b"\xff"])
def test_an_environment_whose_making_was_cut_short_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bytes
) -> None:
    made: list[Environment] = []
    monkeypatch.setattr(wheels, "_create", made.append)
    for step in ("_install", "_refuse_another", "_complete"):
        monkeypatch.setattr(wheels, step, lambda *_: None)
    environment = Environment(tmp_path, "smalltransport", "2.0")
    (tmp_path / "made-from.json").write_bytes(left)
    assert not wheels.prepare(environment, [])
    assert made == [environment]
    assert wheels.prepare(environment, [])


def test_a_folder_above_the_current_one_can_hold_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python leaves ".." out of what it names, so with it every package would come from elsewhere."""
    given: list[tuple[Path, Sequence[str]]] = []

    def prepare(environment: Environment, options: Sequence[str]) -> bool:
        given.append((environment.folder, options))
        return True

    monkeypatch.setattr(sweep, "prepare", prepare)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    sweep._environments(Wheels("small", ("1", "2")), Path("../envs"), ["--no-index"])
    assert given == [(tmp_path / "envs" / f"small-{version}", ["--no-index"]) for version in "12"]


def test_uv_installs_where_it_is_there_and_what_a_version_needs_can_be_left_out(
    here: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "bin").mkdir()
    uv = here / "bin" / "uv"
    uv.write_text(
        '#!/bin/sh\necho "$@" >said\n[ "$3" = --python ] || exit 1\n'
        'python="$4"; pip="$1 $2"; shift 4\nexec "$python" -m $pip "$@"\n'
    )
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(uv.parent), prepend=os.pathsep)
    environment = Environment(here / "made", "smalltransport", "5.0")
    wheels.prepare(environment, [wheels.NO_DEPS, "--find-links", "."])
    said = (here / "said").read_text()
    python = environment.python
    assert said == f"pip install --python {python} --no-deps --find-links . smalltransport==5.0\n"


def test_a_folder_that_is_no_environment_is_left_alone(here: Path) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "notes").touch()
    with pytest.raises(wheels.SweepError, match="is no environment"):
        wheels.prepare(Environment(here / "mine", "smalltransport", "1.0"), [])
    assert (here / "mine" / "notes").exists()


def test_a_crash_stops_with_the_end_of_its_log_and_keeps_what_there_is(
    here: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = launching(
        "if version == '2.0' and result.name == '2.json':\n"
        "    print('the last words')\n"
        "    sys.exit(3)\n"
        "write()\n"
    )
    assert swept(shelf, BOTH, launch, "--", "cases") == 2
    printed = capsys.readouterr()
    launches = [line for line in printed.out.splitlines() if line.startswith("launch ")]
    assert [re.sub(r"\d+ s\b", "TIME", line) for line in launches] == [
        "launch 1 of 6: smalltransport 1.0: 1 timed in TIME",
        "launch 2 of 6: smalltransport 2.0, about TIME left: 1 timed in TIME",
        "launch 3 of 6: smalltransport 1.0, about TIME left: 1 timed in TIME",
        "launch 4 of 6: smalltransport 2.0, about TIME left",
    ]
    assert printed.err.splitlines()[-3:] == [
        "the last words",
        "complete launches: 2 of 1.0, 1 of 2.0; to compare them: pytest-ep compare out/1.0 out/2.0",
        "pytest-ep: smalltransport==2.0: a launch ended with exit code 3 and no result file:"
        " see out/2.0/2.log",
    ]
    assert (here / "out" / "2.0" / "2.log").read_text().splitlines()[-1] == "the last words"


@pytest.mark.parametrize(
    ("code", "change", "said"),
    [
        (4, {}, "exit code 4: see "),
        (0, {witness.SECTION: {"version": "1.0", "folders": []}}, "no case imported smalltransport"),
        (1, {witness.SECTION: {"version": "1.5", "folders": []}}, "smalltransport is 1.5, not 1.0"),
        (0, {witness.SECTION: {"version": "1.0", "folders": ["/src"]}}, "1.0 comes from /src, not from "),
        (0, {"pytest_ep": None}, "choose cases of an EPSuite"),
        (1, {"pytest_ep": {"not_run": [{}, {}]}}, "a launch ended before 2 of its cases: see "),
    ],
)
def test_a_launch_that_says_nothing_of_its_version_is_refused(
    tmp_path: Path, code: int, change: dict[str, Any], said: str
) -> None:
    environment = Environment(tmp_path / "made", "smalltransport", "1.0")
    evidence = {"version": "1.0", "folders": [str(environment.packages)]}
    result, log = tmp_path / "1.json", tmp_path / "1.log"
    log.touch()
    content = {witness.SECTION: evidence, "benchmarks": [{}], "pytest_ep": {"not_run": []}}
    result.write_text(json.dumps(content))
    assert sweep._checked(environment, result, log, 0) == content
    result.write_text(json.dumps({name: value for name, value in {**content, **change}.items() if value}))
    with pytest.raises(wheels.SweepError, match=re.escape(said)):
        sweep._checked(environment, result, log, code)


@pytest.mark.parametrize("text", ["", '{"benchmarks": [', "[]", '{"benchmarks": []}'])
def test_an_incomplete_result_file_stops_as_a_crash_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """As a launcher leaves it that ends with 1 whatever became of its ranks."""
    crash = f"echo the last words; printf %s '{text}' >${{3#*=}}; exit 1"
    environment = Environment(tmp_path / "made", "smalltransport", "1.0")
    stopped = sweep.Sweep([environment], tmp_path / "out", ["sh", "-c", crash, "sh"], [])
    log = tmp_path / "out" / "1.0" / "1.log"
    said = f"smalltransport==1.0: a launch ended with exit code 1 and an incomplete result file: see {log}"
    with pytest.raises(wheels.SweepError, match=f"^{re.escape(said)}$"):
        stopped.run(1)
    assert capsys.readouterr().err.splitlines()[-1] == "the last words"
    assert stopped.kept() == "no launch is complete"
    assert sorted(path.name for path in log.parent.iterdir()) == ["1.json.set-aside", "1.log"]


def test_wrong_results_are_part_of_the_comparison(
    here: Path, shelf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = launching(
        "write(pytest_ep={'cases': [], 'failed': [{}], 'not_run': []}, benchmarks=[]); sys.exit(1)"
    )
    asked: list[Sequence[str] | None] = []

    def compared(arguments: Sequence[str] | None) -> int:
        asked.append(arguments)
        return 1

    main = cli.main
    monkeypatch.setattr(cli, "main", compared)
    common = ["--dir", str(shelf / "made"), "--output=out", "--launches=1", launch]
    assert main(["sweep", "--wheels", BOTH, *common, "--", "cases"]) == 1
    assert asked == [["compare", "out/1.0", "out/2.0"]]
    assert (
        "launch 2 of 2: smalltransport 2.0, about 1 s left: 0 timed, 1 failed in 1 s"
        in capsys.readouterr().out
    )


def test_an_interrupt_waits_for_the_launch_and_says_what_there_is(here: Path, shelf: Path) -> None:
    launch = launching(
        "import time\n"
        "if version == '2.0':\n"
        "    try:\n"
        "        print('ready', file=open('ready', 'w'))\n"
        "        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        pass\n"
        "write()\n"
        "sys.exit(2 if version == '2.0' else 0)\n"
    )
    arguments = [
        "sweep",
        "--wheels",
        BOTH,
        "--dir",
        str(shelf / "made"),
        "--output=out",
        launch,
        "--",
        "cases",
    ]
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pytest_ep.results.cli import main; sys.exit(main())",
            *arguments,
        ],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while process.poll() is None and not (here / "ready").exists():
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=30)
    finally:
        process.kill()
    assert error.splitlines() == ["complete launches: 1 of 1.0", "pytest-ep: interrupted"]
    assert process.returncode == 2
    assert [path.name for path in (here / "out" / "2.0").glob("*.json*")] == ["1.json.set-aside"]


def test_a_launcher_that_is_not_there_is_named(
    here: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swept(shelf, BOTH, "--launch=no-srun {python} -m pytest", "--", "cases") == 2
    kept, line = capsys.readouterr().err.splitlines()
    assert kept == "no launch is complete"
    assert "no-srun" in line


def test_results_are_not_written_over(here: Path, shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "out").mkdir()
    assert swept(shelf, BOTH, "--", "cases") == 2
    assert "out exists" in capsys.readouterr().err


def test_a_launch_is_given_what_follows_the_dashes(here: Path) -> None:
    parser = argparse.ArgumentParser()
    sweep.add_parser(parser.add_subparsers())
    given = ["--pip-args=--no-index --find-links 'a b'", "--", "cases", "-k", "a or b", "--ep-nproc", "2"]
    chosen = parser.parse_args(["sweep", "--wheels", BOTH, *given])
    assert chosen.pip_args == ["--no-index", "--find-links", "a b"]
    assert chosen.arguments == ["cases", "-k", "a or b", "--ep-nproc", "2"]
    assert chosen.launch == ["{python}", "-m", "pytest"]


@pytest.mark.parametrize(
    "wrong",
    [
        ("--wheels", "small==1.0"),
        ("--wheels", "small==1.0,1.0.0"),
        ("--wheels", "small==1.0,2.*"),
        ("--wheels", "small"),
        ("--wheels", "small>=1==1.0,2.0"),
        ("--wheels", "small @ https://a.example/b.whl==1.0,2.0"),
        ("--wheels", "small; python_version>'3'==1.0,2.0"),
        ("--launches", "0"),
        ("--launch", "srun python"),
    ],
)
def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str], wrong: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["sweep", "--wheels", BOTH, *wrong, "--", "cases"])
    assert ended.value.code == 2
    assert f"argument {wrong[0]}: {wrong[1]!r}" in capsys.readouterr().err


def test_a_result_file_of_pytests_arguments_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["sweep", "--wheels", BOTH, "--", "cases", "--benchmark-json=a.json"])
    assert "result file of its own" in capsys.readouterr().err


def test_versions_are_those_of_one_package_the_reference_first() -> None:
    assert parse_wheels("flashinfer-python==0.6.16.post4,0.6.15.post1") == Wheels(
        "flashinfer-python", ("0.6.16.post4", "0.6.15.post1")
    )


def test_the_time_left_follows_the_last_launch_of_each_version() -> None:
    pace = sweep.Pace()
    assert pace.left(["a", "b"]) == ""
    pace.last["a"] = 100
    assert pace.left(["b", "a"]) == ", about 3 min left"
    pace.last["b"] = 20
    assert pace.left(["b", "a", "b"]) == ", about 2 min left"
    assert pace.left(["b"]) == ", about 20 s left"
    assert pace.left(["a"] * 60) == ", about 1 h 40 min left"


def test_modules_are_told_from_the_files_of_a_distribution() -> None:
    names = ["a/__init__.py", "a/b.py", "a/c.abi3.so", "a/d.cu", "a-1.dist-info/x.py"]
    assert [witness._module(Path(name)) for name in names] == ["a", "a.b", "a.c", "", ""]
