"""What a dispatch brought, beside what it should have brought, and what rows of it are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace

import torch
from torch import Tensor

from pytest_ep.backends.base import Received
from pytest_ep.oracle import dispatch
from pytest_ep.oracle import expected
from pytest_ep.workload import contents
from pytest_ep.workload.problem import Problem

LISTED = 8
SEARCHED = 64
"""Rows, and tokens, among which an unreadable row's token is looked for."""
_RECOGNISED = 0.1
"""A row is a token where less than this share of it differs."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The N received rows without ``padding`` rows, which carry no token, and without ``masked`` ones.

    A masked row is a token that all of whose choices are masked (id -1): it has no destination.

    ``source`` [N] are the tokens that the rows are: as they say, or as their other columns say where that
    part is damaged; -1 where neither can be. ``changed`` [N] rows differ from that token in any bit; ``want``
    is the metadata that goes with it. ``arriving`` and ``times`` [all tokens] say which tokens should be
    here, and how often each is.
    """

    problem: Problem
    received: Received
    source: Tensor
    padding: int
    masked: int
    changed: Tensor
    want: expected.Arrival
    arriving: Tensor
    times: Tensor

    @property
    def mine(self) -> Tensor:
        """Which received ids are of this rank's experts: bool [N, K]."""
        bounds = self.problem.shape.owned(self.problem.ep_size)
        ids = self.received.expert_ids
        return (ids >= bounds[self.problem.rank]) & (ids < bounds[self.problem.rank + 1])

    @property
    def known(self) -> Tensor:
        """Rows whose token is known: bool [N]."""
        return self.source >= 0

    def befallen(self) -> Tensor:
        """Tokens of the group that did not arrive here as they should: bool [all tokens]."""
        bad = self.arriving != (self.times == 1)
        wrong = self.changed | _differ(self.received.expert_ids, self.want.expert_ids)
        if self.received.weights is not None:
            wrong |= _differ(self.received.weights, self.want.weights)
        bad[self.source[wrong & self.known]] = True
        return bad


def arrivals(problem: Problem, received: Received, source: Tensor) -> Arrivals:
    """Sort out what was received; ``source`` [N] are the decoded source ids."""
    everyone = len(problem.trace.expert_ids)
    arriving = expected.arriving(problem)
    source = torch.where(source < everyone, source, -1)
    claimed = source
    extra = len(source) - int(arriving.sum())
    empty = (received.expert_ids < 0).all(dim=1) | (source < 0)
    if extra > 0 and bool(empty.any()):
        keep = ~empty
        received = replace(
            received,
            tokens=received.tokens[keep],
            expert_ids=received.expert_ids[keep],
            weights=None if received.weights is None else received.weights[keep],
        )
        source = source[keep]
    source = _recognised(problem, received.tokens, source, arriving)
    valid = source[source >= 0]
    times = torch.bincount(valid, minlength=everyone)
    want = expected.arrival(problem, source.clamp(min=0))
    dropped = int(empty.sum()) if extra > 0 else 0
    masked = int(_masked(problem)[claimed[empty & (claimed >= 0)]].sum()) if dropped else 0
    changed = dispatch.payload_differs(problem, received.tokens, source.clamp(min=0)) & (source >= 0)
    return Arrivals(problem, received, source, dropped - masked, masked, changed, want, arriving, times)


def _masked(problem: Problem) -> Tensor:
    """Whether each token of the group has no choice that is not masked: bool [all tokens]."""
    return torch.from_numpy((problem.trace.expert_ids < 0).all(axis=1)).to(problem.x.device)


def _recognised(problem: Problem, rows: Tensor, source: Tensor, arriving: Tensor) -> Tensor:
    """The source ids, with those of rows put right that are a missing token but for a few elements."""
    times = torch.bincount(source[source >= 0], minlength=len(arriving))
    lost = torch.nonzero(arriving & (times == 0)).squeeze(1)[:SEARCHED]
    known = source.clamp(min=0)
    suspect = torch.nonzero((source < 0) | ~arriving[known] | (times[known] > 1)).squeeze(1)[:SEARCHED]
    if not len(lost) or not len(suspect):
        return source
    source = source.clone()
    values = contents.tokens(lost, problem.shape.hidden)
    for row in suspect.tolist():
        differs = (values != rows[row]).float().mean(dim=1)
        if float(differs.min()) < _RECOGNISED:
            source[row] = lost[int(differs.argmin())]
    return source


def _differ(got: Tensor, want: Tensor) -> Tensor:
    """Which rows differ, in whatever order: bool [N]."""
    return (got.sort(dim=1).values != want.sort(dim=1).values).any(dim=1)


def named(problem: Problem, tokens: Sequence[int]) -> str:
    """Tokens in words: "token 8 of rank 1", or "12 tokens of ranks 0, 1"."""
    owners = sorted({_owner(problem, token) for token in tokens})
    whose = rank_names(owners)
    if len(tokens) == 1:
        return f"token {tokens[0]} of {whose}"
    return f"{len(tokens)} tokens of {whose}"


def rank_names(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 1", "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def _owner(problem: Problem, token: int) -> int:
    return next(rank for rank in range(problem.ep_size) if token < problem.first_token(rank + 1))
