"""The table of faults: combines that add, place or return wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pytest_ep.oracle import expected
from pytest_ep.oracle import reduction
from pytest_ep.oracle.diagnosis import arithmetic
from pytest_ep.oracle.diagnosis.scene import only
from pytest_ep.oracle.reduction import Contributions
from pytest_ep.workload import contents
from tests.faults.diagnosed import CULPRIT
from tests.faults.diagnosed import DOMAIN
from tests.faults.diagnosed import LADDER
from tests.faults.diagnosed import At
from tests.faults.diagnosed import Fault

VALUES = "combine_values"
FP32 = reduction.rank_sum_fp32


def two_ranks(ep_size: int, tokens: int) -> str:
    return "two contributors: every reduction gives the same" if ep_size == 2 else ""


def exact_sums(ep_size: int, tokens: int) -> str:
    return "sums of up to four messages are BF16 numbers: nothing to round" if ep_size <= 4 else ""


def one_token(ep_size: int, tokens: int) -> str:
    return "a rank has one token: no other to exchange it with" if tokens == 1 else ""


def first_case(ep_size: int, tokens: int) -> str:
    return "no earlier case" if tokens == min(LADDER) else ""


def ladder_end(ep_size: int, tokens: int) -> str:
    return "T is the largest of the ladder: the sizes agree" if tokens == max(LADDER) else ""


def no_padding(ep_size: int, tokens: int) -> str:
    return "every rank has an expert of the culprit's only token" if (ep_size, tokens) == (2, 1) else ""


Add = Callable[[At, Contributions], Tensor]


def follows(name: str) -> Add:
    return lambda at, given: dict(arithmetic.models(at.problem.ep_size))[name](given)


def of_pairs(keep: Callable[[At, Contributions], Tensor]) -> Add:
    return lambda at, given: FP32(only(given, keep(at, given)))


def times(factor: Callable[[At, Contributions], Tensor]) -> Add:
    """Each message, in FP32, times its factor [P]."""
    return lambda at, given: FP32(replace(given, rows=given.rows.float() * factor(at, given)[:, None]))


def constant(value: float) -> Callable[[At, Contributions], Tensor]:
    return lambda at, given: torch.full((len(given.rows),), value)


def gates(at: At, given: Contributions) -> Tensor:
    here = at.backend._owners[at.problem.expert_ids[given.token]] == given.rank[:, None]
    return torch.where(here, at.problem.weights[given.token], 0.0).sum(dim=1)


def choices(at: At, given: Contributions) -> Tensor:
    here = at.backend._owners[at.problem.expert_ids[given.token]] == given.rank[:, None]
    return here.sum(dim=1).float()


def last_rank(at: At, given: Contributions) -> Tensor:
    highest = given.rank.new_zeros(given.tokens).scatter_reduce(0, given.token, given.rank, "amax")
    return given.rank == highest[given.token]


def mean(at: At, combined: Tensor) -> Tensor:
    ids = at.problem.expert_ids.long()
    pairs = expected.contributors(ids, expected.expert_bounds(at.problem))
    return (combined.float() / torch.bincount(pairs.token)[:, None]).to(torch.bfloat16)


def stepped(at: At, messages: Tensor) -> Tensor:
    messages.view(torch.int16)[messages != 0] += 1
    return messages


def result_stepped(at: At, combined: Tensor) -> Tensor:
    combined.view(torch.int16)[combined != 0] += 1
    return combined


def flipped(at: At, combined: Tensor) -> Tensor:
    combined.view(torch.int16)[-1, 77] ^= 1 << 7
    return combined


def not_a_number(at: At, combined: Tensor) -> Tensor:
    combined[-1, 77] = math.nan
    return combined


def overflowing(at: At, combined: Tensor) -> Tensor:
    combined[combined > 0] = math.inf
    return combined


def last_row_unwritten(at: At, combined: Tensor) -> Tensor:
    combined[-1] = 0
    return combined


def tail_unwritten(at: At, combined: Tensor) -> Tensor:
    combined[:, -100:] = 0
    return combined


def after_timing(at: At, combined: Tensor) -> Tensor:
    """What the oracle returns after timing is the last timed output."""
    if at.timed:
        at.backend.kept["timed"] = combined
    return at.backend.kept["timed"] if at.backend.combines and not at.timed else combined


def in_timing(at: At, combined: Tensor) -> Tensor:
    if not at.timed:
        at.backend.kept["oracle"] = combined
    return at.backend.kept["oracle"] if at.timed else combined


def not_cleared(at: At, combined: Tensor) -> Tensor:
    if at.timed:
        at.backend.kept["timed"] = combined
    elif at.backend.combines:
        combined = (combined.float() + at.backend.kept["timed"].float()).to(torch.bfloat16)
    return combined


def of_earlier_case(at: At, combined: Tensor) -> Tensor:
    """The first oracle of a case returns what the case before left, where it is long enough to have."""
    right, before = combined.clone(), at.backend.kept.get("case")
    if before is not None and not at.timed and not at.backend.combines and len(before) < len(combined):
        combined[: len(before)] = before
    if not at.timed:
        at.backend.kept["case"] = right
    return combined


def dispatched(at: At, messages: Tensor) -> Tensor:
    return at.handle.tokens


def rotated(at: At, combined: Tensor) -> Tensor:
    return combined.roll(1, dims=0)


def some_blocks(at: At, combined: Tensor) -> Tensor:
    combined[:, 128:256] = combined[:, 128:256].flip(0)
    return combined


def turned(at: At, messages: Tensor) -> Tensor:
    return messages.flip(0)


def in_planes(at: At, messages: Tensor) -> Tensor:
    """Rows rotated within each source rank's plane."""
    return torch.cat([part.roll(1, dims=0) for part in torch.split(messages, at.handle.received)])


def by_ladder(at: At, messages: Tensor) -> Tensor:
    """Planes as far apart as the ladder's largest T asks for, read as far apart as this T does."""
    planes = torch.zeros(at.problem.ep_size * at.backend.max_tokens, messages.shape[1], dtype=messages.dtype)
    for rank, part in enumerate(torch.split(messages, at.handle.received)):
        planes[rank * at.backend.max_tokens :][: len(part)] = part
    return torch.cat(
        [planes[rank * at.problem.tokens :][:count] for rank, count in enumerate(at.handle.received)]
    )


def with_padding(at: At, given: Contributions) -> Tensor:
    """Adds, for every rank, whether it has the token or not, what is in its slot: timing's row."""
    right = FP32(given)
    if at.timed or not at.backend.combines:
        return right
    member = torch.zeros(given.tokens, at.problem.ep_size, dtype=torch.bool)
    member[given.token, given.rank] = True
    token, rank = torch.nonzero(~member, as_tuple=True)
    left = contents.constant_messages(rank, torch.zeros_like(rank), given.rows.shape[1], at.problem.ep_size)
    joined = replace(
        given,
        rows=torch.cat([given.rows, left]),
        token=torch.cat([given.token, token]),
        rank=torch.cat([given.rank, rank]),
        choice=torch.cat([given.choice, torch.zeros_like(rank)]),
    )
    return FP32(joined)


def neighbours(at: At, combined: Tensor) -> Tensor:
    return combined.view(len(combined), -1, 2).flip(2).reshape(combined.shape)


COMBINE_FAULTS = (
    Fault(
        "slot_tree",
        VALUES,
        "follows topk-slot-tree, not rank-sum-fp32",
        add=follows("topk-slot-tree"),
        everyone=True,
        unseen=two_ranks,
    ),
    Fault(
        "fp32_on_tree",
        VALUES,
        "follows rank-sum-fp32, not topk-slot-tree",
        add=follows("rank-sum-fp32"),
        declared="topk-slot-tree",
        everyone=True,
        unseen=two_ranks,
    ),
    Fault(
        "two_level",
        VALUES,
        r"follows two-level \(domains of 2\)",
        add=lambda at, given: reduction.two_level(given, DOMAIN),
        everyone=True,
        unseen=two_ranks,
    ),
    Fault(
        "not_narrowed",
        VALUES,
        "without the narrowing of each domain",
        add=follows("rank-sum-fp32"),
        declared="two-level",
        everyone=True,
        unseen=two_ranks,
    ),
    Fault(
        "sequential",
        VALUES,
        "sequential BF16 sum in choice order",
        add=follows("a sequential BF16 sum in choice order"),
        everyone=True,
        unseen=two_ranks,
    ),
    Fault(
        "sequential_by_rank",
        VALUES,
        "sequential BF16 sum in rank order",
        add=follows("a sequential BF16 sum in rank order"),
        everyone=True,
        unseen=two_ranks,
    ),
    Fault(
        "truncating",
        "bit_exact",
        "rank-sum-fp32 truncated",
        add=follows("rank-sum-fp32 truncated to BF16"),
        everyone=True,
        unseen=exact_sums,
    ),
    Fault(
        "rank_missing",
        VALUES,
        "the message of rank 1 is missing",
        add=of_pairs(lambda at, given: given.rank != CULPRIT),
        everyone=True,
    ),
    Fault(
        "own_missing",
        VALUES,
        "each token's own rank is missing",
        add=of_pairs(lambda at, given: given.rank != at.problem.rank),
        everyone=True,
    ),
    Fault(
        "rank_doubled",
        VALUES,
        "rank 1 was added twice",
        add=times(lambda at, given: 1.0 + (given.rank == CULPRIT).float()),
        everyone=True,
    ),
    Fault(
        "last_alone",
        VALUES,
        "(the last contributing rank|rank 1) stands for the sum",
        add=of_pairs(last_rank),
        everyone=True,
    ),
    Fault("per_choice", VALUES, "once for each of the token's choices", add=times(choices), everyone=True),
    Fault("gated", VALUES, "gate weights were applied to the messages:", add=times(gates)),
    Fault(
        "gated_twice",
        VALUES,
        "gate weights were applied to the messages twice",
        add=times(lambda at, given: gates(at, given) ** 2),
    ),
    Fault("halved", VALUES, "common factor: 1/2", add=times(constant(0.5))),
    Fault("doubled_sum", VALUES, "common factor: 2", add=times(constant(2.0))),
    Fault("mean", VALUES, "a mean", give=mean, everyone=True),
    Fault("message_step", VALUES, "rank 1 is one BF16 step away", stage=stepped),
    Fault("result_step", "bit_exact", "results are one BF16 step away", give=result_stepped),
    Fault("bit_flipped", VALUES, "one bit of each wrong result", give=flipped),
    Fault("nan", VALUES, "combine returned NaN", give=not_a_number),
    Fault("infinite", VALUES, "combine returned infinity", give=overflowing),
    Fault(
        "zeros", VALUES, "not written: it holds zeros", give=lambda at, combined: combined * 0, everyone=True
    ),
    Fault("last_row_zero", VALUES, "not written: it holds zeros", give=last_row_unwritten),
    Fault("tail_zero", VALUES, "not written: it holds zeros", give=tail_unwritten),
    Fault("stale_after_timing", VALUES, "another combine's: timing's", give=after_timing),
    Fault("stale_in_timing", VALUES, "another combine's: the oracle's", give=in_timing),
    Fault(
        "stale_case", VALUES, "another combine's: the case's of T=", give=of_earlier_case, unseen=first_case
    ),
    Fault("not_cleared", VALUES, "timing's.*, with this one added", give=not_cleared),
    Fault(
        "tokens_returned",
        VALUES,
        "returned the dispatched token",
        give=lambda at, combined: at.problem.x.clone(),
    ),
    Fault("not_staged", VALUES, "sum of the dispatched copies", stage=dispatched, everyone=True),
    Fault("rotated", VALUES, "rows are the results of other tokens", give=rotated, unseen=one_token),
    Fault(
        "blocks_turned", VALUES, "rows are the results of other tokens", give=some_blocks, unseen=one_token
    ),
    Fault("planes_mixed", VALUES, "messages that were not sent for their token", stage=turned),
    Fault(
        "rows_rotated",
        VALUES,
        "messages that were not sent for their token",
        stage=in_planes,
        everyone=True,
        unseen=one_token,
    ),
    Fault(
        "ladder_sized",
        VALUES,
        "messages that were not sent for their token|is missing",
        stage=by_ladder,
        unseen=ladder_end,
    ),
    Fault("padding_added", VALUES, "padding was added", add=with_padding, unseen=no_padding),
    Fault("neighbours", VALUES, "columns were moved by exchange of neighbours", give=neighbours),
    Fault(
        "shifted", VALUES, r"columns were moved by \+4", give=lambda at, combined: combined.roll(4, dims=1)
    ),
    Fault(
        "fp8_messages",
        VALUES,
        "through FP8 e4m3fn",
        add=lambda at, given: arithmetic.through(torch.float8_e4m3fn)(given),
    ),
    Fault(
        "short",
        VALUES,
        r"returned bfloat16 \[\d+, 511\] in place of",
        give=lambda at, combined: combined[:, :-1],
    ),
    Fault(
        "fp32_output",
        VALUES,
        "returned float32 .* in place of bfloat16",
        give=lambda at, combined: combined.float(),
    ),
)
