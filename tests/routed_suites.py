"""Suites for unusual routing and unlike numbers of tokens: right transports, refusing and wrong ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from pytest_ep import EPSuite
from pytest_ep.backends.base import ModeFacts
from pytest_ep.backends.torch_a2a import Exchange
from pytest_ep.backends.torch_a2a import TorchA2A
from pytest_ep.matrix.routing import Routing
from pytest_ep.matrix.routing import parse_routing
from pytest_ep.matrix.shapes import Shape
from pytest_ep.matrix.skew import NO_SKEW
from pytest_ep.matrix.skew import TokenSkew
from pytest_ep.oracle import checks
from pytest_ep.oracle.reduction import named
from pytest_ep.ranks.group import Ranks
from pytest_ep.workload import recorded
from pytest_ep.workload.problem import Problem
from pytest_ep.workload.problem import build_problem
from pytest_ep.workload.routes import load_routes

KINDS = ("uniform", "balanced", "local", "zipf:1.2", "hot:3", "rec.npz")
SKEWS = (NO_SKEW, TokenSkew("linear"), TokenSkew("file_w", (0, 7, 0, 1)))
TOKENS = (1, 8, 64)
SUM = "rank-sum-fp32"


class Thorough(TorchA2A):
    """Is checked with every kind and skew as it is constructed; the names of what passed go to a file."""

    name: ClassVar[str] = "thorough"

    def __init__(self, ranks: Ranks, shape: Shape, mode: str, precision: str, max_tokens: int) -> None:
        super().__init__(ranks, shape, mode, precision, max_tokens)
        with Path(f"passed-{ranks.rank}.txt").open("w") as log:
            for kind in KINDS:
                routes = load_routes(
                    self.wanted(kind, shape), shape, 67, TOKENS[-1] * ranks.size, None, write=False
                )
                for skew in SKEWS:
                    for tokens in TOKENS:
                        shares = skew.split(tokens, ranks.size)
                        self.check(
                            build_problem(shape, routes.of(shares), ranks.rank, shares, "cpu", "int64")
                        )
                        print(kind, skew.name, tokens, shares[ranks.rank], file=log)

    @staticmethod
    def wanted(kind: str, shape: Shape) -> Routing:
        routing = parse_routing(kind)
        if routing.kind == "file":
            routing = replace(routing, recording=recorded.describe(kind, [shape]))
        return routing

    def check(self, problem: Problem) -> None:
        verdict = checks.run_oracle(self, problem, named(SUM, 1), exact=True)
        assert verdict.passed, f"{problem.tokens_by_rank}: {verdict.message}"
        staged = self.stage_constant(problem, checks.constant_rows(problem, 1))
        output = self.combine(problem, self.dispatch(problem), staged)
        assert output.shape == (problem.tokens, problem.shape.hidden)
        timed = checks.check_timed_output(problem, output, named(SUM, 1), 1, exact=True)
        assert timed.passed, f"{problem.tokens_by_rank}: {timed.message}"


class Even(TorchA2A):
    """Needs as many tokens on each rank."""

    name: ClassVar[str] = "even"
    modes: ClassVar[Mapping[str, ModeFacts]] = {
        "normal": replace(TorchA2A.modes["normal"], unequal_tokens=False)
    }


class Unmasked(TorchA2A):
    """Says nothing of masked choices."""

    name: ClassVar[str] = "unmasked"
    modes: ClassVar[Mapping[str, ModeFacts]] = {"normal": replace(TorchA2A.modes["normal"], masked_ids=False)}


class MaskedToRank0(TorchA2A):
    """Sends -1 to rank 0, as truncating division does."""

    name: ClassVar[str] = "masked_to_rank_0"

    def dispatch(self, problem: Problem) -> Exchange:
        self._owners[-1] = 0
        handle = super().dispatch(problem)
        self._owners[-1] = self._ranks.size
        return handle


class MaskedNotZero(TorchA2A):
    """Leaves the rows of tokens without a choice unwritten."""

    name: ClassVar[str] = "masked_not_zero"

    def combine(self, problem: Problem, handle: Exchange, staged: Tensor) -> Tensor:
        output = super().combine(problem, handle, staged)
        output[(problem.expert_ids < 0).all(dim=1)] = 1.0
        return output


class TestThorough(EPSuite):
    backend = Thorough


class TestEven(EPSuite):
    backend = Even


class TestUnmasked(EPSuite):
    backend = Unmasked


class TestMaskedToRank0(EPSuite):
    backend = MaskedToRank0


class TestMaskedNotZero(EPSuite):
    backend = MaskedNotZero
