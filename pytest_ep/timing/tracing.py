"""A trace of one pair, for people to look at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.profiler import profile
from torch.profiler import record_function

from pytest_ep.backends.base import EPBackend
from pytest_ep.ranks.group import Ranks
from pytest_ep.workload.problem import Problem


def trace_pair(
    backend: EPBackend, problem: Problem, rows: Tensor, ranks: Ranks, *, case: str, folder: Path
) -> None:
    """Run a pair with constant ``rows`` [S, H] BF16 under torch.profiler, and write this rank's trace.

    Collective. Ranges are named by ``case`` and component; on an NVIDIA device they are NVTX ranges too.
    """
    staged = backend.stage_constant(problem, rows)
    activities = [ProfilerActivity.CPU]
    if ranks.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    ranks.synchronize()
    with profile(activities=activities) as profiled:
        ranks.barrier()
        with _named(f"{case} dispatch", ranks.device):
            handle = backend.dispatch(problem)
        with _named(f"{case} combine", ranks.device):
            backend.combine(problem, handle, staged)
        ranks.synchronize()
    folder.mkdir(parents=True, exist_ok=True)
    profiled.export_chrome_trace(str(folder / trace_name(case, ranks.rank)))


def trace_name(case: str, rank: int) -> str:
    """Return the name of a rank's file of a case, whose node id may have any characters."""
    return f"{re.sub(r'[^A-Za-z0-9_.]+', '-', case).strip('-')}.rank{rank}.json"


@contextmanager
def _named(name: str, device: torch.device) -> Iterator[None]:
    with ExitStack() as ranges:
        if device.type == "cuda":
            ranges.enter_context(torch.cuda.nvtx.range(name))
        ranges.enter_context(record_function(name))
        yield
