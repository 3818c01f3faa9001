"""Transports that are wrong in one way each, with the sentence that should name it: one table.

A fault changes what a rank sends, says that it received, stages, adds or returns. The transports run on real
ranks (``tests/faults/diagnosed_suites.py``) and, all the same, as threads of one process (``threaded``).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import field
from functools import partial
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from typing import ClassVar

import torch
from torch import Tensor

from pytest_ep.backends.base import Received
from pytest_ep.backends.torch_a2a import Exchange
from pytest_ep.backends.torch_a2a import TorchA2A
from pytest_ep.matrix.shapes import Shape
from pytest_ep.matrix.shapes import parse_shape
from pytest_ep.oracle import checks
from pytest_ep.oracle import reduction
from pytest_ep.oracle.checks import Verdict
from pytest_ep.oracle.reduction import Contributions
from pytest_ep.workload.problem import Problem
from pytest_ep.workload.problem import build_problem
from pytest_ep.workload.routing import SEED
from pytest_ep.workload.routing import Trace
from pytest_ep.workload.routing import load_trace

CULPRIT = 1
LADDER = (1, 8, 64)
DOMAIN = 2
"""Ranks of a scale-up domain."""
SHAPE_TEXT = "hidden=512,experts=64,top_k=4"
SHAPE = parse_shape(SHAPE_TEXT)


@dataclass
class At:
    """Where a hook is: the transport, the problem, and whether constant rows are staged."""

    backend: Faulty
    problem: Problem
    timed: bool
    handle: Exchange

    @property
    def culprit(self) -> bool:
        return self.problem.rank == CULPRIT

    def plane(self) -> Tensor:
        """The source rank of each received row."""
        return torch.arange(self.problem.ep_size).repeat_interleave(torch.tensor(self.handle.received))


class Faulty(TorchA2A):
    """Torch's all-to-all with hooks."""

    fault: ClassVar[Fault]

    def __init__(self, ranks: Any, shape: Shape, mode: str, precision: str, max_tokens: int) -> None:
        super().__init__(ranks, shape, mode, precision, max_tokens)
        self.reduction = self.fault.declared
        self.max_tokens = max_tokens
        self.kept: dict[str, Tensor] = {}
        self._problem: Problem | None = None
        self._constant: Tensor | None = None
        self.combines = 0

    def dispatch(self, problem: Problem) -> Exchange:
        if self._problem is not problem:
            self._problem, self.combines = problem, 0
        if problem.rank == CULPRIT or self.fault.everyone:
            return self.fault.dispatch(self, problem)
        return self.plain_dispatch(problem)

    def plain_dispatch(self, problem: Problem) -> Exchange:
        return super().dispatch(problem)

    def receive(self, problem: Problem, handle: Exchange) -> Received:
        received = super().receive(problem, handle)
        at = At(self, problem, False, handle)
        return self.fault.receive(at, received) if at.culprit or self.fault.everyone else received

    def stage(self, problem: Problem, handle: Exchange, messages: Tensor) -> Tensor:
        at = At(self, problem, False, handle)
        staged = messages.clone()
        return self.fault.stage(at, staged) if at.culprit or self.fault.everyone else staged

    def stage_constant(self, problem: Problem, rows: Tensor) -> Tensor:
        self._constant = super().stage_constant(problem, rows)
        return self._constant

    def combine(self, problem: Problem, handle: Exchange, staged: Tensor) -> Tensor:
        at = At(self, problem, staged is self._constant, handle)
        back = self._all_to_all(staged[: sum(handle.received)], handle.received, handle.sent)
        rank = torch.arange(problem.ep_size).repeat_interleave(torch.tensor(handle.sent))
        here = self._owners[problem.expert_ids[handle.order]] == rank[:, None]
        given = Contributions(
            back, handle.order, rank, here.int().argmax(dim=1), problem.tokens, problem.shape.top_k
        )
        right = reduction.named(self.fault.declared, self.fault.domain)
        hit = at.culprit or self.fault.everyone
        combined = (self.fault.add(at, given) if hit else right(given)).to(torch.bfloat16)
        result = self.fault.give(at, combined) if hit else combined
        self.combines += not at.timed
        return result


def _plain_dispatch(backend: Faulty, problem: Problem) -> Exchange:
    return backend.plain_dispatch(problem)


def _plain_receive(at: At, received: Received) -> Received:
    return received


def _plain_stage(at: At, messages: Tensor) -> Tensor:
    return messages


def _plain_add(at: At, given: Contributions) -> Tensor:
    return reduction.named(at.backend.fault.declared, at.backend.fault.domain)(given)


def _plain_give(at: At, combined: Tensor) -> Tensor:
    return combined


@dataclass(frozen=True)
class Fault:
    """One way to be wrong, on the culprit or on ``everyone``.

    ``checks`` are checks of which each fails; ``says`` a pattern of the sentence. ``unseen(ep_size, tokens)``
    is the reason where nothing observable changes, else "".
    """

    name: str
    checks: str
    says: str
    dispatch: Callable[[Faulty, Problem], Exchange] = _plain_dispatch
    receive: Callable[[At, Received], Received] = _plain_receive
    stage: Callable[[At, Tensor], Tensor] = _plain_stage
    add: Callable[[At, Contributions], Tensor] = _plain_add
    give: Callable[[At, Tensor], Tensor] = _plain_give
    everyone: bool = False
    declared: str = "rank-sum-fp32"
    domain: int = DOMAIN
    unseen: Callable[[int, int], str] = field(default=lambda ep_size, tokens: "")


def transport(fault: Fault) -> type[Faulty]:
    """The class of a fault."""
    return type(fault.name, (Faulty,), {"name": fault.name, "fault": fault})


class Crossing:
    """All-to-alls between threads: each rank leaves its rows, and takes its share of everyone's."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = Barrier(ranks, timeout=30)
        self._left: dict[int, list[Tensor]] = {}

    def cross(self, rank: int, rows: Tensor, sent: list[int] | None) -> Tensor:
        counts = sent if sent is not None else [len(rows) // self.ranks] * self.ranks
        self._left[rank] = list(torch.split(rows, counts))
        self._barrier.wait()
        taken = torch.cat([self._left[source][rank] for source in range(self.ranks)])
        self._barrier.wait()
        return taken

    def all_passed(self, rank: int, verdict: Verdict) -> bool:
        passed = torch.full((self.ranks,), int(verdict.passed))
        return bool(self.cross(rank, passed, None).all())

    def leave(self) -> None:
        self._barrier.abort()


def threaded(backend: type[TorchA2A], crossing: Crossing, rank: int, shape: Shape, tokens: int) -> TorchA2A:
    """A rank of a transport whose ranks are threads."""

    def all_to_all(
        self: TorchA2A, rows: Tensor, sent: list[int] | None = None, received: list[int] | None = None
    ) -> Tensor:
        return crossing.cross(rank, rows, sent)

    there = type(f"threaded_{backend.name}", (backend,), {"_all_to_all": all_to_all})
    ranks = SimpleNamespace(rank=rank, size=crossing.ranks, device=torch.device("cpu"), group=None)
    made: TorchA2A = there(ranks, shape, "normal", "bf16", tokens)
    return made


def on_threads(ranks: int, work: Callable[[Crossing, int], Any]) -> list[Any]:
    """What each rank's ``work`` returns, by rank; an exception on one ends all, and is raised."""
    crossing = Crossing(ranks)

    def one(rank: int) -> Any:
        try:
            return work(crossing, rank)
        except BaseException:
            crossing.leave()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def run_case(backend: TorchA2A, problem: Problem, domain: int, agree: Callable[[Verdict], bool]) -> Verdict:
    """What a case does, as pytest_ep.case has it: the verdict of the first phase that fails anywhere."""
    model = reduction.named(backend.reduction, domain)

    def oracle() -> Verdict:
        verdict = checks.run_oracle(backend, problem, model, exact=True)
        unchanged = checks.inputs_unchanged(problem)
        return verdict if unchanged else checks.inputs_changed(verdict, problem)

    verdict = oracle()
    if not agree(verdict):
        return verdict
    staged = backend.stage_constant(problem, checks.constant_rows(problem, 1))
    for _ in range(2):
        output = backend.combine(problem, backend.dispatch(problem), staged)
    verdict = checks.check_timed_output(problem, output, model, 1, exact=True)
    return oracle() if agree(verdict) else verdict


def simulate(
    fault: Fault, ep_size: int, ladder: tuple[int, ...] = LADDER, shape: Shape = SHAPE
) -> dict[int, list[Verdict]]:
    """The verdicts of every rank, by T, of one transport that serves the whole ladder."""
    longest = load_trace(shape, SEED, ep_size * max(ladder), None, write=False)

    def work(crossing: Crossing, rank: int) -> dict[int, Verdict]:
        backend = threaded(transport(fault), crossing, rank, shape, max(ladder))
        found = {}
        for tokens in ladder:
            end = ep_size * tokens
            trace = Trace(longest.expert_ids[:end], longest.weights[:end])
            problem = build_problem(shape, trace, rank, (tokens,) * ep_size, "cpu", "int64")
            found[tokens] = run_case(backend, problem, DOMAIN, partial(crossing.all_passed, rank))
        return found

    ranks = on_threads(ep_size, work)
    return {tokens: [found[tokens] for found in ranks] for tokens in ladder}
