"""``pytest-ep sweep``: the same cases with two or more versions of a wheel, in turns, then compared."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from datetime import datetime
from pathlib import Path
from typing import Any
from typing import TypeAlias

from pytest_ep.results import witness
from pytest_ep.results.wheels import Environment
from pytest_ep.results.wheels import SweepError
from pytest_ep.results.wheels import Wheels
from pytest_ep.results.wheels import parse_wheels
from pytest_ep.results.wheels import prepare

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

PYTHON = "{python}"
LAUNCH = f"{PYTHON} -m pytest"
LAUNCHES = 3
ENVIRONMENTS = Path(".pytest_ep/sweep")
SET_ASIDE = ".set-aside"
"""What the name of a result file gains that is no launch to compare: cut short, or not of its version."""
_TAIL = 20


def add_parser(commands: Commands) -> None:
    """Add the subcommand."""
    sweep = commands.add_parser(
        "sweep",
        help="run cases with several versions of a wheel, and compare them",
        description="Run cases with several versions of a wheel in turns, each in an environment of its own,"
        " and compare them with the first.",
    )
    sweep.add_argument(
        "--wheels",
        type=parse_wheels,
        required=True,
        metavar="NAME==V1,V2",
        help="the versions; the first is the reference",
    )
    text = f"launches of each version ({LAUNCHES})"
    sweep.add_argument("--launches", type=_count, default=LAUNCHES, metavar="N", help=text)
    text = "a new folder for results and logs (runs/sweep-TIME)"
    sweep.add_argument("--output", type=Path, metavar="DIR", help=text)
    text = f"the folder of the environments ({ENVIRONMENTS})"
    sweep.add_argument("--dir", type=Path, default=ENVIRONMENTS, metavar="DIR", help=text)
    text = 'what the installer is given, as --pip-args="--no-index --find-links wheels"'
    sweep.add_argument("--pip-args", type=shlex.split, default=[], metavar="ARGS", help=text)
    text = f'how pytest is started ("{LAUNCH}"), for ranks on several hosts'
    sweep.add_argument("--launch", type=_launch, default=_launch(LAUNCH), metavar="COMMAND", help=text)
    text = "after --: pytest's arguments, as cases -k flashinfer_ep --ep-nproc 8"
    sweep.add_argument("arguments", nargs="+", type=_pytest_argument, metavar="CASES", help=text)
    sweep.set_defaults(run=_run)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of launches")
    return int(text)


def _launch(text: str) -> list[str]:
    if PYTHON not in text:
        raise argparse.ArgumentTypeError(f"{text!r} has no {PYTHON}, for the interpreter of each version")
    return shlex.split(text)


def _pytest_argument(text: str) -> str:
    if text.startswith("--benchmark-json"):
        raise argparse.ArgumentTypeError(f"{text}: each launch has a result file of its own, in --output")
    return text


def _run(chosen: argparse.Namespace) -> int:
    wheels: Wheels = chosen.wheels
    output = chosen.output or Path("runs") / f"sweep-{datetime.now():%Y-%m-%dT%H-%M-%S}"
    if output.exists():
        raise SweepError(f"{output} exists, and results are not overwritten: name a new folder with --output")
    try:
        environments = _environments(wheels, chosen.dir, chosen.pip_args)
    except KeyboardInterrupt:
        raise SweepError("interrupted before the first launch") from None
    sweep = Sweep(environments, output, chosen.launch, chosen.arguments)
    print(f"results and logs are in {output}", flush=True)
    try:
        sweep.run(chosen.launches)
    except (SweepError, OSError, KeyboardInterrupt) as error:
        print(sweep.kept(), file=sys.stderr)
        raise SweepError(str(error) or "interrupted") from None
    from pytest_ep.results.cli import main  # which imports this module

    return main(sweep.comparison())


def _environments(wheels: Wheels, folder: Path, options: Sequence[str]) -> list[Environment]:
    folder = Path(os.path.abspath(folder))  # as Python will name it: absolute() keeps ".."
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    made = []
    for version in wheels.versions:
        environment = Environment(folder / f"{wheels.package}-{version}", wheels.package, version)
        print(f"environment of {wheels.package} {version}", end="", flush=True)
        began = time.monotonic()
        try:
            there = prepare(environment, options)
        except BaseException:
            print(flush=True)
            raise
        print(f": {'there' if there else f'made in {time.monotonic() - began:.0f} s'}", flush=True)
        made.append(environment)
    return made


@dataclass(slots=True)
class Pace:
    """How long launches take: of each version, in seconds, as long as its last did."""

    last: dict[str, float] = field(default_factory=dict)

    def left(self, ahead: Sequence[str]) -> str:
        """Return how long launches of these versions will take, in words; empty before any was timed.

        A version that was not launched yet counts as the slowest that was.
        """
        if not self.last:
            return ""
        slowest = max(self.last.values())
        return f", about {_rounded(sum(self.last.get(version, slowest) for version in ahead))} left"


def _rounded(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@dataclass(slots=True)
class Sweep:
    """Launches in turns: the first of each version, then the second of each, and so on.

    ``launch`` are the words that start pytest, ``arguments`` what it is given.
    """

    environments: Sequence[Environment]
    output: Path
    launch: Sequence[str]
    arguments: Sequence[str]
    pace: Pace = field(default_factory=Pace)

    def run(self, launches: int) -> None:
        """Make all launches. Raises SweepError where one ends without a result, or with another version's."""
        order = [(number, environment) for number in range(launches) for environment in self.environments]
        for place, (number, environment) in enumerate(order):
            left = self.pace.left([other.version for _, other in order[place:]])
            what = f"{environment.package} {environment.version}"
            print(f"launch {place + 1} of {len(order)}: {what}{left}", end="", flush=True)
            began = time.monotonic()
            try:
                counts = self._once(environment, number + 1)
            except BaseException:
                print(flush=True)
                raise
            taken = self.pace.last[environment.version] = time.monotonic() - began
            print(f": {counts} in {_rounded(taken)}", flush=True)

    def folder(self, environment: Environment) -> Path:
        """Where the results of a version are."""
        return self.output / environment.version

    def comparison(self) -> list[str]:
        """Return the arguments of ``pytest-ep`` that compare what there is."""
        folders = [self.folder(environment) for environment in self.environments]
        return ["compare", *(str(folder) for folder in folders if any(folder.glob("*.json")))]

    def kept(self) -> str:
        """Say what a sweep that ended early leaves, and how to compare it."""
        counts = {one.version: len(list(self.folder(one).glob("*.json"))) for one in self.environments}
        there = ", ".join(f"{count} of {version}" for version, count in counts.items() if count)
        if not there:
            return "no launch is complete"
        compare = self.comparison()
        how = f"; to compare them: pytest-ep {shlex.join(compare)}" if len(compare) > 2 else ""
        return f"complete launches: {there}{how}"

    def _once(self, environment: Environment, number: int) -> str:
        result = self.folder(environment) / f"{number}.json"
        result.parent.mkdir(parents=True, exist_ok=True)
        log = result.with_suffix(".log")
        command = [word.replace(PYTHON, str(environment.python)) for word in self.launch]
        command += ["-p", witness.__name__, *self.arguments, f"--benchmark-json={result}"]
        try:
            return _counts(_checked(environment, result, log, _ended(command, environment, log)))
        except (SweepError, KeyboardInterrupt):
            if result.exists():
                result.rename(result.with_name(result.name + SET_ASIDE))
            raise


def _ended(command: Sequence[str], environment: Environment, log: Path) -> int:
    """Run a launch; return its exit code. An interrupt goes on only after the launch has ended."""
    interrupt: KeyboardInterrupt | None = None
    with log.open("x") as output:
        print(shlex.join(command), file=output, flush=True)
        process = subprocess.Popen(
            command,
            env=environment.variables(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        while process.poll() is None:
            try:
                process.wait()
            except KeyboardInterrupt as heard:  # the launch heard it too, and writes what it has
                if interrupt is None:
                    print(": interrupted, waiting for its end", end="", flush=True)
                interrupt = heard
    if interrupt:
        raise interrupt
    return process.returncode


def _checked(environment: Environment, result: Path, log: Path, code: int) -> dict[str, Any]:
    """Return the result of a launch that ended. Raises SweepError where it says nothing of its version."""
    if code not in (0, 1) or not result.exists():
        without = "" if result.exists() else " and no result file"
        raise _stopped(environment, log, f"a launch ended with exit code {code}{without}")
    content = _content(result)
    if content is None:
        what = f"a launch ended with exit code {code} and an incomplete result file"
        raise _stopped(environment, log, what)
    evidence = content[witness.SECTION]
    if refusal := environment.refusal(evidence):
        raise SweepError(f"{log}: in the run {refusal}: see what pytest's configuration puts on sys.path")
    if content["benchmarks"] and not evidence["folders"]:
        raise SweepError(f"{log}: no case imported {environment.name}: choose cases that use it")
    if "pytest_ep" not in content:
        raise SweepError(f"{log}: no case of expert parallelism: choose cases of an EPSuite")
    if left := content["pytest_ep"]["not_run"]:
        raise _stopped(environment, log, f"a launch ended before {len(left)} of its cases")
    return content


def _content(result: Path) -> dict[str, Any] | None:
    """Return a result; None where its file was opened and not, or not wholly, written."""
    try:
        content = json.loads(result.read_text())
    except ValueError:
        return None
    whole = isinstance(content, dict) and content.keys() >= {witness.SECTION, "benchmarks"}
    return content if whole else None


def _stopped(environment: Environment, log: Path, what: str) -> SweepError:
    """Show the end of a launch's log; return the error that names it."""
    print(*log.read_text(errors="replace").splitlines()[-_TAIL:], sep="\n", file=sys.stderr)
    return SweepError(f"{environment.requirement}: {what}: see {log}")


def _counts(content: dict[str, Any]) -> str:
    section = content["pytest_ep"]
    timed = sum(case["outcome"] == "timed" for case in section["cases"])
    failed = len(section["failed"])
    return f"{timed} timed{f', {failed} failed' if failed else ''}"
