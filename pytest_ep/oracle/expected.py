"""What every rank must receive and return, from the trace alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_ep.oracle.reduction import Contributions
from pytest_ep.oracle.reduction import Reduction
from pytest_ep.workload import contents
from pytest_ep.workload.problem import Problem


@dataclass(frozen=True, slots=True)
class Pairs:
    """The P (token, contributing rank) pairs of some tokens: tokens ascending, then ranks. All int64 [P].

    ``token`` is an index into those tokens, ``choice`` the first choice whose expert ``rank`` owns,
    ``position`` the rank's place among the token's ``count`` contributors.
    """

    token: Tensor
    rank: Tensor
    choice: Tensor
    position: Tensor
    count: Tensor


@dataclass(frozen=True, slots=True)
class Arrival:
    """The metadata that this rank must receive with tokens ``source`` [N], as ``Received`` says it."""

    expert_ids: Tensor
    weights: Tensor


def contributors(expert_ids: Tensor, bounds: Tensor) -> Pairs:
    """The contributing ranks of tokens with choices ``expert_ids`` [n, K]; ``bounds`` as Shape.owned."""
    owner, member = _membership(expert_ids, bounds)
    token, rank = torch.nonzero(member, as_tuple=True)
    first = torch.zeros((len(member), len(bounds)), dtype=torch.int64, device=member.device)
    for choice in reversed(range(expert_ids.shape[1])):
        first.scatter_(1, owner[:, choice : choice + 1], choice)
    position = member.cumsum(dim=1) - 1
    count = member.sum(dim=1)
    return Pairs(token, rank, first[token, rank], position[token, rank], count[token])


def arrival(problem: Problem, source: Tensor) -> Arrival:
    """What this rank must receive with the tokens of global index ``source`` [N] int64."""
    ids, weights = routing(problem, source)
    bounds = expert_bounds(problem)
    return Arrival(*_local(ids, weights, bounds[problem.rank], bounds[problem.rank + 1]))


def arriving(problem: Problem) -> Tensor:
    """Whether each token of the group has an expert on this rank: bool [all tokens]."""
    bounds = problem.shape.owned(problem.ep_size)
    ids = problem.trace.expert_ids
    here = ((ids >= bounds[problem.rank]) & (ids < bounds[problem.rank + 1])).any(axis=1)
    return torch.from_numpy(here).to(problem.x.device)


def expert_counts(problem: Problem) -> Tensor:
    """Assignments of the whole group to each of this rank's experts: int64 [local experts]."""
    first, end = problem.shape.owned(problem.ep_size)[problem.rank : problem.rank + 2]
    ids = torch.from_numpy(problem.trace.expert_ids).to(problem.x.device)
    return torch.bincount(ids[ids >= 0], minlength=problem.shape.experts)[first:end]


def reply(problem: Problem, source: Tensor, expert_ids: Tensor, weights: Tensor | None) -> Tensor:
    """The messages [N, H] BF16 with which this rank answers what it received, right or wrong.

    ``source`` int64 [N] is what the rows claim to be; a claim outside the group counts as its nearest token.
    ``expert_ids`` and ``weights`` [N, K] are as received; weights that did not arrive count as zero.
    """
    source = source.clamp(0, len(problem.trace.expert_ids) - 1)
    ids, _ = routing(problem, source)
    _, member = _membership(ids, expert_bounds(problem))
    senders = contents.Senders(
        source=source,
        rank=torch.full_like(source, problem.rank),
        position=member[:, : problem.rank].sum(dim=1),
        count=member.sum(dim=1),
        expert_ids=expert_ids,
        weights=torch.zeros_like(ids, dtype=torch.float32) if weights is None else weights,
    )
    return contents.messages(senders, problem.shape.hidden, _most_contributors(problem))


def combined(problem: Problem, reduction: Reduction) -> Iterator[tuple[int, Tensor]]:
    """The expected combine of this rank's tokens, in chunks: (first token of the chunk, FP32 [n, H])."""
    for start, source in _chunks(problem):
        yield start, reduction(sent(problem, source))


def combined_constant(problem: Problem, reduction: Reduction, planes: int) -> Iterator[tuple[int, Tensor]]:
    """As ``combined``, where every rank has staged its ``constant_rows``: wherever the rows were placed."""
    for start, source in _chunks(problem):
        yield start, reduction(sent_constant(problem, source, planes))


def sent(problem: Problem, source: Tensor) -> Contributions:
    """The messages that the group sends back for tokens of global index ``source`` [n] int64."""
    ids, weights = routing(problem, source)
    bounds = expert_bounds(problem)
    pairs = contributors(ids, bounds)
    local_ids, local_weights = _local(
        ids[pairs.token],
        weights[pairs.token],
        bounds[pairs.rank][:, None],
        bounds[pairs.rank + 1][:, None],
    )
    senders = contents.Senders(
        source=source[pairs.token],
        rank=pairs.rank,
        position=pairs.position,
        count=pairs.count,
        expert_ids=local_ids,
        weights=local_weights,
    )
    rows = contents.messages(senders, problem.shape.hidden, _most_contributors(problem))
    return _contributions(rows, pairs, ids)


def sent_constant(problem: Problem, source: Tensor, planes: int) -> Contributions:
    """As ``sent``, for tokens of this rank where every rank has staged its ``constant_rows``."""
    ranks = torch.arange(problem.ep_size, device=problem.x.device)
    plane = torch.full_like(ranks, problem.rank if planes > 1 else 0)
    rows = contents.constant_messages(ranks, plane, problem.shape.hidden, problem.ep_size)
    ids, _ = routing(problem, source)
    pairs = contributors(ids, expert_bounds(problem))
    return _contributions(rows[pairs.rank], pairs, ids)


def constant_rows(problem: Problem, planes: int) -> Tensor:
    """What this rank stages in each plane for timing: BF16 [planes, H]; plane s answers source rank s.

    Raises ValueError where ``planes`` is neither 1 nor ep_size.
    """
    if planes not in {1, problem.ep_size}:
        raise ValueError(f"{planes} constant planes: a token-rank layout has 1 or ep_size, {problem.ep_size}")
    plane = torch.arange(planes, device=problem.x.device)
    rank = torch.full_like(plane, problem.rank)
    return contents.constant_messages(rank, plane, problem.shape.hidden, problem.ep_size)


def expert_bounds(problem: Problem) -> Tensor:
    """``Shape.owned`` as int64 [R + 1] on the problem's device."""
    return torch.tensor(problem.shape.owned(problem.ep_size), device=problem.x.device)


def owners(expert_ids: Tensor, bounds: Tensor) -> Tensor:
    """The rank that owns each expert, ``bounds`` as Shape.owned; of a masked choice, -1, rank R, of none."""
    return torch.bucketize(expert_ids, bounds[1:], right=True).masked_fill(expert_ids < 0, len(bounds) - 1)


def routing(problem: Problem, source: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and weights [N, K] of tokens of global index ``source`` [N], on their device."""
    rows = source.cpu().numpy()
    ids, weights = problem.trace.expert_ids[rows], problem.trace.weights[rows]
    return torch.from_numpy(ids).to(source.device), torch.from_numpy(weights).to(source.device)


def _chunks(problem: Problem) -> Iterator[tuple[int, Tensor]]:
    """This rank's tokens: (first of the chunk, their global indices)."""
    step = contents.chunk_rows(problem.x.device, problem.shape.hidden * problem.shape.top_k)
    first = problem.first_token(problem.rank)
    for start in range(0, problem.tokens, step):
        end = min(start + step, problem.tokens)
        yield start, torch.arange(first + start, first + end, device=problem.x.device)


def _membership(expert_ids: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """The owner rank of each choice [n, K], and whether each rank contributes to each token, bool [n, R]."""
    owner = owners(expert_ids, bounds)
    # A masked choice lands in the spare last column.
    member = torch.zeros((len(owner), len(bounds)), dtype=torch.bool, device=owner.device)
    return owner, member.scatter_(1, owner, True)[:, :-1]


def _local(ids: Tensor, weights: Tensor, first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and weights as the owner of experts [first, end) receives them."""
    here = (ids >= first) & (ids < end)
    return torch.where(here, ids, -1), torch.where(here, weights, 0.0)


def _contributions(rows: Tensor, pairs: Pairs, ids: Tensor) -> Contributions:
    return Contributions(rows, pairs.token, pairs.rank, pairs.choice, tokens=len(ids), top_k=ids.shape[1])


def _most_contributors(problem: Problem) -> int:
    return min(problem.shape.top_k, problem.ep_size)
