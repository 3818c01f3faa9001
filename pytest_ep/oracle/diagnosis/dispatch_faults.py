"""The table of dispatch's faults: which tokens were lost, doubled or misrouted, and which bytes changed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from pytest_ep.oracle.diagnosis import metadata_faults
from pytest_ep.oracle.diagnosis.arrivals import LISTED
from pytest_ep.oracle.diagnosis.arrivals import Arrivals
from pytest_ep.oracle.diagnosis.arrivals import named
from pytest_ep.oracle.diagnosis.arrivals import rank_names
from pytest_ep.oracle.diagnosis.evidence import Finding
from pytest_ep.workload import contents
from pytest_ep.workload.problem import Problem

Fault = Callable[[Arrivals], "Finding | None"]


def padding(found: Arrivals) -> Finding | None:
    """Rows in which no token was sent."""
    if not found.padding:
        return None
    rows = f"{found.padding} rows" if found.padding > 1 else "a row"
    says = f"{{ranks}} read {rows} of padding as tokens"
    return Finding("padding", says, found.padding, found.padding + len(found.source), ())


def masked(found: Arrivals) -> Finding | None:
    """Tokens that go nowhere, for all their choices are masked."""
    if not found.masked:
        return None
    says = (
        f"{{ranks}} received {found.masked} tokens all of whose choices are masked: is -1 taken for a rank?"
    )
    return Finding("masked", says, found.masked, found.masked + len(found.source), ())


def lost(found: Arrivals) -> Finding | None:
    """Tokens that have an expert here and did not arrive."""
    missing = found.arriving & (found.times == 0)
    if not missing.any():
        return None
    tokens = _tokens(missing)
    problem = found.problem
    here = [_tokens(found.arriving & _of_rank(problem, rank)) for rank in range(problem.ep_size)]
    whole = [rank for rank, theirs in enumerate(here) if theirs and set(theirs) <= set(tokens)]
    if whole and len(tokens) > 1 and len(tokens) == sum(len(here[rank]) for rank in whole):
        what = f"any token of {rank_names(whole)}"
    elif len(tokens) > 1 and tokens == [theirs[-1] for theirs in here if theirs]:
        what = "the last token of each rank"
    else:
        what = named(problem, tokens)
    return _finding("lost", f"{{ranks}} did not receive {what}", tokens, int(found.arriving.sum()))


def doubled(found: Arrivals) -> Finding | None:
    """Tokens that arrived more than once."""
    tokens = _tokens(found.times > 1)
    if not tokens:
        return None
    says = f"{{ranks}} received {named(found.problem, tokens)} more than once"
    return _finding("doubled", says, tokens, int(found.arriving.sum()))


def misrouted(found: Arrivals) -> Finding | None:
    """Tokens that have no expert here."""
    tokens = _tokens(~found.arriving & (found.times > 0))
    if not tokens:
        return None
    problem = found.problem
    bounds = problem.shape.owned(problem.ep_size)
    experts = problem.trace.expert_ids[tokens[:LISTED]].flatten()
    owners = [
        rank
        for rank, (first, end) in enumerate(pairwise(bounds))
        if ((experts >= first) & (experts < end)).any()
    ]
    says = f"{{ranks}} received {named(problem, tokens)}, misrouted: the experts are on {rank_names(owners)}"
    return _finding("misrouted", says, tokens, len(found.source))


def unreadable(found: Arrivals) -> Finding | None:
    """Rows that are no token at all."""
    rows = torch.nonzero(~found.known).squeeze(1)
    if not len(rows):
        return None
    values = found.received.tokens[rows].float()
    kind = "rows that are no token"
    if not values.isfinite().all():
        kind = "rows that are not finite"
    elif not values.any():
        kind = "rows of zeros"
    return Finding("unreadable", f"{{ranks}} received {kind}", len(rows), len(found.source), ())


def corrupted(found: Arrivals) -> Finding | None:
    """Tokens with changed elements: how many, where, and what became of them."""
    rows = torch.nonzero(found.changed).squeeze(1)
    if not len(rows):
        return None
    tokens = found.source[rows].tolist()
    looked_at = rows[: max(1, contents.chunk_rows(rows.device, found.received.tokens.shape[1] // 8))]
    says = f"{named(found.problem, tokens)} reached {{ranks}} with {_change(found, looked_at)}"
    return _finding("corrupted", says, tokens, len(found.source))


def _change(found: Arrivals, rows: Tensor) -> str:
    """How many elements of some rows changed, where, and into what."""
    got = found.received.tokens[rows].contiguous()
    want = contents.tokens(found.source[rows], got.shape[1])
    bits = (got.view(torch.int16) ^ want.view(torch.int16)).int() & 0xFFFF
    differs = bits != 0
    elements, columns = int(differs.sum()), torch.nonzero(differs.any(dim=0)).squeeze(1).tolist()
    where = f"column {columns[0]}" if len(columns) == 1 else f"columns {columns[0]} to {columns[-1]}"
    what = _became(got[differs], want[differs], bits[differs])
    if not what:
        other = _whose(found, got[0], differs[0])
        what = f"token {int(found.source[rows[0]])} has token {other}'s" if other >= 0 else "many bits"
    return f"{elements} element{'s' * (elements != 1)} changed, {where}: {what}"


def _became(got: Tensor, want: Tensor, bits: Tensor) -> str:
    """What the changed elements [m] became, where that is one thing."""
    ratio = got[want != 0].float() / want[want != 0].float()
    if not got.isfinite().all():
        return "not finite"
    if bool((bits & (bits - 1) == 0).all()):
        return "one bit each"
    if not got.any():
        return "they are zero"
    if len(ratio) > 1 and bool((ratio == ratio[0]).all()):
        return f"multiplied by {float(ratio[0]):g}"
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        if torch.equal(want.to(dtype).to(torch.bfloat16), got):
            return f"rounded to FP8 {str(dtype).removeprefix('torch.float8_')}"
    return ""


def _whose(found: Arrivals, row: Tensor, differs: Tensor) -> int:
    """The token of the group that has these elements, or -1."""
    everyone = torch.arange(len(found.arriving), device=row.device)
    for source in torch.split(everyone, contents.chunk_rows(row.device, len(row))):
        same = (contents.tokens(source, len(row))[:, differs] == row[differs]).all(dim=1)
        if bool(same.any()):
            return int(source[int(same.int().argmax())])
    return -1


def _tokens(mask: Tensor) -> list[int]:
    found: list[int] = torch.nonzero(mask).squeeze(1).tolist()
    return found


def _of_rank(problem: Problem, rank: int) -> Tensor:
    token = torch.arange(len(problem.trace.expert_ids), device=problem.x.device)
    return (token >= problem.first_token(rank)) & (token < problem.first_token(rank + 1))


def _finding(fault: str, says: str, tokens: list[int], of: int) -> Finding:
    return Finding(fault, says, len(tokens), of, tuple(tokens[:LISTED]))


FAULTS: tuple[Fault, ...] = (
    masked,
    padding,
    unreadable,
    lost,
    doubled,
    misrouted,
    corrupted,
    metadata_faults.ids,
    metadata_faults.weights,
    metadata_faults.counts,
)
"""In the order in which they are named: what arrived, then what was said of it."""
