"""What the kernels compute, as functions of tensors: routes, slots, garbage and sums."""

from __future__ import annotations

import torch
from torch import Tensor


def target_ranks(expert_ids: Tensor, ep_size: int, experts: int, drops_invalid: bool) -> Tensor:
    """[T, K] destination of each choice; -1 where an earlier choice already goes there.

    The first ``experts % ep_size`` ranks own one more. An invalid id truncates towards zero, as C does.
    """
    base, more = divmod(experts, ep_size)
    ids = expert_ids.to(torch.int64)
    split = more * (base + 1)
    owner = torch.where(
        ids < split,
        torch.div(ids, base + 1, rounding_mode="trunc"),
        more + torch.div(ids - split, base, rounding_mode="trunc"),
    )
    if drops_invalid:
        owner = torch.where((ids < 0) | (ids >= experts), -1, owner)
    for choice in range(1, owner.shape[1]):
        seen = (owner[:, :choice] == owner[:, choice : choice + 1]).any(dim=1)
        owner[:, choice] = torch.where(seen, -1, owner[:, choice])
    return owner


def send_slots(targets: Tensor, ep_size: int, seed: int) -> tuple[Tensor, list[int]]:
    """[T, K] slot of each sending choice in its plane, in no order of tokens; and each plane's count."""
    slots = torch.full_like(targets, -1)
    sent = []
    for rank in range(ep_size):
        token, choice = torch.nonzero(targets == rank, as_tuple=True)
        count = len(token)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * ep_size + rank))
        if count > 1 and torch.equal(order, torch.arange(count)):
            order = order.roll(1)
        slots[token, choice] = order
        sent.append(count)
    return slots, sent


def spoil(plane: Tensor, filled: int, experts: int, seed: int) -> None:
    """Fill the slots past ``filled`` of a plane [T, columns]: NaN, or integers that pass for expert ids."""
    rest = plane[filled:]
    if rest.is_floating_point() and rest.element_size() > 1:
        rest.fill_(float("nan"))
    elif rest.dtype in {torch.int32, torch.int64}:
        generator = torch.Generator().manual_seed(seed)
        rest.copy_(torch.randint(experts, rest.shape, generator=generator).to(rest.dtype))
    else:
        rest.view(torch.uint8).fill_(0x7F)


def reduce(contributions: Tensor, accumulate: str) -> Tensor:
    """Sum [K, T, H] over choices by pairs at distance 1, 2, 4, ...; narrowed at every add or once."""
    dtype = contributions.dtype
    wide = contributions.to(torch.float32) if accumulate == "float32" else contributions
    terms: list[Tensor] = list(wide.unbind())
    distance = 1
    while distance < len(terms):
        for first in range(0, len(terms) - distance, 2 * distance):
            terms[first] = terms[first] + terms[first + distance]
        distance *= 2
    return terms[0].to(dtype)
