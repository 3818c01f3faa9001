"""The table of faults: dispatches that lose, misplace or misdescribe tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from pytest_ep.backends.base import Received
from pytest_ep.backends.torch_a2a import Exchange
from pytest_ep.workload import contents
from pytest_ep.workload.problem import Problem
from tests.faults.diagnosed import At
from tests.faults.diagnosed import Fault
from tests.faults.diagnosed import Faulty


def everywhere(ep_size: int, tokens: int) -> str:
    return "every rank has an expert of the culprit's only token" if (ep_size, tokens) == (2, 1) else ""


def weights_of(received: Received) -> Tensor:
    assert received.weights is not None
    return received.weights


def first_lost(backend: Faulty, problem: Problem) -> Exchange:
    """Token 0 is not sent to the first rank that it should go to."""
    ids = problem.expert_ids.clone()
    owners = backend._owners[ids[0]]
    ids[0, owners == owners[0]] = -1
    return backend.plain_dispatch(replace(problem, expert_ids=ids))


def all_lost(backend: Faulty, problem: Problem) -> Exchange:
    """Nothing is sent to rank 0."""
    ids = problem.expert_ids
    return backend.plain_dispatch(replace(problem, expert_ids=ids.where(backend._owners[ids] != 0, -1)))


def first_doubled(backend: Faulty, problem: Problem) -> Exchange:
    owners = backend._owners[problem.expert_ids[0]]
    again = problem.expert_ids[0].where(owners == owners[0], -1)
    longer = replace(
        problem,
        tokens_by_rank=tuple(
            tokens + (rank == problem.rank) for rank, tokens in enumerate(problem.tokens_by_rank)
        ),
        x=torch.cat([problem.x, problem.x[:1]]),
        expert_ids=torch.cat([problem.expert_ids, again[None]]),
        weights=torch.cat([problem.weights, problem.weights[:1]]),
    )
    handle = backend.plain_dispatch(longer)
    return replace(handle, order=handle.order % problem.tokens)


def astray(backend: Faulty, problem: Problem) -> Exchange:
    """A token goes to a rank that owns none of its experts instead of one that does."""
    ids, bounds = problem.expert_ids.clone(), problem.shape.owned(problem.ep_size)
    for token in range(problem.tokens):
        owners = backend._owners[ids[token]].tolist()
        if others := sorted(set(range(problem.ep_size)) - set(owners)):
            moved = torch.tensor(owners) == owners[0]
            ids[token, moved] = bounds[others[0]] + torch.arange(int(moved.sum()))
            break
    return backend.plain_dispatch(replace(problem, expert_ids=ids))


def with_rows(received: Received, tokens: Tensor, ids: Tensor, weights: Tensor) -> Received:
    return replace(
        received,
        tokens=torch.cat([received.tokens, tokens]),
        expert_ids=torch.cat([received.expert_ids, ids]),
        weights=torch.cat([weights_of(received), weights]),
    )


def zero_padding(at: At, received: Received) -> Received:
    """Three slots that hold nothing, their ids the sentinel."""
    hidden, top_k = received.tokens.shape[1], received.expert_ids.shape[1]
    return with_rows(
        received,
        torch.zeros(3, hidden, dtype=torch.bfloat16),
        torch.full((3, top_k), -1),
        torch.zeros(3, top_k),
    )


def old_padding(at: At, received: Received) -> Received:
    """A slot that still holds an earlier token, its ids the sentinel."""
    return with_rows(
        received,
        contents.tokens(torch.zeros(1, dtype=torch.int64), received.tokens.shape[1]),
        torch.full((1, received.expert_ids.shape[1]), -1),
        torch.zeros(1, received.expert_ids.shape[1]),
    )


def bit_flipped(at: At, received: Received) -> Received:
    received.tokens.view(torch.int16)[0, 200] ^= 1 << 3
    return received


def sign_flipped(at: At, received: Received) -> Received:
    """In the columns that say which token it is."""
    received.tokens[0, 0] *= -1
    return received


def tail_cut(at: At, received: Received) -> Received:
    received.tokens[:, -16:] = 0
    return received


def tail_of_another(at: At, received: Received) -> Received:
    source = contents.decode_source_ids(received.tokens)
    other = contents.tokens((source + 1) % sum(at.problem.tokens_by_rank), received.tokens.shape[1])
    received.tokens[:, -128:] = other[:, -128:]
    return received


def rounded(at: At, received: Received) -> Received:
    return replace(received, tokens=received.tokens.to(torch.float8_e4m3fn).to(torch.bfloat16))


def scaled(at: At, received: Received) -> Received:
    """A scale that was not divided out again, where it leaves the source id readable."""
    received.tokens[:, contents.SOURCE_COLUMNS :] *= 4
    return received


def nan_row(at: At, received: Received) -> Received:
    received.tokens[0] = math.nan
    return received


def zero_row(at: At, received: Received) -> Received:
    received.tokens[-1] = 0
    return received


def unmasked(at: At, received: Received) -> Received:
    ids = at.handle.metadata[:, : at.problem.shape.top_k].long()
    return replace(received, expert_ids=ids)


def local(at: At, received: Received) -> Received:
    first = at.problem.shape.owned(at.problem.ep_size)[at.problem.rank]
    ids = received.expert_ids
    return replace(received, expert_ids=torch.where(ids >= 0, ids - first, -1))


def off_by_a_block(at: At, received: Received) -> Received:
    bounds = at.problem.shape.owned(at.problem.ep_size)
    ids = received.expert_ids
    other = (at.problem.rank + 1) % at.problem.ep_size
    return replace(
        received, expert_ids=torch.where(ids >= 0, ids - bounds[at.problem.rank] + bounds[other], -1)
    )


def masked(at: At, received: Received) -> Received:
    return replace(received, expert_ids=torch.full_like(received.expert_ids, -1))


def first_choice_only(at: At, received: Received) -> Received:
    place = (received.expert_ids >= 0).int().argmax(dim=1, keepdim=True)
    ids = torch.full_like(received.expert_ids, -1).scatter(1, place, received.expert_ids.gather(1, place))
    return replace(received, expert_ids=ids)


def by_slot(at: At, received: Received) -> Received:
    """Row i is taken for token i: metadata in the order of tokens, payload in that of slots."""
    slots = torch.arange(len(received.tokens) - 1, -1, -1)
    return replace(received, tokens=received.tokens[slots])


def weightless(at: At, received: Received) -> Received:
    return replace(received, weights=torch.zeros_like(weights_of(received)))


def weights_unmasked(at: At, received: Received) -> Received:
    top_k = at.problem.shape.top_k
    return replace(received, weights=at.handle.metadata[:, top_k:].contiguous().view(torch.float32))


def normalised(at: At, received: Received) -> Received:
    weights = weights_of(received)
    return replace(received, weights=weights / weights.sum(dim=1, keepdim=True))


def raw(at: At, received: Received) -> Received:
    """Gates before they were divided by their sum: each row times a factor of its own."""
    factor = 1 + torch.arange(len(received.tokens))[:, None] * 0.37 + 1.5
    return replace(received, weights=weights_of(received) * factor)


def thirds(at: At, received: Received) -> Received:
    return replace(received, weights=weights_of(received) / 3)


def squared(at: At, received: Received) -> Received:
    return replace(received, weights=weights_of(received) ** 2)


def in_bf16(at: At, received: Received) -> Received:
    return replace(received, weights=weights_of(received).to(torch.bfloat16).float())


def weight_bit(at: At, received: Received) -> Received:
    place = int((received.expert_ids[0] >= 0).nonzero()[0])
    weights_of(received).view(torch.int32)[0, place] ^= 1
    return received


def weights_rolled(at: At, received: Received) -> Received:
    """Another row's ids and weights keep together nowhere: weights move by one row."""
    return replace(received, weights=weights_of(received).roll(1, dims=0))


def count_rows(at: At, received: Received) -> Received:
    first = at.problem.shape.owned(at.problem.ep_size)[at.problem.rank]
    ids = first_choice_only(at, received).expert_ids
    counts = torch.bincount(ids[ids >= 0] - first, minlength=len(received.expert_counts))
    return replace(received, expert_counts=counts)


def counts_padded(at: At, received: Received) -> Received:
    return replace(received, expert_counts=(received.expert_counts + 15) // 16 * 16)


def counts_of_another(at: At, received: Received) -> Received:
    problem = at.problem
    bounds = problem.shape.owned(problem.ep_size)
    ids = torch.from_numpy(problem.trace.expert_ids).flatten()
    return replace(received, expert_counts=torch.bincount(ids, minlength=problem.shape.experts)[: bounds[1]])


def counts_own(at: At, received: Received) -> Received:
    first, end = at.problem.shape.owned(at.problem.ep_size)[at.problem.rank :][:2]
    ids = at.problem.expert_ids.flatten()
    return replace(received, expert_counts=torch.bincount(ids, minlength=at.problem.shape.experts)[first:end])


def counts_running(at: At, received: Received) -> Received:
    return replace(received, expert_counts=received.expert_counts.cumsum(0))


def one_more(at: At, received: Received) -> Received:
    received.expert_counts[0] += 1
    return received


def without_counts(at: At, received: Received) -> Received:
    return replace(received, expert_counts=None)  # type: ignore[arg-type]


def without_weights(at: At, received: Received) -> Received:
    return replace(received, weights=None)


def bare(at: At, received: Received) -> Received:
    return received.tokens  # type: ignore[return-value]


def planes_shaped(at: At, received: Received) -> Received:
    return replace(received, tokens=received.tokens[None])


def refusing(at: At, received: Received) -> Received:
    raise RuntimeError("the wire came off")


def overwriting(backend: Faulty, problem: Problem) -> Exchange:
    handle = backend.plain_dispatch(problem)
    problem.x[-1, -1] += 1
    return handle


DISPATCH_FAULTS = (
    Fault("first_lost", "source_set", r"did not receive token \d+ of rank 1", dispatch=first_lost),
    Fault(
        "all_lost", "source_set", "rank 0 did not receive (any token|token 1) of rank 1", dispatch=all_lost
    ),
    Fault(
        "first_doubled", "source_set", r"received token \d+ of rank 1 more than once", dispatch=first_doubled
    ),
    Fault(
        "astray",
        "source_set",
        r"token \d+ misrouted: sent to rank \d instead of rank \d",
        dispatch=astray,
        unseen=everywhere,
    ),
    Fault("zero_padding", "source_set", "rank 1 read 3 rows of padding as tokens", receive=zero_padding),
    Fault("old_padding", "source_set", "rank 1 read a row of padding as tokens", receive=old_padding),
    Fault("payload_bit", "payload", "with 1 element changed, column 200: one bit each", receive=bit_flipped),
    Fault("source_bit", "source_set", "with 1 element changed, column 0: one bit each", receive=sign_flipped),
    Fault("tail_cut", "payload", "columns 496 to 511: they are zero", receive=tail_cut),
    Fault(
        "tail_of_another",
        "payload",
        r"columns 38\d to 511: token \d+ has token \d+'s",
        receive=tail_of_another,
    ),
    Fault("rounded", "payload", "rounded to FP8 e4m3fn", receive=rounded),
    Fault("scaled", "payload", "multiplied by 4", receive=scaled),
    Fault("nan_row", "source_set", "rank 1 received rows that are not finite", receive=nan_row),
    Fault("zero_row", "source_set", "rank 1 received rows of zeros", receive=zero_row),
    Fault("unmasked", "metadata", "expert ids unmasked: those of other ranks", receive=unmasked),
    Fault("local", "metadata", "local expert ids", receive=local),
    Fault(
        "off_by_a_block",
        "metadata",
        r"expert ids off by [+-]\d+: the block of rank|local expert ids",
        receive=off_by_a_block,
    ),
    Fault("masked", "metadata", "no expert ids at all", receive=masked),
    Fault("first_choice_only", "metadata", "only some of the expert ids", receive=first_choice_only),
    Fault("by_slot", "metadata", "expert ids of other rows: .*slots taken for tokens", receive=by_slot),
    Fault("weightless", "weights", "weights of zero", receive=weightless),
    Fault("weights_unmasked", "weights", "weights not zeroed for masked ids", receive=weights_unmasked),
    Fault("normalised", "weights", "weights normalised over this rank's experts", receive=normalised),
    Fault("raw", "weights", "weights not normalised|weights multiplied by", receive=raw),
    Fault("thirds", "weights", "weights multiplied by 0.3333", receive=thirds),
    Fault("squared", "weights", "weights squared", receive=squared),
    Fault("in_bf16", "weights", "weights rounded to BF16", receive=in_bf16),
    Fault("weight_bit", "weights", "weights with one bit changed", receive=weight_bit),
    Fault("weights_rolled", "weights", "the weights of other rows", receive=weights_rolled),
    Fault("count_rows", "counts", "rows, not assignments", receive=count_rows),
    Fault("counts_padded", "counts", "padded to multiples of 16", receive=counts_padded),
    Fault("counts_of_another", "counts", "those of rank 0's experts", receive=counts_of_another),
    Fault("counts_own", "counts", "this rank's own tokens only", receive=counts_own),
    Fault("counts_running", "counts", "running sums", receive=counts_running),
    Fault("one_more", "counts", r"of expert \d+ \d+, not \d+", receive=one_more),
    Fault("without_counts", "counts", "counts on rank 1: none received", receive=without_counts),
    Fault("without_weights", "weights", "weights on rank 1: none received", receive=without_weights),
    Fault("bare", "receive", "rank 1 could not answer .*no attribute 'tokens'", receive=bare),
    Fault(
        "planes_shaped",
        "payload",
        r"rank 1 could not answer .*bfloat16 \[1, \d+, 512\]",
        receive=planes_shaped,
    ),
    Fault("refusing", "receive", "rank 1 could not answer .*the wire came off", receive=refusing),
    Fault("overwriting", "inputs", "wrote to its inputs on rank 1: 1 element of x", dispatch=overwriting),
)
