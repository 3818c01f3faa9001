"""Structural probes: routings and messages so plain that a wrong result says what moved where.

Messages are small integers, so that every reduction gives the same exact sum. The accumulator probe
(``oracle/accumulator.py``) alone looks at how the sum was made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pytest_ep.backends.base import EPBackend
from pytest_ep.backends.base import Received
from pytest_ep.matrix.shapes import Shape
from pytest_ep.oracle import dispatch
from pytest_ep.oracle.exchange import exchange
from pytest_ep.workload.problem import Problem
from pytest_ep.workload.problem import build_problem
from pytest_ep.workload.routing import Trace

EXACT = 256
"""BF16 holds every integer up to this."""
COLUMN_BASE = 64
"""Base of the digits of a column's number: tokens of that probe go to one rank, or two, so that sums hold."""
CALLS = 4
"""Exchanges of the probe of repeated calls."""

Values = Callable[[Tensor, int, int], Tensor]
"""Messages [n, H] of one rank: (source tokens [n], rank, round) -> integers of at most EXACT in any sum."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe: which experts a token chooses, how many rounds there are, and what a rank answers.

    ``experts(shape, ep_size, token)`` gives top_k distinct experts, or None for the standard routing;
    ``explain(problem, row, got, want)`` says what a wrong row looks like, or "".
    """

    name: str
    experts: Callable[[Shape, int, int], list[int]] | None
    rounds: Callable[[Problem], int]
    values: Callable[[Problem, Tensor, int, int], Tensor]
    explain: Callable[[Problem, int, Tensor, Tensor], str]


def run_probe(probe: Probe, backend: EPBackend, problem: Problem) -> str:
    """Exchange every round of a probe; return what went wrong on this rank, or "". Collective."""
    wrong = []
    rounds = probe.rounds(problem)
    for number in range(rounds):
        said = _exchange(probe, backend, problem, number)
        if said:
            wrong.append(f"round {number + 1} of {rounds}: {said}" if rounds > 1 else said)
    return wrong[0] if wrong else ""


def probe_problem(probe: Probe, standard: Problem) -> Problem:
    """Return the probe's problem for the ranks, shape and tokens of a standard one."""
    if probe.experts is None:
        return standard
    shape, ranks = standard.shape, standard.ep_size
    ids = [probe.experts(shape, ranks, token) for token in range(sum(standard.tokens_by_rank))]
    weights = np.full((len(ids), shape.top_k), 1 / shape.top_k, dtype=np.float32)
    return build_problem(
        shape,
        Trace(np.array(ids, dtype=np.int64), weights),
        standard.rank,
        standard.tokens_by_rank,
        standard.x.device,
        str(standard.expert_ids.dtype).removeprefix("torch."),
    )


def _exchange(probe: Probe, backend: EPBackend, problem: Problem, number: int) -> str:
    failures: dict[str, str] = {}

    def answer(received: Received, source: Tensor) -> Tensor:
        return probe.values(problem, source, problem.rank, number).to(torch.bfloat16)

    got = exchange(backend, problem, answer, failures)
    if failures:
        return "; ".join(f"{check}: {text}" for check, text in failures.items())
    assert got is not None
    want = _sums(probe, problem, number)
    if got.shape != want.shape:
        return f"combine gave {dispatch.kind(got.shape, got.dtype)}"
    wrong = (got.float() != want).nonzero()
    if not len(wrong):
        return ""
    row, column = wrong[0].tolist()
    moved = probe.explain(problem, row, got[row].float(), want[row])
    element = f"token {problem.first_token(problem.rank) + row} column {column}"
    values = f"got {float(got[row, column]):g}, expected {float(want[row, column]):g}"
    return f"{len(wrong)} of {want.numel()} elements differ, first {element}: {values}; {moved}".rstrip("; ")


def _sums(probe: Probe, problem: Problem, number: int) -> Tensor:
    """The exact combine of this rank's tokens: every contributor's answer added."""
    first = problem.first_token(problem.rank)
    own = slice(first, first + problem.tokens)
    source = torch.arange(own.start, own.stop, device=problem.x.device)
    ids = torch.from_numpy(problem.trace.expert_ids[own]).to(problem.x.device)
    total = torch.zeros(problem.tokens, problem.shape.hidden, device=problem.x.device)
    for rank, (start, end) in enumerate(_blocks(problem)):
        here = ((ids >= start) & (ids < end)).any(1)
        total[here] += probe.values(problem, source[here], rank, number).float()
    return total


def _blocks(problem: Problem) -> list[tuple[int, int]]:
    bounds = problem.shape.owned(problem.ep_size)
    return list(pairwise(bounds))


def _contributors(problem: Problem) -> int:
    """The most ranks that answer one token."""
    return min(problem.shape.top_k, problem.ep_size)


def _constant(problem: Problem, source: Tensor, value: Tensor) -> Tensor:
    return value.to(problem.x.device)[:, None].expand(len(source), problem.shape.hidden)


def _one(problem: Problem, source: Tensor, rank: int, number: int) -> Tensor:
    return _constant(problem, source, torch.ones(len(source)))


def _power(problem: Problem, source: Tensor, rank: int, number: int) -> Tensor:
    # Eight ranks a round: their powers add to at most 255. The others answer 0.
    value = 2.0 ** (rank % 8) if rank // 8 == number else 0.0
    return _constant(problem, source, torch.full((len(source),), value))


def _token_value(problem: Problem, source: Tensor, rank: int, number: int) -> Tensor:
    base = EXACT // _contributors(problem)
    return _constant(problem, source, source // int(base**number) % base)


def _column(problem: Problem, source: Tensor, rank: int, number: int) -> Tensor:
    # A column's number in digits, one a round: no two columns alike, across every vector boundary.
    columns = torch.arange(problem.shape.hidden, device=problem.x.device)
    digits: Tensor = columns // COLUMN_BASE**number % COLUMN_BASE
    return digits.expand(len(source), -1)


def _column_rounds(problem: Problem) -> int:
    rounds = 1
    while COLUMN_BASE**rounds < problem.shape.hidden:
        rounds += 1
    return rounds


def _call(problem: Problem, source: Tensor, rank: int, number: int) -> Tensor:
    return _constant(problem, source, torch.full((len(source),), float(number + 1)))


def _digits(problem: Problem, numbers: int) -> int:
    """Rounds that tell ``numbers`` numbers apart."""
    base, rounds = EXACT // _contributors(problem), 1
    while base**rounds < numbers:
        rounds += 1
    return rounds


def _explain_count(problem: Problem, row: int, got: Tensor, want: Tensor) -> str:
    return f"{float(got[0]):g} ranks seem to have answered where {float(want[0]):g} did"


def _explain_powers(problem: Problem, row: int, got: Tensor, want: Tensor) -> str:
    bits, wanted = int(got.nan_to_num()[0]), int(want[0])
    lost = [rank for rank in range(8) if wanted >> rank & 1 and not bits >> rank & 1]
    extra = [rank for rank in range(8) if bits >> rank & 1 and not wanted >> rank & 1]
    return f"ranks (of these 8) lost: {lost or 'none'}, too many: {extra or 'none'}"


def _explain_token(problem: Problem, row: int, got: Tensor, want: Tensor) -> str:
    return "the row of another token, by its value" if got.eq(got[0]).all() else "columns of several tokens"


def _explain_column(problem: Problem, row: int, got: Tensor, want: Tensor) -> str:
    value = float(got[int((got != want).nonzero()[0])])
    if not (value.is_integer() and 0 <= value < COLUMN_BASE):
        return "no column holds that"
    return f"it holds what belongs into a column whose number has the digit {value:g} in base {COLUMN_BASE}"


def _explain_call(problem: Problem, row: int, got: Tensor, want: Tensor) -> str:
    each = float(want[0])
    return "that is an earlier call's answer" if 0 < float(got[0]) < each else ""


def _spread(shape: Shape, ep_size: int, token: int) -> list[int]:
    """One expert on each of as many ranks as there are choices, the first rank moving with the token."""
    bounds = shape.owned(ep_size)
    ids: list[int] = []
    for choice in range(shape.top_k):
        rank, lap = (token + choice) % ep_size, choice // ep_size
        ids.append(bounds[rank] + lap % (bounds[rank + 1] - bounds[rank]))
    return ids if len(set(ids)) == shape.top_k else _gathered(shape, ep_size, token)


def _gathered(shape: Shape, ep_size: int, token: int) -> list[int]:
    """All choices on the rank after the token's own; where it has too few experts, on the next one too."""
    first = shape.owned(ep_size)[(token + 1) % ep_size]
    return [(first + choice) % shape.experts for choice in range(shape.top_k)]


def _paired(shape: Shape, ep_size: int, token: int) -> list[int]:
    """Several experts on each of two ranks, half of the choices on either."""
    half = (shape.top_k + 1) // 2
    near, far = (shape.owned(ep_size)[rank % ep_size] for rank in (token, token + ep_size // 2 + 1))
    ids = [near + choice for choice in range(half)]
    ids += [(far + choice) % shape.experts for choice in range(shape.top_k - half)]
    return (
        ids if len(set(ids)) == shape.top_k and max(ids) < shape.experts else _gathered(shape, ep_size, token)
    )


def _once(problem: Problem) -> int:
    return 1


_ALL = (
    Probe("uniform", None, _once, _one, _explain_count),
    Probe("rank_powers", None, lambda problem: -(-problem.ep_size // 8), _power, _explain_powers),
    Probe(
        "slots",
        None,
        lambda problem: _digits(problem, sum(problem.tokens_by_rank)),
        _token_value,
        _explain_token,
    ),
    Probe("columns", _gathered, _column_rounds, _column, _explain_column),
    Probe("every_rank", _spread, _once, _one, _explain_count),
    Probe("one_rank", _gathered, _once, _one, _explain_count),
    Probe("several_experts", _paired, _once, _one, _explain_count),
    Probe("repeated_calls", None, lambda problem: CALLS, _call, _explain_call),
)

PROBES = {probe.name: probe for probe in _ALL}
