"""The command that repeats one case."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

    from pytest_ep.matrix.cells import Cell
    from pytest_ep.ranks.identity import Identity

FLAGS = ("--ep-exact", "--ep-poison", "--ep-flush-l2", "--ep-allow-skips")
"""Options of ours that take no value."""
NOT_REPEATED = (
    "--ep-allow-skips",
    "--ep-nproc",
    "--ep-profile",
    "--ep-require",
    "--ep-resume",
    "--ep-session-budget",
)
"""What concerns a whole run: which of its cases must, need not or no longer run, and a folder of its own."""


def repeating(config: pytest.Config, identity: Identity, cell: Cell, nodeid: str, largest: Cell) -> str:
    """Return the shell command that runs one case again, with the ``--ep-*`` options that were given.

    Where the transport was sized for a larger case, the ``largest`` is selected too: sizes matter.
    """
    place = nodeid.partition("::test_")[0]
    file, _, inside = place.partition("::")
    path = os.path.relpath(config.rootpath / file, config.invocation_params.dir)
    selected = cell.id if largest == cell else f"{cell.id} or {largest.id}"
    words = [*_launcher(identity), "-m", "pytest", f"{path}::{inside}" if inside else path]
    words += ["-k", selected, *_given(map(str, config.invocation_params.args))]
    return shlex.join(words)


def _launcher(identity: Identity) -> list[str]:
    if identity.size == 1:
        return ["python"]
    nodes = -(-identity.size // identity.local_size)
    several = [f"--nnodes={nodes}"] if nodes > 1 else []
    return ["torchrun", *several, f"--nproc-per-node={identity.local_size}"]


def _given(arguments: Iterable[str]) -> list[str]:
    """Our options among pytest's arguments, each with its value."""
    kept: list[str] = []
    awaits, keep = False, False
    for argument in arguments:
        if awaits:
            kept += [argument] if keep else []
            awaits = False
        elif argument.startswith("--ep-"):
            name, equals, _ = argument.partition("=")
            keep = name not in NOT_REPEATED
            awaits = not equals and name not in FLAGS
            kept += [argument] if keep else []
    return kept
