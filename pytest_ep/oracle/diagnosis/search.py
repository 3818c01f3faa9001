"""Which rows to look among, and how those that were found are related to those that belong there."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_ep.oracle.diagnosis.scene import Setting
from pytest_ep.workload import contents
from pytest_ep.workload.problem import Problem

SAID = 4
"""Replacements that a note spells out."""


def most_rows(problem: Problem) -> int:
    """How many rows are worth looking among."""
    elements = 2**22 if problem.x.device.type == "cpu" else 2**27
    return elements // problem.shape.hidden


def searched(setting: Setting, most: int) -> Iterator[Tensor]:
    """Global indices of all this rank's tokens, then of others until there are ``most``: in chunks."""
    problem = setting.problem
    first, end = problem.first_token(problem.rank), problem.first_token(problem.rank + 1)
    others = max(0, most - problem.tokens)
    everyone = torch.arange(len(problem.trace.expert_ids), device=problem.x.device)
    outside = torch.cat([everyone[:first], everyone[end:]])[:others]
    step = contents.chunk_rows(problem.x.device, problem.shape.hidden * problem.shape.top_k)
    yield from torch.split(torch.cat([everyone[first:end], outside]), step)


def relation(problem: Problem, pairs: Sequence[tuple[int, int]]) -> str:
    """How tokens are related to those whose rows they got: (this rank's token, the other token) pairs."""
    owners = {_owner(problem, other) for _, other in pairs}
    shifts = {other - token for token, other in pairs}
    own = problem.rank
    if owners == {own}:
        if len(shifts) == 1 and len(pairs) > 1:
            return f"those {shifts.pop():+d} further"
        return "a permutation of its own tokens" if _is_permutation(pairs) else "others of its own tokens"
    ranks = ", ".join(map(str, sorted(owners)))
    same_place = shifts == {problem.first_token(owner) - problem.first_token(own) for owner in owners}
    if same_place and len(owners) == 1:
        return f"those at the same place on rank {ranks}"
    return f"tokens of rank {ranks}"


def _is_permutation(pairs: Sequence[tuple[int, int]]) -> bool:
    return {token for token, _ in pairs} == {other for _, other in pairs}


def _owner(problem: Problem, token: int) -> int:
    return next(rank for rank in range(problem.ep_size) if token < problem.first_token(rank + 1))
