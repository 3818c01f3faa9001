"""How a combine adds a token's messages: one model for each arithmetic that transports are known to use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Contributions:
    """The P messages of ``tokens`` tokens, one for each (token, contributing rank) pair.

    ``rows`` [P, H]; int64 [P]: ``token`` in [0, tokens), ``rank`` the contributor, ``choice`` the first of
    the token's ``top_k`` choices whose expert that rank owns.
    """

    rows: Tensor
    token: Tensor
    rank: Tensor
    choice: Tensor
    tokens: int
    top_k: int


@dataclass(frozen=True, slots=True)
class Reduction:
    """A named model; calling it gives the combined tokens, FP32 [tokens, H]."""

    name: str
    model: Callable[[Contributions], Tensor]

    def __call__(self, contributions: Contributions) -> Tensor:
        """Reduce: FP32 [tokens, H], of BF16 values where the model narrows last."""
        return self.model(contributions)


def named(name: str, domain: int) -> Reduction:
    """The model of that name; ``domain`` is the ranks of a scale-up domain, which two-level alone asks for.

    Raises ValueError for a name that no model has, and for a domain below 1.
    """
    if domain < 1:
        raise ValueError(f"scale-up domain of {domain} ranks: it has at least one")
    known: dict[str, Callable[[Contributions], Tensor]] = {
        "rank-sum-fp32": rank_sum_fp32,
        "two-level": partial(two_level, domain=domain),
        "topk-slot-tree": topk_slot_tree,
    }
    if name not in known:
        raise ValueError(f"unknown reduction {name!r}: known are {', '.join(known)}")
    return Reduction(name, known[name])


def rank_sum_fp32(contributions: Contributions) -> Tensor:
    """All messages of a token added in FP32, narrowed once to BF16."""
    return _narrow(_sum(contributions.rows.float(), contributions.token, contributions.tokens))


def two_level(contributions: Contributions, domain: int) -> Tensor:
    """Within each scale-up domain of consecutive ranks in FP32, narrowed; those sums in FP32, narrowed."""
    most_domains = int(contributions.rank.max()) // domain + 1 if len(contributions.rank) else 1
    key = contributions.token * most_domains + contributions.rank // domain
    groups, group = torch.unique(key, return_inverse=True)
    inner = _narrow(_sum(contributions.rows.float(), group, len(groups)))
    return _narrow(_sum(inner, groups // most_domains, contributions.tokens))


def topk_slot_tree(contributions: Contributions) -> Tensor:
    """A pairwise tree over the top-k choices, every addition rounded to BF16.

    A rank's message stands at the first choice that names the rank; its later choices are zero in place. Then
    a[i] += a[i + s] for s = 1, 2, 4, ..., i a multiple of 2 s, where i + s < K.
    """
    rows = contributions.rows.to(torch.bfloat16)
    slots = rows.new_zeros((contributions.tokens, contributions.top_k, rows.shape[1]))
    slots[contributions.token, contributions.choice] = rows
    step = 1
    while step < contributions.top_k:
        slots[:, : -step : 2 * step] += slots[:, step :: 2 * step]
        step *= 2
    return slots[:, 0].float()


def _sum(rows: Tensor, token: Tensor, tokens: int) -> Tensor:
    return rows.new_zeros((tokens, rows.shape[1])).index_add_(0, token, rows)


def _narrow(rows: Tensor) -> Tensor:
    return rows.to(torch.bfloat16).float()
