"""Values of tokens and messages, closed-form, on any device.

Every value is an integer hash, ``(p(column) * b(row) + a(row)) >> s`` in wrapping int32, of which the top
bits stay: few passes over an outer product, and equal on every device because no step rounds.

Messages are integer multiples of one unit u = 2^-5, at most 256 u in magnitude, which BF16 holds exactly;
sums of fewer than 2^16 of them are exact in FP32 in any order, so the right reduction is bit-exact. In the
canary columns three of a token's contributors send +256, 1 and -256 and the others 0: the sum is 1 u, and a
reduction that narrows the first two to BF16 without the third returns 0 instead (257 rounds to 256). Which
two of three it narrows first is all that tells one reduction from another: every triple has its columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

UNIT = 2.0**-5
"""Every message element is an integer multiple of this."""

SOURCE_COLUMNS = 32
"""Leading columns of a token that carry its global index, bit j as +1 or -1 in column j."""

_CANARY = 256
_LOW_32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Senders:
    """Who sends each of N messages, and what it had received for that token.

    int64 [N]: ``source`` global token index; ``rank`` the sender; ``position`` of the sender among the
    token's contributors in rank order, ``count`` of them. ``expert_ids`` int64 [N, K], -1 for experts of
    other ranks; ``weights`` FP32 [N, K], zero there.
    """

    source: Tensor
    rank: Tensor
    position: Tensor
    count: Tensor
    expert_ids: Tensor
    weights: Tensor


def chunk_rows(device: torch.device, row_elements: int) -> int:
    """Rows to work on at once: few for a CPU's cache, many to hide an accelerator's launches."""
    elements = 2**19 if device.type == "cpu" else 2**26
    return max(1, elements // max(1, row_elements))


def tokens(source: Tensor, hidden: int) -> Tensor:
    """The token rows of global indices ``source`` int64 [N], each in [0, 2^32): BF16 [N, hidden].

    The body is k/64 with k in [-128, 127]; the first 32 columns hold the index and survive FP8.
    Raises ValueError where the index does not fit into the row.
    """
    if hidden < SOURCE_COLUMNS:
        raise ValueError(
            f"hidden {hidden}: a token needs at least {SOURCE_COLUMNS} columns for its source id"
        )
    rows = torch.empty((len(source), hidden), dtype=torch.bfloat16, device=source.device)
    _fill(rows, _hash(source, 1), shift=24, scale=2.0**-6)
    bit = torch.arange(SOURCE_COLUMNS, device=source.device)
    rows[:, :SOURCE_COLUMNS] = (((source[:, None] >> bit) & 1) * 2 - 1).to(torch.bfloat16)
    return rows


def decode_source_ids(rows: Tensor) -> Tensor:
    """The global index that each token row [N, H] carries: int64 [N], -1 where it cannot be read."""
    signs = rows[:, :SOURCE_COLUMNS].float()
    # FP8 rounds by less than half of the magnitude; NaN fails both comparisons.
    readable = ((signs.abs() >= 0.5) & (signs.abs() <= 2.0)).all(dim=1)
    weight = 1 << torch.arange(SOURCE_COLUMNS, device=rows.device)
    index = ((signs > 0).long() * weight).sum(dim=1)
    return torch.where(readable, index, -1)


def messages(senders: Senders, hidden: int, most: int) -> Tensor:
    """The messages [N, hidden] BF16 that ``senders`` contribute; ``most`` is min(top_k, ep_size).

    Ordinary elements are m * u, m in [-64, 63], a hash of the column and of everything in ``senders`` that
    dispatch transports, so that wrong metadata changes nearly every column. The order of a row's experts does
    not matter. Any integers are accepted: a damaged exchange still gets messages, and fails the checks.
    """
    rows = torch.empty((len(senders.source), hidden), dtype=torch.bfloat16, device=senders.source.device)
    held = senders.expert_ids >= 0
    bits = senders.weights.contiguous().view(torch.int32).long()
    experts = _hash(_hash(senders.expert_ids, 2) ^ bits, 3)
    metadata = torch.where(held, experts, 0).sum(dim=1)
    _fill(rows, _hash(_hash(senders.source, 4) + _hash(senders.rank, 5) + metadata, 6), shift=25, scale=UNIT)
    columns = _canary_columns(hidden, most, rows.device)
    for count in range(3, most + 1):
        members = torch.nonzero(senders.count == count).squeeze(1)
        if len(members):
            pattern = _window(senders.source[members], len(columns), count)
            position = senders.position[members].clamp(0, count - 1)
            rows[members[:, None], columns] = _roles(pattern, position, count)
    return rows


def constant_messages(ranks: Tensor, plane: Tensor, hidden: int, ep_size: int) -> Tensor:
    """Rows [N, hidden] BF16 that rank ``ranks[i]`` stages in plane ``plane[i]``, whatever the routing.

    A row knows no token, so the canary roles go by rank number: of all triples of ranks, as many as half of
    the row holds, another window in each plane.
    """
    rows = torch.empty((len(ranks), hidden), dtype=torch.bfloat16, device=ranks.device)
    _fill(rows, _hash(_hash(ranks, 7) + _hash(plane, 8), 9), shift=25, scale=UNIT)
    columns = _canary_columns(hidden, ep_size, rows.device)
    if len(columns):
        rows[:, columns] = _roles(_window(plane, len(columns), ep_size), ranks, ep_size)
    return rows


def canary_width(hidden: int, contributors: int) -> int:
    """Canary columns of a row: three per triple of contributors, at most half of the row."""
    return min(3 * math.comb(contributors, 3), hidden // 2)


def _canary_columns(hidden: int, contributors: int, device: torch.device) -> Tensor:
    """Spread over the whole row: a kernel's vector tails and later column blocks have canaries too."""
    width = canary_width(hidden, contributors)
    return torch.arange(width, device=device) * hidden // max(1, width)


def _window(row: Tensor, width: int, contributors: int) -> Tensor:
    """Pattern number [N, width] of each canary column: all patterns, or another window for each ``row``."""
    total = 3 * math.comb(contributors, 3)
    # A stride coprime to the total visits every pattern, and neighbours in a window share few contributors.
    stride = next(step for step in range(round(total * 0.618), 2 * total) if math.gcd(step, total) == 1)
    column = torch.arange(width, device=row.device)
    return (row[:, None] % total * width + column) % total * stride % total


def _roles(pattern: Tensor, position: Tensor, contributors: int) -> Tensor:
    """What the contributor at ``position`` [N] sends where ``pattern`` [N, width] stands: BF16 [N, width]."""
    plus, one, minus = _patterns(contributors).to(pattern.device)[pattern].unbind(dim=-1)
    place = position[:, None]
    multiple = _CANARY * (plus == place).int() + (one == place).int() - _CANARY * (minus == place).int()
    return (multiple * UNIT).to(torch.bfloat16)


@lru_cache(maxsize=128)
def _patterns(contributors: int) -> Tensor:
    """The positions [3 * C(n, 3), 3] that send +256, 1, -256; exchanging the first two tells nothing new."""
    triples = torch.tensor(list(combinations(range(contributors), 3)))
    return torch.cat([triples, triples.roll(1, dims=1), triples.roll(2, dims=1)])


def _fill(rows: Tensor, keys: Tensor, shift: int, scale: float) -> None:
    """Fill with the top ``32 - shift`` bits, signed, of the hash of (row's key, column), times ``scale``."""
    halves = keys.contiguous().view(torch.int32).view(-1, 2)
    offset, factor = halves[:, :1], halves[:, 1:] | 1
    column = _column_hash(rows.shape[1], rows.device)
    step = chunk_rows(rows.device, rows.shape[1])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        hashed = column * factor[part]
        hashed += offset[part]
        hashed >>= shift
        rows[part] = hashed
        rows[part] *= scale


def _column_hash(hidden: int, device: torch.device) -> Tensor:
    """A different int32 for each column: every step is a bijection of 32-bit integers."""
    value = torch.arange(1, hidden + 1, device=device) * 0x9E3779B1 & _LOW_32
    value = (value ^ (value >> 15)) * 0x6C8E9CF5 & _LOW_32
    value ^= value >> 16
    return (value - 2**31).to(torch.int32)


def _hash(value: Tensor, stream: int) -> Tensor:
    """Mix int64 into int64, differently for each ``stream``; a bijection within one."""
    mixed = (value + stream * 0x2545F4914F6CDD1D % 2**62) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 32 & _LOW_32)) * 0x5851F42D4C957F2D
    mixed = (mixed ^ (mixed >> 32 & _LOW_32)) * 0x369DEA0F31A53F85
    return mixed ^ (mixed >> 32 & _LOW_32)
