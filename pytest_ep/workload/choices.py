"""The experts that tokens choose, by kind of routing: ids [n, K], distinct in a row.

Each kind is drawn from the counter of stream 0, one value for a token's slot, but for balanced, which draws
permutations from stream 2. The experts that zipf and hot favour come first in a permutation of stream 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pytest_ep.matrix.routing import Routing
from pytest_ep.matrix.shapes import Shape
from pytest_ep.workload.counter import Counter

EXPERT_STREAM = 0
ROUND_STREAM = 2
FAVOUR_STREAM = 3

ZIPF_UNIT = 2**32
"""The weight of zipf's most popular expert: weights are whole numbers, and every machine draws the same."""

Ids = npt.NDArray[np.int64]


def generate(routing: Routing, counter: Counter, shape: Shape, first: int, tokens: int) -> Ids:
    """The choices of tokens ``first`` to ``first + tokens``, whatever their ranks: any kind but local."""
    if routing.kind == "uniform":
        return _uniform(counter, shape, first, tokens)
    if routing.kind == "balanced":
        return _balanced(counter, shape, first, tokens)
    if routing.kind == "zipf":
        return _zipf(counter, shape, first, tokens, routing.parameter)
    if routing.kind == "hot":
        return _hot(counter, shape, first, tokens, int(routing.parameter))
    raise ValueError(f"no routing of kind {routing.kind!r} is generated from tokens alone")


def local(points: npt.NDArray[np.uint64], shape: Shape, tokens_by_rank: Sequence[int]) -> Ids:
    """Half of a token's choices are experts of its own rank, the others of other ranks.

    As hot, where the own rank's experts are the hot ones: the slots k in which k + token is odd are theirs.
    ``points`` [N, K] are the counters of the group's tokens, in the order of ranks.
    """
    bounds = np.asarray(shape.owned(len(tokens_by_rank)))
    rank = np.repeat(np.arange(len(tokens_by_rank)), tokens_by_rank)
    low, high = _halves(0, shape, np.diff(bounds)[rank])
    places = _draw(points, np.arange(shape.experts + 1), low, high)
    # Places begin with the own rank's experts and go round from there.
    ids: Ids = (places + bounds[rank][:, None]) % shape.experts
    return ids


def _uniform(counter: Counter, shape: Shape, first: int, tokens: int) -> Ids:
    """The counter modulo the experts, at the first attempt that no earlier slot of the token used."""
    points = counter.grid(first, tokens, shape.top_k, EXPERT_STREAM)
    ids: Ids = (points % np.uint64(shape.experts)).astype(np.int64)
    in_order = np.sort(ids, axis=1)
    for row in np.flatnonzero((in_order[:, 1:] == in_order[:, :-1]).any(axis=1)):
        ids[row] = _distinct(counter, first + int(row), shape)
    return ids


def _distinct(counter: Counter, token: int, shape: Shape) -> list[int]:
    """One token's experts, with a further attempt wherever an earlier slot has the expert already."""
    chosen: list[int] = []
    for slot in range(shape.top_k):
        attempt = 0
        while (expert := counter.at(token, slot, attempt, EXPERT_STREAM) % shape.experts) in chosen:
            attempt += 1
        chosen.append(expert)
    return chosen


def _balanced(counter: Counter, shape: Shape, first: int, tokens: int) -> Ids:
    """Assignments, in order of token and slot, go through one permutation of all experts after another.

    So after any number of assignments an expert has as many as any other, or one more. A token that begins
    in one permutation and ends in the next takes from that the first experts that it does not have yet.
    """
    experts, top_k = shape.experts, shape.top_k
    # Every so many assignments a permutation ends where a token does: what is mended before stays before.
    span = math.lcm(experts, top_k)
    period, rounds = span // top_k, span // experts
    begin, end = first // period, -(-(first + tokens) // period)
    points = counter.grid(begin * rounds, (end - begin) * rounds, experts, ROUND_STREAM)
    spans = np.argsort(points, axis=1, kind="stable").reshape(end - begin, span)
    for stream in spans if rounds > 1 else ():
        for start in range(experts, span, experts):
            _mend(stream, start, start % top_k, shape)
    skipped = first - begin * period
    return spans.reshape(-1, top_k)[skipped : skipped + tokens]


def _mend(stream: Ids, start: int, has: int, shape: Shape) -> None:
    """Let the permutation at ``start`` begin with experts other than the ``has`` before it."""
    row = stream[start : start + shape.experts]
    fits = ~np.isin(row, stream[start - has : start])
    fits &= np.cumsum(fits) <= shape.top_k - has
    row[:] = np.concatenate([row[fits], row[~fits]])


def _zipf(counter: Counter, shape: Shape, first: int, tokens: int, exponent: float) -> Ids:
    """Slot by slot in proportion to 1 / place^S among the experts that the token does not have yet."""
    weights = [max(1, round(ZIPF_UNIT / place**exponent)) for place in range(1, shape.experts + 1)]
    starts = np.concatenate([[0], np.cumsum(np.array(weights, dtype=np.int64))])
    points = counter.grid(first, tokens, shape.top_k, EXPERT_STREAM)
    low = np.zeros(points.shape, dtype=np.int64)
    return _favoured(counter, shape)[_draw(points, starts, low, low + shape.experts)]


def _hot(counter: Counter, shape: Shape, first: int, tokens: int, hot: int) -> Ids:
    """Half of a token's choices are hot experts, the others cold, each half uniform.

    The slots k in which k + token is odd are hot, as far as there are ``hot`` experts for one token, and the
    others cold, as far as there are cold ones.
    """
    points = counter.grid(first, tokens, shape.top_k, EXPERT_STREAM)
    low, high = _halves(first, shape, np.full(tokens, hot))
    return _favoured(counter, shape)[_draw(points, np.arange(shape.experts + 1), low, high)]


def _favoured(counter: Counter, shape: Shape) -> Ids:
    """The experts in the order in which they are favoured."""
    points = counter.grid(0, 1, shape.experts, FAVOUR_STREAM)[0]
    return np.argsort(points, kind="stable").astype(np.int64)


def _halves(first: int, shape: Shape, inner: Ids) -> tuple[Ids, Ids]:
    """The places, [low, high), that each slot [n, K] draws from: half from a token's first ``inner`` [n]."""
    token = first + np.arange(len(inner))
    used = np.zeros(len(inner), dtype=np.int64)
    low = np.zeros((len(inner), shape.top_k), dtype=np.int64)
    high = np.full_like(low, shape.experts)
    for slot in range(shape.top_k):
        no_outer_left = slot - used >= shape.experts - inner
        within = np.where((slot + token) % 2 == 1, used < inner, no_outer_left)
        low[:, slot] = np.where(within, 0, inner)
        high[:, slot] = np.where(within, inner, shape.experts)
        used += within
    return low, high


def _draw(points: npt.NDArray[np.uint64], starts: Ids, low: Ids, high: Ids) -> Ids:
    """Places [n, K], distinct in a row: slot k's in proportion to length among [low, high) less those taken.

    Place p lies from ``starts[p]`` to ``starts[p + 1]``.
    """
    tokens, slots = points.shape
    lengths = np.diff(starts)
    chosen = np.empty((tokens, slots), dtype=np.int64)
    for slot in range(slots):
        first, end = low[:, slot], high[:, slot]
        taken = np.sort(chosen[:, :slot], axis=1)
        inside = (taken >= first[:, None]) & (taken < end[:, None])
        gone = np.where(inside, lengths[taken], 0)
        left = starts[end] - starts[first] - gone.sum(axis=1)
        at = starts[first] + (points[:, slot] % left.astype(np.uint64)).astype(np.int64)
        for column in range(slot):  # ascending: a place that is taken is stepped over
            at += np.where(at >= starts[taken[:, column]], gone[:, column], 0)
        chosen[:, slot] = np.searchsorted(starts, at, side="right") - 1
    return chosen
