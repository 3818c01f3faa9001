"""Exit with one line where this interpreter lacks what pyproject.toml asks for."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def missing() -> list[str]:
    """Return every floor that is not met, as ``pytest-benchmark>=5.3.1 (5.2.3 here)``."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    python = platform.python_version()
    unmet = []
    if python not in SpecifierSet(project["requires-python"]):
        unmet.append(f"python{project['requires-python']} ({python} here)")
    for requirement in map(Requirement, project["dependencies"]):
        if requirement.marker and not requirement.marker.evaluate():
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            found = "none"
        if found == "none" or not requirement.specifier.contains(found, prereleases=True):
            unmet.append(f"{requirement} ({found} here)")
    return unmet


if unmet := missing():
    sys.exit(f"--here: this python3 lacks {', '.join(unmet)}; put them on PYTHONPATH, or drop --here")
