"""Faults of what dispatch says of the tokens that it brought: ids, weights and counts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pytest_ep.oracle import expected
from pytest_ep.oracle.diagnosis.arrivals import LISTED
from pytest_ep.oracle.diagnosis.arrivals import Arrivals
from pytest_ep.oracle.diagnosis.evidence import Finding

PADS = (2, 4, 8, 16, 32, 64, 128, 256)


def ids(found: Arrivals) -> Finding | None:
    """Wrong expert ids, in any order within a row."""
    got, want = _in_order(found.received.expert_ids), _in_order(found.want.expert_ids)
    wrong = (got != want).any(dim=1) & found.known
    if not wrong.any():
        return None
    says = _best(_ids_explained(found, got, want), wrong, "other expert ids than were sent")
    return _finding("ids", f"{{ranks}} received {says}", found.source[wrong], len(wrong))


def _ids_explained(found: Arrivals, got: Tensor, want: Tensor) -> Iterator[tuple[str, Tensor]]:
    problem = found.problem
    bounds = problem.shape.owned(problem.ep_size)
    first = bounds[problem.rank]
    sent, _ = expected.routing(problem, found.source.clamp(min=0))
    held = want >= 0
    yield "no expert ids at all: every one masked", (got < 0).all(dim=1)
    yield "expert ids unmasked: those of other ranks' experts too", (got == _in_order(sent)).all(dim=1)
    if first:
        local = torch.where(held, want - first, -1)
        yield "local expert ids (global less the rank's first)", (got == local).all(dim=1)
    for rank, start in enumerate(bounds[:-1]):
        if rank != problem.rank:
            moved = torch.where(held, want - first + start, -1)
            yield f"expert ids off by {start - first:+d}: the block of rank {rank}", (got == moved).all(dim=1)
    subset = ((got[:, :, None] == want[:, None, :]).any(dim=2) | (got < 0)).all(dim=1)
    yield "only some of the expert ids", subset & ((got >= 0).sum(dim=1) < held.sum(dim=1))
    for by in (1, -1):
        yield f"expert ids off by {by:+d}", (got == torch.where(held, want + by, -1)).all(dim=1)
    foreign = (found.received.expert_ids >= 0) & ~found.mine
    kept = _in_order(torch.where(foreign, -1, found.received.expert_ids))
    yield "some expert ids of other ranks unmasked", (kept == want).all(dim=1) & foreign.any(dim=1)
    yield (
        "the expert ids of other rows: payload and metadata differ in order (slots taken for tokens?)",
        _is_one_of(got, _arriving_ids(found)),
    )


def weights(found: Arrivals) -> Finding | None:
    """Wrong weights, compared in the order of this rank's expert ids."""
    if found.received.weights is None:
        return None
    mine = torch.where(found.mine, found.received.expert_ids, -1)
    got, place = found.received.weights, mine.argsort(dim=1, descending=True, stable=True)
    got = got.gather(1, place)
    want = found.want.weights.gather(1, found.want.expert_ids.argsort(dim=1, descending=True, stable=True))
    wrong = (got.view(torch.int32) != want.view(torch.int32)).any(dim=1) & found.known
    if not wrong.any():
        return None
    says = _best(_weights_explained(found, got, want), wrong, "other weights than were sent")
    return _finding("weights", f"{{ranks}} received {says}", found.source[wrong], len(wrong))


def _weights_explained(found: Arrivals, got: Tensor, want: Tensor) -> Iterator[tuple[str, Tensor]]:
    _, sent = expected.routing(found.problem, found.source.clamp(min=0))
    assert found.received.weights is not None
    held = want != 0

    def same(values: Tensor) -> Tensor:
        fits, right = (torch.isclose(each, values, rtol=1e-6, atol=0.0).all(dim=1) for each in (got, want))
        return fits & ~right

    yield "weights that are not finite", ~got.isfinite().all(dim=1)
    yield "weights of zero", (got == 0).all(dim=1)
    yield "weights not zeroed for masked ids", (found.received.weights == sent).all(dim=1)
    yield "weights of one", same(held.float())
    yield "weights normalised over this rank's experts", same(want / want.sum(dim=1, keepdim=True))
    yield "weights squared: gates applied to them", same(want**2)
    yield "weights rounded to BF16", (got == want.to(torch.bfloat16).float()).all(dim=1)
    ratio = got / want.clamp(min=torch.finfo(torch.float32).tiny)
    high = torch.where(held, ratio, -torch.inf).amax(dim=1, keepdim=True)
    changed = got.contiguous().view(torch.int32) ^ want.contiguous().view(torch.int32)
    single = (changed != 0) & (changed & (changed - 1) == 0)
    yield "weights with one bit changed", single.sum(dim=1) == (changed != 0).sum(dim=1)
    differs = (got != want).any(dim=1)
    if bool(differs.any()):
        factor = float(high[differs][0])
        yield f"weights multiplied by {factor:.4g}", same(want * factor)
    everyone = torch.nonzero(found.arriving).squeeze(1)
    theirs = expected.arrival(found.problem, everyone).weights
    in_order = got.sort(dim=1)[0]
    yield "weights in another order than the expert ids", (in_order == want.sort(dim=1)[0]).all(dim=1)
    yield "the weights of other rows", _is_one_of(in_order, theirs.sort(dim=1)[0])
    yield "weights not normalised: each row times a factor of its own", same(want * high)


def counts(found: Arrivals) -> Finding | None:
    """Wrong counts of assignments to this rank's experts."""
    got, want = found.received.expert_counts, expected.expert_counts(found.problem)
    wrong = got != want
    if not wrong.any():
        return None
    says = next((text for text, values in _counts_explained(found, want) if torch.equal(got, values)), "")
    if not says:
        first = int(torch.nonzero(wrong)[0])
        expert = found.problem.shape.owned(found.problem.ep_size)[found.problem.rank] + first
        says = f"wrong: of expert {expert} {int(got[first])}, not {int(want[first])}"
    return Finding("counts", f"expert counts on {{ranks}} are {says}", int(wrong.sum()), len(want), ())


def _counts_explained(found: Arrivals, want: Tensor) -> Iterator[tuple[str, Tensor]]:
    problem, received = found.problem, found.received
    bounds = problem.shape.owned(problem.ep_size)
    first, end = bounds[problem.rank], bounds[problem.rank + 1]
    mine = torch.where(found.mine, received.expert_ids - first, end - first)

    def count(which: Tensor) -> Tensor:
        return torch.bincount(which.flatten(), minlength=end - first + 1)[: end - first]

    yield "zero", torch.zeros_like(want)
    yield "those of the rows that were received", count(mine)
    yield "rows, not assignments: each counts for one of its experts", count(mine.amin(dim=1))
    last = torch.where(found.mine, received.expert_ids - first, -1).amax(dim=1)
    yield "rows, not assignments: each counts for one of its experts", count(last.clamp(min=0))
    place = found.mine.int().argmax(dim=1, keepdim=True)
    yield "rows, not assignments: each counts for its first expert", count(mine.gather(1, place))
    yield "rows, not assignments: all of them", torch.full_like(want, len(received.tokens))
    for pad in PADS:
        yield f"padded to multiples of {pad}", (want + pad - 1) // pad * pad
    everyone = torch.bincount(
        torch.from_numpy(problem.trace.expert_ids).to(want.device).flatten(), minlength=problem.shape.experts
    )
    for rank in range(problem.ep_size):
        yield f"those of rank {rank}'s experts", everyone[bounds[rank] : bounds[rank + 1]]
    yield (
        "of this rank's own tokens only",
        torch.bincount(problem.expert_ids.long().flatten(), minlength=problem.shape.experts)[first:end],
    )
    yield "running sums", want.cumsum(0)
    yield "running sums", want.cumsum(0) - want
    yield "doubled", 2 * want


def _best(explained: Iterator[tuple[str, Tensor]], wrong: Tensor, otherwise: str) -> str:
    """The first explanation with the most of the wrong rows; one that has few of them explains nothing."""
    counts = [(text, int((rows & wrong).sum())) for text, rows in explained]
    text, most = max(counts, key=lambda each: each[1])
    return text if 2 * most > int(wrong.sum()) else otherwise


def _arriving_ids(found: Arrivals) -> Tensor:
    everyone = torch.nonzero(found.arriving).squeeze(1)
    return _in_order(expected.arrival(found.problem, everyone).expert_ids)


def _is_one_of(rows: Tensor, known: Tensor) -> Tensor:
    """Which rows [N, K] are among ``known`` [M, K]: bool [N]."""
    both = torch.cat([known, rows])
    _, number = torch.unique(both, dim=0, return_inverse=True)
    return torch.isin(number[len(known) :], number[: len(known)])


def _in_order(expert_ids: Tensor) -> Tensor:
    return expert_ids.sort(dim=1, descending=True).values


def _finding(fault: str, says: str, tokens: Tensor, of: int) -> Finding:
    return Finding(fault, says, len(tokens), of, tuple(tokens[:LISTED].tolist()))
