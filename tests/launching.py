"""Real ranks: torchrun over pytest, in a folder of its own, with a limit that holds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

LIMIT = 120.0
"""Seconds that a launch may take, far above what any should."""

_LAUNCHERS = ("PYTEST_XDIST", "TORCHELASTIC", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL")
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Torchrun:
    """Runs pytest in ``folder`` as ranks of one job; without pytest's cache unless given -p cacheprovider."""

    folder: Path

    def __call__(
        self, ranks: int, *arguments: str, env: dict[str, str] | None = None, limit: float = LIMIT
    ) -> pytest.RunResult:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        return python(
            self.folder,
            *launcher,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            *arguments,
            env=env,
            limit=limit,
        )


def inherited() -> dict[str, str]:
    """Return this environment without what a launcher of these tests left in it."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED and not name.startswith(_LAUNCHERS)
    }


def python(
    folder: Path, *arguments: str, env: dict[str, str] | None = None, limit: float = LIMIT
) -> pytest.RunResult:
    """Run this Python in ``folder``; past ``limit`` seconds it and its ranks are killed: a failure."""
    # Of its own: sessions that clear the common folder at the same time warn of each other.
    temporary = folder / ".tmp"
    temporary.mkdir(exist_ok=True)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**inherited(), "OMP_NUM_THREADS": "1", "PYTEST_DEBUG_TEMPROOT": str(temporary), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=limit)
    except BaseException as error:
        for pid in (process.pid, *_descendants(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        out, err = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            pytest.fail(f"still running after {limit:g} s; it printed:\n{out}\n{err}", pytrace=False)
        raise
    return pytest.RunResult(process.returncode, out.splitlines(), err.splitlines(), time.monotonic() - began)


def _descendants(root: int) -> list[int]:
    """Children, grandchildren and so on: no process group holds them, as torchrun gives each rank its own."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = children.get(root, [])
    for pid in found:
        found += children.get(pid, [])
    return found
