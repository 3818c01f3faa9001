"""The routing of every case of a key: of any kind, for any number of tokens on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pytest_ep.matrix.routing import Routing
from pytest_ep.matrix.shapes import Shape
from pytest_ep.workload import choices
from pytest_ep.workload import recorded
from pytest_ep.workload.counter import Counter
from pytest_ep.workload.routing import Trace
from pytest_ep.workload.routing import load_trace


@dataclass(frozen=True, slots=True)
class Routes:
    """The routing of the longest case, which others are the beginning of.

    ``points`` are the counters [N, K] from which a kind chooses that looks at a token's rank, else None: its
    choices are made for each case anew, as another T puts a token on another rank.
    """

    shape: Shape
    longest: Trace
    points: npt.NDArray[np.uint64] | None = None

    @property
    def tokens(self) -> int:
        """The tokens that are there."""
        return len(self.longest.weights)

    def of(self, tokens_by_rank: Sequence[int], first: int = 0) -> Trace:
        """The trace of a case, its tokens in the order of ranks, from token ``first`` on."""
        part = slice(first, first + sum(tokens_by_rank))
        ids, weights = self.longest.expert_ids[part], self.longest.weights[part]
        if self.points is not None:
            ids = choices.local(self.points[part], self.shape, tokens_by_rank)
        return Trace(ids, weights)

    def digest(self, tokens_by_rank: Sequence[int]) -> str:
        """Equal on two ranks where all their traces are: of all tokens, and of a case."""
        return f"{self.of(tokens_by_rank).digest}{self.longest.digest}"


def load_routes(  # noqa: PLR0917 - as load_trace
    routing: Routing, shape: Shape, seed: int, tokens: int, cache: Path | None, write: bool
) -> Routes:
    """The routes of cases of up to ``tokens`` tokens of the group, or as many as a file has.

    Cached as ``load_trace`` says. Raises ValueError where a file cannot be read, or is not as planned.
    """
    if routing.kind == "local":
        points = Counter(seed).grid(0, tokens, shape.top_k, choices.EXPERT_STREAM)
        return Routes(shape, load_trace(shape, seed, tokens, cache, write), points)
    if routing.kind != "file":
        return Routes(shape, load_trace(shape, seed, tokens, cache, write, routing=routing))
    ids = recorded.read(routing.path)
    if routing.recording is not None and recorded.digest(ids) != routing.recording.digest:
        raise ValueError(f"{routing.path} has changed since this run began: start it again")
    ids = ids[:tokens]
    gates = load_trace(shape, seed, len(ids), cache, write).weights
    return Routes(shape, Trace(ids, np.where(ids >= 0, gates, np.float32(0))))
