"""Transports of one rank that take known times, as the suites of one test module."""

from __future__ import annotations

import time
from types import MappingProxyType

import torch
from torch import Tensor

from pytest_ep import EPSuite
from pytest_ep.backends.base import EPBackend
from pytest_ep.backends.base import ModeFacts
from pytest_ep.backends.base import Received
from pytest_ep.matrix.shapes import Shape
from pytest_ep.ranks.group import Ranks
from pytest_ep.workload.problem import Problem

FIRST, BROKEN = 1, 4
"""Tokens per rank of the first case, and of the one in which Breaking breaks."""


class Sleeping(EPBackend):
    """Sleeps 1 ms in dispatch, 3 ms in combine, and 20 ms in all that no window may have inside."""

    name = "sleeping"
    modes = MappingProxyType(
        {"normal": ModeFacts("token-rank", "unweighted-rank-sum", "int64", False, False, ("bf16",))}
    )

    def __init__(self, ranks: Ranks, shape: Shape, mode: str, precision: str, max_tokens: int) -> None:
        time.sleep(20e-3)
        self.reduction = "rank-sum-fp32"
        self.versions = {"torch": torch.__version__}
        self.experts = shape.experts
        self.dispatch_seconds = 1e-3

    def dispatch(self, problem: Problem) -> None:
        time.sleep(self.dispatch_seconds)

    def metadata(self, problem: Problem) -> bool:
        time.sleep(0.5e-3)
        return True

    def receive(self, problem: Problem, handle: None) -> Received:
        counts = torch.bincount(problem.expert_ids.flatten(), minlength=self.experts)
        return Received(problem.x, problem.expert_ids, problem.weights, counts)

    def stage(self, problem: Problem, handle: None, messages: Tensor) -> Tensor:
        time.sleep(20e-3)
        return messages

    def constant_planes(self, problem: Problem) -> int:
        return 1

    def stage_constant(self, problem: Problem, rows: Tensor) -> Tensor:
        time.sleep(20e-3)
        return rows.expand(problem.tokens, -1)

    def combine(self, problem: Problem, handle: None, staged: Tensor) -> Tensor:
        time.sleep(3e-3)
        return staged.clone()

    def close(self) -> None:
        pass


class Tiring(Sleeping):
    """Sleeps twice as long in dispatch once a second case has begun."""

    name = "tiring"

    def dispatch(self, problem: Problem) -> None:
        if problem.tokens != FIRST:
            self.dispatch_seconds = 2e-3
        super().dispatch(problem)


class Breaking(Tiring):
    """The same, but the second of three cases fails."""

    name = "breaking"

    def dispatch(self, problem: Problem) -> None:
        assert problem.tokens != BROKEN
        super().dispatch(problem)


class TestSleeping(EPSuite):
    backend = Sleeping


class TestTiring(EPSuite):
    backend = Tiring


class TestBreaking(EPSuite):
    backend = Breaking
