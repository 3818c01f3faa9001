"""How wrong elements spread: over tokens, columns, contributing ranks and choices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pytest_ep.oracle import expected
from pytest_ep.oracle.diagnosis.evidence import Spread
from pytest_ep.oracle.diagnosis.scene import BLOCK
from pytest_ep.workload.problem import Problem

LISTED = 8
WHOLE = 0.9
"""Share of wrong elements from which a row counts as wrong as a whole: some elements are right by chance."""


class Counts:
    """Counts the wrong elements of one rank, chunk by chunk."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._over = 0
        self._by_token: list[Tensor] = []
        self._by_block: Tensor | None = None

    def add(self, wrong: Tensor, over: Tensor) -> None:
        """Count the next tokens: which elements differ, and which beyond the tolerance: bool [n, H]."""
        self._over += int(over.sum())
        self._by_token.append(wrong.sum(dim=1))
        hidden = wrong.shape[1]
        blocks = functional.pad(wrong, (0, -hidden % BLOCK)).view(len(wrong), -1, BLOCK).sum(dim=(0, 2))
        self._by_block = blocks if self._by_block is None else self._by_block + blocks

    def wrong_tokens(self) -> Tensor:
        """Tokens with a wrong element, by their index on this rank: int64, ascending."""
        return torch.nonzero(torch.cat(self._by_token)).squeeze(1)

    def spread(self) -> Spread:
        """The counts."""
        problem = self._problem
        by_token = torch.cat(self._by_token)
        first = problem.first_token(problem.rank)
        own = torch.arange(first, first + len(by_token), device=by_token.device)
        ids, _ = expected.routing(problem, own)
        pairs = expected.contributors(ids, expected.expert_bounds(problem))
        wrong = self.wrong_tokens()
        return Spread(
            tokens=problem.tokens,
            hidden=problem.shape.hidden,
            wrong=int(by_token.sum()),
            over=self._over,
            wrong_tokens=len(wrong),
            whole=int((by_token >= WHOLE * problem.shape.hidden).sum()),
            listed=tuple((wrong[:LISTED] + first).tolist()),
            by_block=tuple(self._by_block.tolist()) if self._by_block is not None else (),
            by_rank=self._by(pairs.rank, by_token[pairs.token], problem.ep_size),
            by_choice=self._by(pairs.choice, by_token[pairs.token], problem.shape.top_k),
        )

    def _by(self, group: Tensor, wrong: Tensor, groups: int) -> tuple[tuple[int, int], ...]:
        counted = wrong.new_zeros(groups).index_add_(0, group, wrong)
        everything = torch.bincount(group, minlength=groups) * self._problem.shape.hidden
        return tuple(zip(counted.tolist(), everything.tolist(), strict=True))
