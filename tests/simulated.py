"""Simulated ranks: threads of one process that exchange for real, one of which can be made to misbehave."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import field
from threading import Barrier
from typing import Any
from typing import ClassVar

import torch
from torch import Tensor

from pytest_ep.backends.base import EPBackend
from pytest_ep.backends.base import ModeFacts
from pytest_ep.backends.base import Received
from pytest_ep.matrix.shapes import Shape
from pytest_ep.oracle.checks import Verdict
from pytest_ep.oracle.checks import run_oracle
from pytest_ep.oracle.reduction import Contributions
from pytest_ep.oracle.reduction import Reduction
from pytest_ep.oracle.reduction import named
from pytest_ep.workload.problem import Problem
from pytest_ep.workload.problem import build_problem
from pytest_ep.workload.routing import load_trace

SHAPE = Shape("small", hidden=512, experts=32, top_k=8)
RIGHT = named("rank-sum-fp32", 1)
CULPRIT = 1
"""The rank whose transport misbehaves."""

Copy = tuple[int, int]
"""A row of a receive buffer: (source rank, its token)."""


@dataclass
class Faults:
    """What the culprit does wrong; by default nothing."""

    copies: Callable[[list[Copy]], list[Copy]] = lambda copies: copies
    received: Callable[[Received], Received] = lambda received: received
    messages: Callable[[Tensor, Received], Tensor] = lambda messages, received: messages
    combined: Callable[[Tensor], Tensor] = lambda combined: combined
    reduction: Reduction = RIGHT


@dataclass
class Group:
    """What simulated ranks see of each other."""

    ep_size: int
    faults: Faults
    problems: dict[int, Problem] = field(default_factory=dict)
    staged: dict[int, tuple[list[Copy], Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.ep_size, timeout=30)


class Simulated(EPBackend):
    """A transport between threads, written without the oracle's code: what a rank owns is found by loops."""

    name: ClassVar[str] = "simulated"
    modes: ClassVar[dict[str, ModeFacts]] = {}

    def __init__(self, group: Group, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.faults = group.faults if rank == CULPRIT else Faults()
        self.last: Received | None = None

    def owner(self, expert: int) -> int:
        bounds = SHAPE.owned(self.group.ep_size)
        return next(rank for rank in range(self.group.ep_size) if expert < bounds[rank + 1])

    def dispatch(self, problem: Problem) -> list[Copy]:
        self.group.problems[self.rank] = problem
        self.group.barrier.wait()
        copies = [
            (source, token)
            for source, theirs in sorted(self.group.problems.items(), reverse=True)
            for token in range(theirs.tokens)
            if any(self.owner(expert) == self.rank for expert in theirs.expert_ids[token].tolist())
        ]
        return self.faults.copies(copies)

    def receive(self, problem: Problem, handle: list[Copy]) -> Received:
        bounds = SHAPE.owned(self.group.ep_size)
        ids = torch.full((len(handle), SHAPE.top_k), -1)
        weights = torch.zeros((len(handle), SHAPE.top_k))
        tokens = torch.empty((len(handle), SHAPE.hidden), dtype=torch.bfloat16)
        counts = torch.zeros(bounds[self.rank + 1] - bounds[self.rank], dtype=torch.int64)
        for row, (source, token) in enumerate(handle):
            theirs = self.group.problems[source]
            tokens[row] = theirs.x[token]
            for choice, expert in enumerate(theirs.expert_ids[token].tolist()):
                if self.owner(expert) == self.rank:
                    ids[row, choice] = expert
                    weights[row, choice] = theirs.weights[token, choice]
                    counts[expert - bounds[self.rank]] += 1
        self.last = self.faults.received(Received(tokens, ids, weights, counts))
        return self.last

    def stage(self, problem: Problem, handle: list[Copy], messages: Tensor) -> Any:
        assert self.last is not None
        return lambda copies: self.faults.messages(messages.clone(), self.last)

    def stage_constant(self, problem: Problem, rows: Tensor) -> Any:
        plane = (lambda source: source) if len(rows) > 1 else (lambda source: 0)
        return lambda copies: rows[[plane(source) for source, _ in copies]]

    def constant_planes(self, problem: Problem) -> int:
        return self.group.ep_size

    def combine(self, problem: Problem, handle: list[Copy], staged: Any) -> Tensor:
        self.group.staged[self.rank] = (handle, staged(handle))
        self.group.barrier.wait()
        rows, places = [problem.x.new_zeros(0, SHAPE.hidden)], []
        for rank, (copies, messages) in sorted(self.group.staged.items()):
            for row, (source, token) in enumerate(copies):
                if source == self.rank:
                    owners = [self.owner(expert) for expert in problem.expert_ids[token].tolist()]
                    rows.append(messages[row : row + 1])
                    places.append((token, rank, owners.index(rank)))
        self.group.barrier.wait()
        column = torch.tensor(places, dtype=torch.int64).view(-1, 3)
        given = Contributions(
            rows=torch.cat(rows),
            token=column[:, 0],
            rank=column[:, 1],
            choice=column[:, 2],
            tokens=problem.tokens,
            top_k=SHAPE.top_k,
        )
        return self.faults.combined(self.faults.reduction(given).to(torch.bfloat16))

    def close(self) -> None:
        pass


def problem_of(rank: int, tokens_by_rank: tuple[int, ...]) -> Problem:
    trace = load_trace(SHAPE, 67, sum(tokens_by_rank), None, write=False)
    return build_problem(SHAPE, trace, rank, tokens_by_rank, "cpu", "int64")


def on_all_ranks(
    work: Callable[[Simulated, Problem], Verdict],
    faults: Faults | None = None,
    tokens_by_rank: tuple[int, ...] = (8, 8, 8, 8),
) -> list[Verdict]:
    group = Group(len(tokens_by_rank), faults or Faults())

    def one(rank: int) -> Verdict:
        return work(Simulated(group, rank), problem_of(rank, tokens_by_rank))

    with ThreadPoolExecutor(group.ep_size) as pool:
        return list(pool.map(one, range(group.ep_size)))


def verdicts(
    faults: Faults | None = None,
    *,
    tokens_by_rank: tuple[int, ...] = (8, 8, 8, 8),
    reduction: Reduction = RIGHT,
    exact: bool = False,
) -> list[Verdict]:
    def work(backend: Simulated, problem: Problem) -> Verdict:
        return run_oracle(backend, problem, reduction, exact)

    return on_all_ranks(work, faults, tokens_by_rank)


def failed_anywhere(found: list[Verdict]) -> set[str]:
    return {check for verdict in found for check in verdict.failed}


def weights_of(received: Received) -> Tensor:
    assert received.weights is not None
    return received.weights
