"""Some of the tokens that a combine got wrong: what was sent for them, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from functools import cached_property
from typing import Any
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from pytest_ep.oracle import expected
from pytest_ep.oracle.reduction import Contributions
from pytest_ep.oracle.reduction import Reduction
from pytest_ep.workload.problem import Problem

BLOCK = 128
"""Columns of a block: a row's wrong elements are counted, and contradictions sought, by block."""

DENSE = 8
"""Wrong elements of a block from which they can be a run."""

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Setting:
    """What a combine was asked to add: constant rows staged in ``planes``; None: the oracle's messages."""

    problem: Problem
    reduction: Reduction
    planes: int | None = None
    _made: dict[Callable[..., Any], Any] = field(default_factory=dict, compare=False)

    def once(self, make: Callable[[Setting], Made]) -> Made:
        """What ``make`` makes of this setting, made when first asked for."""
        if make not in self._made:
            self._made[make] = make(self)
        made: Made = self._made[make]
        return made

    def sent(self, source: Tensor) -> Contributions:
        """What the group sent back for tokens of global index ``source`` [n], which are this rank's."""
        if self.planes is None:
            return expected.sent(self.problem, source)
        return expected.sent_constant(self.problem, source, self.planes)

    def wanted(self) -> Iterator[tuple[int, Tensor]]:
        """The expected combine in chunks: (first token of the chunk, FP32 [n, H])."""
        if self.planes is None:
            return expected.combined(self.problem, self.reduction)
        return expected.combined_constant(self.problem, self.reduction, self.planes)


@dataclass(frozen=True)
class Scene:
    """n tokens of this rank, ``source`` [n] by global index, and the ``given`` messages of their P pairs.

    ``want`` and ``got`` are FP32 [n, H] of BF16 values; ``bits`` int16 [n, H] are those of what was got.
    """

    setting: Setting
    source: Tensor
    given: Contributions
    want: Tensor
    bits: Tensor

    @cached_property
    def got(self) -> Tensor:
        """FP32 [n, H]."""
        return self.bits.view(torch.bfloat16).float()

    @cached_property
    def wrong(self) -> Tensor:
        """Which elements differ: bool [n, H]."""
        return self.got != self.want

    @cached_property
    def right_nearby(self) -> Tensor:
        """Which elements are right although their block of columns has wrong ones: bool [n, H].

        Of a block in which a dense run of columns is wrong, those within that run.
        """
        hidden = self.wrong.shape[1]
        wrong = functional.pad(self.wrong, (0, -hidden % BLOCK)).view(len(self.wrong), -1, BLOCK)
        count = wrong.cumsum(dim=2)
        total = count[:, :, -1:]
        run = (count > 0) & (total - count + wrong.int() > 0)
        dense = (total >= DENSE) & (2 * total > run.sum(dim=2, keepdim=True))
        near = torch.where(dense, run, total > 0) & ~wrong
        return near.flatten(1)[:, :hidden]

    @cached_property
    def routing(self) -> tuple[Tensor, Tensor]:
        """Expert ids and weights [n, K] of the tokens."""
        return expected.routing(self.setting.problem, self.source)

    @cached_property
    def here(self) -> Tensor:
        """Which of its token's choices each pair's rank owns: bool [P, K]."""
        bounds = expected.expert_bounds(self.setting.problem)
        owner = expected.owners(self.routing[0], bounds)
        return owner[self.given.token] == self.given.rank[:, None]

    def ranks(self) -> list[int]:
        """The contributing ranks, ascending."""
        found: list[int] = torch.unique(self.given.rank).tolist()
        return found

    def reduce(self, rows: Tensor) -> Tensor:
        """What the expected reduction makes of other ``rows`` [P, H] in place of the messages."""
        return self.setting.reduction(replace(self.given, rows=rows))


def scene(setting: Setting, got: Tensor, token: Tensor) -> Scene:
    """The scene of tokens ``token`` [n], by their index on this rank, in a combine's ``got`` [T, H]."""
    source = token + setting.problem.first_token(setting.problem.rank)
    given = setting.sent(source)
    bits = got[token].contiguous().view(torch.int16)
    return Scene(setting, source, given, setting.reduction(given), bits)


def only(given: Contributions, keep: Tensor) -> Contributions:
    """The contributions of the pairs ``keep`` [P] bool, for the same tokens."""
    return Contributions(
        given.rows[keep], given.token[keep], given.rank[keep], given.choice[keep], given.tokens, given.top_k
    )


def narrow(values: Tensor) -> Tensor:
    """FP32 rounded to BF16 and back."""
    return values.to(torch.bfloat16).float()
