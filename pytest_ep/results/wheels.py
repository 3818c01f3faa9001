"""The environments of a sweep: one for each version of a package, upon the packages of this environment.

Torch and all else that is here is not installed again. A version's environment has that version and what it
needs that is not here, before everything of this environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import site
import subprocess
import sys
import venv
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from pytest_ep.results import witness
from pytest_ep.results.sides import ResultError
from pytest_ep.results.witness import UNDER_TEST
from pytest_ep.results.witness import site_packages

KEPT = "torch"
"""What no version may replace: figures of two torches are no comparison of wheels."""
NO_DEPS = "--no-deps"
_MOST = 400


class SweepError(ResultError):
    """What keeps a sweep from its end; one line that says what, where and what to do."""


@dataclass(frozen=True, slots=True)
class Wheels:
    """The versions of one distribution, the reference first."""

    package: str
    versions: tuple[str, ...]


def parse_wheels(text: str) -> Wheels:
    """Parse ``NAME==V1,V2``. Raises argparse.ArgumentTypeError."""
    package, _, listed = text.partition("==")
    versions = tuple(version.strip() for version in listed.split(","))
    other = argparse.ArgumentTypeError(f"{text!r} is not NAME==VERSION,VERSION")
    try:
        named = Requirement(package)
        different = len(set(map(Version, versions)))
    except ValueError:
        raise other from None
    if named.specifier or named.url or named.marker:
        raise other
    if not 1 < len(versions) == different:
        raise argparse.ArgumentTypeError(f"{text!r} does not name two versions or more, each once")
    return Wheels(package.strip(), versions)


@dataclass(frozen=True, slots=True)
class Environment:
    """Where one version of ``package``, a name with or without [extras], is or will be."""

    folder: Path
    package: str
    version: str

    @property
    def name(self) -> str:
        """The distribution."""
        return Requirement(self.package).name

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        """Its own packages, which come before those of this environment."""
        return site_packages(self.folder)

    @property
    def requirement(self) -> str:
        """What is installed."""
        return f"{self.package}=={self.version}"

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a process in it."""
        return {
            **os.environ,
            "VIRTUAL_ENV": str(self.folder),
            "PATH": os.pathsep.join((str(self.python.parent), os.environ.get("PATH", os.defpath))),
            UNDER_TEST: self.name,
        }

    def refusal(self, evidence: Mapping[str, Any]) -> str:
        """Return why what a process in it found or imported, as ``witness`` says it, is not this version."""
        for folder in evidence["folders"]:
            if not Path(folder).is_relative_to(self.folder):
                return f"{self.name} {evidence['version']} comes from {folder}, not from {self.packages}"
        if evidence["version"] not in SpecifierSet(f"=={self.version}"):
            return f"{self.name} is {evidence['version']}, not {self.version}"
        return ""


def prepare(environment: Environment, options: Sequence[str]) -> bool:
    """Make an environment, or take the one that is there; return whether it was there.

    ``options`` go to the installer. With any it is made anew, as files that they lead to may have changed.
    Raises SweepError where it cannot be made, or where another version would be imported in it.
    """
    made_from = environment.folder / "made-from.json"
    facts = [environment.requirement, list(options), sys.version, sys.prefix, _here()]
    there = not options and _recorded(made_from) == facts
    if not there:
        _create(environment)
        _install(environment, [environment.requirement], _anew(options))
    _refuse_another(environment)
    if NO_DEPS not in options:
        _complete(environment, options)
    made_from.write_text(json.dumps(facts))
    return there


def _recorded(file: Path) -> object:
    """Return the facts in a file; None without one, and where an interrupt cut it short."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def _here() -> list[str]:
    """Where the packages of this environment are, but for PYTHONPATH, which every process inherits."""
    return site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])


def _create(environment: Environment) -> None:
    folder = environment.folder
    if folder.exists() and not (folder / "pyvenv.cfg").exists():
        raise SweepError(f"{folder} is there and is no environment: name another folder with --dir")
    venv.EnvBuilder(clear=True, symlinks=True).create(folder)
    # A path alone would leave out what the .pth files in there do, such as an editable installation.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in _here()]
    (environment.packages / "inherited.pth").write_text("".join(lines))


def _anew(options: Sequence[str]) -> list[str]:
    """Have pip install what is here already, in this environment or on PYTHONPATH; uv does not look there."""
    return [*options, *([] if shutil.which("uv") else ["--ignore-installed"])]


def _install(environment: Environment, wanted: Sequence[str], options: Sequence[str]) -> None:
    if uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--python", str(environment.python)]
    elif importlib.util.find_spec("pip"):  # which the new environment sees, too
        command = [str(environment.python), "-m", "pip", "install"]
    else:
        raise SweepError("neither uv nor pip is here: install one of them into this environment")
    given = [option for option in options if option != NO_DEPS]
    done = subprocess.run(
        [*command, NO_DEPS, *given, *wanted],
        env=environment.variables(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SweepError(f"{' '.join(wanted)} cannot be installed: {_said(done.stdout)}")


def _said(output: str) -> str:
    """An installer's reason in one line: pip's first error, which is one, or all from uv's on."""
    lines = [line.strip() for line in output.splitlines()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    whole = " ".join(" ".join(lines).split())
    text = errors[0] if errors else whole.partition("error: ")[2] or whole
    return text if len(text) <= _MOST else f"{text[:_MOST]} ..."


def _complete(environment: Environment, options: Sequence[str]) -> None:
    """Install what the version needs that is not here, and what that needs."""
    tried: set[str] = set()
    while missing := {str(need): whose for need, whose in _unmet(environment)}:
        for need, whose in missing.items():
            name = canonicalize_name(Requirement(need).name)
            has = f"{name} {_version(name, _path(environment))}"
            if name == KEPT:
                raise SweepError(
                    f"{whose} needs {need}, and a sweep keeps {has}: install another one here first"
                )
            if need in tried:
                raise SweepError(f"{whose} needs {need}, and finds {has}, of PYTHONPATH or for another need")
        tried |= missing.keys()
        try:
            _install(environment, list(missing), options)
        except SweepError as error:
            raise SweepError(f"{error}; with {NO_DEPS} in --pip-args a sweep does without") from None


def _path(environment: Environment) -> list[str]:
    """Where a process in the environment looks for packages, in order."""
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return [*inherited, str(environment.packages), *sys.path]


def _unmet(environment: Environment) -> Iterator[tuple[Requirement, str]]:
    """Yield each need that is not met, and whose it is: of the version, and of what was installed with it.

    What was here before is taken to have what it needs, but for extras of it that are asked for.
    """
    own = [str(environment.packages)]
    path = _path(environment)
    ahead = [Requirement(environment.requirement)]
    for asked in ahead:
        distribution = _first(asked.name, path)
        for need in map(Requirement, (distribution.requires if distribution else None) or ()):
            extras = ("", *asked.extras)
            if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in extras):
                continue
            need.marker = None
            version = _version(need.name, path)
            if version is None or not need.specifier.contains(version, prereleases=True):
                yield need, f"{asked.name} {_version(asked.name, path)}"
            elif need not in ahead and (need.extras or _first(need.name, own)):
                ahead.append(need)


def _version(name: str, path: Sequence[str]) -> str | None:
    distribution = _first(name, path)
    return distribution.version if distribution else None


def _first(name: str, path: Sequence[str]) -> metadata.Distribution | None:
    """The distribution that an import on ``path`` would take."""
    return next(iter(metadata.distributions(name=name, path=list(path))), None)


def _refuse_another(environment: Environment) -> None:
    """Raise SweepError where a process in the environment would import another version, or another copy."""
    done = subprocess.run(
        [environment.python, "-m", witness.__name__, environment.name],
        env=environment.variables(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SweepError(f"{environment.python} cannot look for {environment.name}: {_said(done.stderr)}")
    if refusal := environment.refusal(json.loads(done.stdout)):
        raise SweepError(f"{refusal}: take the other off PYTHONPATH, or start in another folder")
