"""Which rows to look among, and how those that were found are related to those that belong there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_ep.oracle.diagnosis.arrivals import rank_names
from pytest_ep.oracle.diagnosis.scene import Setting
from pytest_ep.workload import contents
from pytest_ep.workload.problem import Problem

MOSTLY = 0.8
"""Share of the tokens from which a distance is the distance."""
SAID = 4
"""Replacements that a note spells out."""


def most_rows(problem: Problem) -> int:
    """How many rows are worth looking among."""
    elements = 2**23 if problem.x.device.type == "cpu" else 2**26
    return elements // problem.shape.hidden


def searched(setting: Setting, most: int) -> Iterator[Tensor]:
    """Global indices of this rank's tokens, four times ``most`` at most, then of others up to ``most``."""
    problem = setting.problem
    first, end = problem.first_token(problem.rank), problem.first_token(problem.rank + 1)
    everyone = torch.arange(len(problem.trace.expert_ids), device=problem.x.device)
    outside = torch.cat([everyone[:first], everyone[end:]])[: max(0, most - problem.tokens)]
    step = contents.chunk_rows(problem.x.device, problem.shape.hidden * problem.shape.top_k)
    yield from torch.split(torch.cat([everyone[first:end][: 4 * most], outside]), step)


def relation(problem: Problem, pairs: Sequence[tuple[int, int]]) -> str:
    """How tokens are related to those whose rows they got: (this rank's token, the other token) pairs."""
    owners = sorted({_owner(problem, other) for _, other in pairs})
    shift, often = Counter(other - token for token, other in pairs).most_common(1)[0]
    whose = "its own tokens" if owners == [problem.rank] else f"tokens of {rank_names(owners)}"
    if len(pairs) > 1 and often >= MOSTLY * len(pairs):
        return f"{whose}, {shift:+d} away"
    if owners == [problem.rank] and _is_permutation(pairs):
        return f"a permutation of {whose}"
    return whose


def _is_permutation(pairs: Sequence[tuple[int, int]]) -> bool:
    return {token for token, _ in pairs} == {other for _, other in pairs}


def _owner(problem: Problem, token: int) -> int:
    return next(rank for rank in range(problem.ep_size) if token < problem.first_token(rank + 1))
