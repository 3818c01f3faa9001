"""What a run imported: the pytest plugin that ``pytest-ep sweep`` adds to each launch.

An installed version is not always the one that is imported: a checkout in the current folder, PYTHONPATH or a
``pythonpath`` of pytest's configuration come first. So the run says itself, in its result file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from collections.abc import MutableMapping
from importlib import metadata
from importlib.machinery import all_suffixes
from pathlib import Path
from pathlib import PurePath
from typing import Any

import pytest

UNDER_TEST = "PYTEST_EP_UNDER_TEST"
"""The environment variable that names the distribution."""
SECTION = "pytest_ep_sweep"
"""The key of a result file: ``version`` of the distribution and ``folders`` that its modules came from."""


def site_packages(prefix: Path) -> Path:
    """Return where the environment at ``prefix``, of this Python's version, has its own packages."""
    return prefix / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(output_json: MutableMapping[str, Any]) -> None:
    """Say in the result file what was imported."""
    name = os.environ[UNDER_TEST]
    output_json[SECTION] = {"version": metadata.version(name), "folders": imported(_modules(name))}


def imported(names: Iterable[str]) -> list[str]:
    """Return the folders that hold those of the modules that are loaded, each as an entry of sys.path."""
    folders = set()
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            folders.add(str(_entry(name, file)))
    return sorted(folders)


def found(names: Iterable[str]) -> list[str]:
    """Return the folders that an import of those of the modules that have no parent would take them from."""
    folders = set()
    for name in names:
        spec = None if "." in name else importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            folders.add(str(_entry(name, spec.origin)))
    return sorted(folders)


def _modules(distribution: str) -> list[str]:
    """The modules that this environment's own copy of a distribution has."""
    own = metadata.distributions(name=distribution, path=[str(site_packages(Path(sys.prefix)))])
    files = [file for one in own for file in one.files or ()]
    return sorted({name for file in files if (name := _module(file))})


def _module(file: PurePath) -> str:
    """``a.b`` of a/b.py, a/b.cpython-311-x86_64-linux-gnu.so or a/b/__init__.py; else an empty text."""
    if not file.name.endswith(tuple(all_suffixes())):
        return ""
    parts = [*file.parts[:-1], file.name.partition(".")[0]]
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts) if all(part.isidentifier() for part in parts) else ""


def _entry(module: str, file: str) -> Path:
    path = Path(file)
    package = path.name.partition(".")[0] == "__init__"
    return path.parents[module.count(".") + package]


if __name__ == "__main__":
    named = sys.argv[1]
    json.dump({"version": metadata.version(named), "folders": found(_modules(named))}, sys.stdout)
