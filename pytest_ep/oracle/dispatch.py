"""The six checks of what dispatch brought, bit for bit and in any row order (token-rank layout)."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_ep.backends.base import Received
from pytest_ep.oracle import expected
from pytest_ep.workload import contents
from pytest_ep.workload.problem import Problem


def misshapen(problem: Problem, received: Received) -> dict[str, str]:
    """Failures, by check, of what has not the shape and dtype that ``Received`` promises."""
    rows = len(received.tokens) if received.tokens.dim() else 0
    bounds = problem.shape.owned(problem.ep_size)
    top_k = problem.shape.top_k
    failures = {}
    for check, value, shape, dtype in (
        ("payload", received.tokens, (rows, problem.shape.hidden), torch.bfloat16),
        ("metadata", received.expert_ids, (rows, top_k), torch.int64),
        ("weights", received.weights, (rows, top_k), torch.float32),
        ("counts", received.expert_counts, (bounds[problem.rank + 1] - bounds[problem.rank],), torch.int64),
    ):
        if value is None:
            failures[check] = "none received, the token-rank layout carries them"
        elif tuple(value.shape) != shape or value.dtype != dtype:
            failures[check] = f"received {kind(value.shape, value.dtype)}, expected {kind(shape, dtype)}"
    return failures


def failures(problem: Problem, received: Received, source: Tensor) -> dict[str, str]:
    """Failures by check: source_set, payload, metadata, weights, multiplicity, counts; empty when all hold.

    ``source`` [N] are the decoded source ids; tokens and ids must not be ``misshapen``. Each row is compared
    with what its own source id calls for, so that one fault fails few checks.
    """
    wrong = misshapen(problem, received)
    arrival = expected.arrival(problem, source.clamp(0, len(problem.trace.expert_ids) - 1))
    found = {
        "source_set": _source_set(problem, source),
        "payload": _rows_text(payload_differs(problem, received.tokens, source), source),
        "metadata": _rows_text(
            _differs(_in_order(received.expert_ids), _in_order(arrival.expert_ids)), source
        ),
        "multiplicity": _multiplicity(received.expert_ids, arrival.expert_ids, source),
    }
    if "weights" not in wrong and received.weights is not None:
        found["weights"] = _rows_text(_weights_differ(problem, received, arrival), source)
    if "counts" not in wrong:
        found["counts"] = _counts(problem, received.expert_counts)
    return wrong | {check: text for check, text in found.items() if text}


def _source_set(problem: Problem, source: Tensor) -> str:
    """Each token of the group that has an expert here must be here once, and no other."""
    arriving = expected.arriving(problem)
    valid = (source >= 0) & (source < len(arriving))
    times = torch.bincount(source[valid], minlength=len(arriving))
    missing, foreign, doubled = arriving & (times == 0), ~arriving & (times > 0), times > 1
    counts = [int(each.sum()) for each in (missing, foreign, doubled, ~valid)]
    if not any(counts):
        return ""
    tokens = torch.nonzero(missing | foreign | doubled)
    first = f", first: token {int(tokens[0])}" if len(tokens) else ""
    names = ("missing", "of other ranks", "repeated", "unreadable")
    parts = ", ".join(f"{count} {name}" for count, name in zip(counts, names, strict=True) if count)
    return f"of {int(arriving.sum())} tokens {parts}{first}"


def payload_differs(problem: Problem, tokens: Tensor, source: Tensor) -> Tensor:
    """Whether each row [N] differs in any bit from the token that it claims to be, chunk by chunk."""
    differs = torch.empty(len(tokens), dtype=torch.bool, device=tokens.device)
    step = contents.chunk_rows(tokens.device, problem.shape.hidden)
    for start in range(0, len(tokens), step):
        part = slice(start, start + step)
        own = contents.tokens(source[part], problem.shape.hidden)
        differs[part] = _differs(tokens[part].contiguous().view(torch.int16), own.view(torch.int16))
    return differs


def _weights_differ(problem: Problem, received: Received, arrival: expected.Arrival) -> Tensor:
    """Whether each row's weights [N] differ in any bit, compared in the order of this rank's expert ids."""
    bounds = problem.shape.owned(problem.ep_size)
    ids = received.expert_ids
    # Only this rank's ids order the row: one that was left unmasked is the metadata check's to report.
    ids = torch.where((ids >= bounds[problem.rank]) & (ids < bounds[problem.rank + 1]), ids, -1)
    assert received.weights is not None
    got = received.weights.gather(1, ids.argsort(dim=1, descending=True, stable=True))
    want = arrival.weights.gather(1, arrival.expert_ids.argsort(dim=1, descending=True, stable=True))
    return _differs(got.view(torch.int32), want.view(torch.int32))


def _multiplicity(got: Tensor, want: Tensor, source: Tensor) -> str:
    differs = (got >= 0).sum(dim=1) != (want >= 0).sum(dim=1)
    return _rows_text(differs, source)


def _counts(problem: Problem, got: Tensor) -> str:
    want = expected.expert_counts(problem)
    differs = torch.nonzero(got != want)
    if not len(differs):
        return ""
    first = int(differs[0])
    expert = problem.shape.owned(problem.ep_size)[problem.rank] + first
    return (
        f"{len(differs)} of {len(want)} experts differ, "
        f"first: expert {expert} got {int(got[first])}, expected {int(want[first])}"
    )


def _in_order(expert_ids: Tensor) -> Tensor:
    return expert_ids.sort(dim=1, descending=True).values


def _differs(got: Tensor, want: Tensor) -> Tensor:
    return (got != want).any(dim=1)


def _rows_text(differs: Tensor, source: Tensor) -> str:
    rows = torch.nonzero(differs)
    if not len(rows):
        return ""
    return f"{len(rows)} of {len(differs)} rows differ, first: token {int(source[rows[0]])}"


def kind(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> str:
    """A tensor's dtype and shape, for a message."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
