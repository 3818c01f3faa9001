"""Ways to add a token's messages that a kernel may follow in place of the declared one."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pytest_ep.oracle.diagnosis.scene import narrow
from pytest_ep.oracle.reduction import Contributions
from pytest_ep.oracle.reduction import rank_sum_fp32
from pytest_ep.oracle.reduction import topk_slot_tree
from pytest_ep.oracle.reduction import two_level

Model = Callable[[Contributions], Tensor]


def models(ep_size: int) -> Iterator[tuple[str, Model]]:
    """Every model by name, the known reductions first."""
    domains = [1 << power for power in range(1, ep_size.bit_length()) if 1 << power < ep_size]
    yield "rank-sum-fp32", rank_sum_fp32
    for domain in domains:
        yield f"two-level (domains of {domain})", partial(two_level, domain=domain)
    yield "topk-slot-tree", topk_slot_tree
    yield "a sequential BF16 sum in choice order", lambda given: _sequential(_by_choice(given))
    yield "a sequential BF16 sum in rank order", lambda given: _sequential(_by_rank(given))
    yield "a pairwise BF16 tree in rank order", lambda given: _tree(_by_rank(given))
    yield "rank-sum-fp32 truncated to BF16", lambda given: _truncate(_exact_sum(given))
    for domain in domains:
        name = f"two-level (domains of {domain}) truncated to BF16"
        yield name, partial(_two_level_truncated, domain=domain)
    yield "topk-slot-tree truncated to BF16", lambda given: _tree(_by_choice(given), _truncate)


def through(dtype: torch.dtype) -> Model:
    """The FP32 sum of messages that were narrowed to ``dtype``, unscaled."""
    return lambda given: rank_sum_fp32(replace(given, rows=given.rows.float().to(dtype).float()))


def _exact_sum(given: Contributions) -> Tensor:
    rows = given.rows.float()
    return rows.new_zeros((given.tokens, rows.shape[1])).index_add_(0, given.token, rows)


def _two_level_truncated(given: Contributions, domain: int) -> Tensor:
    inner = torch.unique(given.token * 2**16 + given.rank // domain, return_inverse=True)
    groups, group = inner
    partial_sums = _exact_sum(replace(given, token=group, tokens=len(groups)))
    outer = replace(given, rows=narrow(partial_sums), token=groups // 2**16)
    return _truncate(_exact_sum(outer))


def _truncate(values: Tensor) -> Tensor:
    """FP32 cut to BF16: towards zero."""
    return (values.float().contiguous().view(torch.int32) & -(2**16)).view(torch.float32)


def _by_choice(given: Contributions) -> Tensor:
    """FP32 [tokens, K, H]: each message at the first choice that its rank owns, zero elsewhere."""
    slots = given.rows.new_zeros((given.tokens, given.top_k, given.rows.shape[1]), dtype=torch.float32)
    slots[given.token, given.choice] = given.rows.float()
    return slots


def _by_rank(given: Contributions) -> Tensor:
    """FP32 [tokens, most contributors, H]: a token's messages in the order of their ranks."""
    order = torch.argsort(given.token * 2**16 + given.rank)
    token = given.token[order]
    count = torch.bincount(token, minlength=given.tokens)
    position = torch.arange(len(token), device=token.device) - (count.cumsum(0) - count)[token]
    slots = given.rows.new_zeros(
        (given.tokens, max(1, int(count.max())), given.rows.shape[1]), dtype=torch.float32
    )
    slots[token, position] = given.rows[order].float()
    return slots


def _sequential(slots: Tensor) -> Tensor:
    total = slots[:, 0]
    for slot in range(1, slots.shape[1]):
        total = narrow(total + slots[:, slot])
    return total


def _tree(slots: Tensor, to_bf16: Callable[[Tensor], Tensor] = narrow) -> Tensor:
    slots = slots.clone()
    step = 1
    while step < slots.shape[1]:
        slots[:, : -step : 2 * step] = to_bf16(slots[:, : -step : 2 * step] + slots[:, step :: 2 * step])
        step *= 2
    return slots[:, 0]
