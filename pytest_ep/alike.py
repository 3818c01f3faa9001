"""What the hosts of a run must have in common for its numbers to be of one machine."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from pytest_ep import __version__

if TYPE_CHECKING:
    from pytest_ep.matrix.machine import Machine

DISTRIBUTIONS = ("pytest", "pytest-benchmark", "torch", "numpy")
"""Beside them a transport's own ``versions`` are compared once it is constructed."""


def facts(machine: Machine) -> dict[str, str]:
    """Return GPU model, driver and versions of this rank's host."""
    said = {"GPU": machine.product, "driver": machine.driver or "none", "Python": platform.python_version()}
    return {**said, "pytest-ep": __version__, **{name: _installed(name) for name in DISTRIBUTIONS}}


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def difference(said: Sequence[Mapping[str, str]], ranks: Sequence[str]) -> str:
    """Say what the first rank that is not like rank 0 has instead, or ""; ``ranks`` is how each is called."""
    for rank, theirs in zip(ranks, said, strict=True):
        names = [name for name in {**said[0], **theirs} if theirs.get(name) != said[0].get(name)]
        if names:
            has = ", ".join(f"{name} {theirs.get(name)} against {said[0].get(name)}" for name in names)
            return f"{rank} and {ranks[0]} differ: {has}"
    return ""
