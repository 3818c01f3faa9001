"""The verdict on one exchange: seven checks, and the share of combined elements that are bit-exact."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pytest_ep.backends.base import EPBackend
from pytest_ep.backends.base import Received
from pytest_ep.oracle import dispatch
from pytest_ep.oracle import expected
from pytest_ep.oracle.clues import Clues
from pytest_ep.oracle.exchange import exchange
from pytest_ep.oracle.expected import constant_rows
from pytest_ep.oracle.reduction import Reduction
from pytest_ep.workload.problem import Problem

if TYPE_CHECKING:
    from pytest_ep.oracle.diagnosis.evidence import Evidence

__all__ = [
    "COMBINE_REL_TOL",
    "MAGNITUDE_FLOOR",
    "Verdict",
    "Worst",
    "check_timed_output",
    "constant_rows",
    "failing",
    "inputs_changed",
    "inputs_unchanged",
    "relative_error",
    "run_oracle",
]

COMBINE_REL_TOL = 8 * 2.0**-8
"""Errors are strictly below this: one BF16 ulp for each of eight additions. Never widened."""

MAGNITUDE_FLOOR = 0.02
"""Errors are relative to the expected magnitude, but to no less than this."""

_ORDER = (
    "receive",
    "source_set",
    "payload",
    "metadata",
    "weights",
    "multiplicity",
    "counts",
    "combine_values",
    "bit_exact",
)


@dataclass(frozen=True, slots=True)
class Worst:
    """The combined element with the largest error; ``token`` is its global index."""

    rank: int
    token: int
    column: int
    got: float
    expected: float
    error: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """One rank's verdict. ``failed`` names checks; ``error`` is inf where combine gave nothing to compare.

    ``bit_exact`` is the share, 0 to 1, of combined elements that equal the expected value. ``worst`` is the
    worst element where any differs, and ``message`` one line, empty when passed. ``evidence`` is what a
    failing rank saw.
    """

    passed: bool
    failed: tuple[str, ...]
    error: float
    bit_exact: float
    worst: Worst | None
    message: str
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True)
class _Comparison:
    error: float
    bit_exact: float
    worst: Worst | None
    failures: dict[str, str]


_NOT_COMBINED = _Comparison(math.inf, 0.0, None, {})


def run_oracle(backend: EPBackend, problem: Problem, reduction: Reduction, exact: bool = False) -> Verdict:
    """One checked pair: dispatch, receive, stage the oracle's messages, combine. Collective.

    What goes wrong between dispatch and combine on this rank alone is this rank's verdict (check "receive"):
    the pair is closed with zeros, so that no other rank waits for it. Exceptions of dispatch and combine are
    raised. With ``exact`` any element that is not bit-exact fails the check "bit_exact".
    """
    failures: dict[str, str] = {}
    clues = Clues(problem, reduction, failures)

    def answer(received: Received, source: Tensor) -> Tensor:
        if failures:
            clues.of_dispatch(received, source)
        weights = None if "weights" in dispatch.misshapen(problem, received) else received.weights
        return expected.reply(problem, source, received.expert_ids, weights)

    got = exchange(backend, problem, answer, failures)
    if got is None:
        return _verdict(problem, failures, _NOT_COMBINED, clues)
    comparison = _compare(problem, got, expected.combined(problem, reduction), exact)
    if comparison.failures:
        clues.of_combine(got)
    return _verdict(problem, failures, comparison, clues)


def check_timed_output(
    problem: Problem, got: Tensor, reduction: Reduction, planes: int, exact: bool = False
) -> Verdict:
    """Check a combine's output where every rank has staged its ``constant_rows(problem, planes)``."""
    wanted = expected.combined_constant(problem, reduction, planes)
    comparison = _compare(problem, got, wanted, exact)
    clues = Clues(problem, reduction, {}, planes)
    if comparison.failures:
        clues.of_combine(got)
    return _verdict(problem, {}, comparison, clues)


def failing(verdict: Verdict, check: str, message: str) -> Verdict:
    """Return the verdict with one more failed check."""
    said = f"{verdict.message}; {check}: {message}" if verdict.message else f"{check}: {message}"
    return replace(verdict, passed=False, failed=(*verdict.failed, check), message=said)


def inputs_changed(verdict: Verdict, problem: Problem) -> Verdict:
    """Return the verdict with the failed check "inputs", and which of their elements changed."""
    from pytest_ep.oracle.diagnosis.evidence import Evidence
    from pytest_ep.oracle.diagnosis.inputs import changed_inputs

    text = changed_inputs(problem)
    evidence = replace(verdict.evidence or Evidence(problem.rank), inputs=text)
    failed = failing(verdict, "inputs", f"the transport changed its inputs: {text}")
    return replace(failed, evidence=evidence)


def order(check: str) -> int:
    """Place of a check among those that one fault makes fail: causes before what follows from them."""
    return _ORDER.index(check) if check in _ORDER else len(_ORDER)


def inputs_unchanged(problem: Problem) -> bool:
    """Whether tokens, ids and weights are still, bit for bit, what they were built as."""
    first = problem.first_token(problem.rank)
    own = slice(first, first + problem.tokens)
    ids = torch.from_numpy(problem.trace.expert_ids[own]).to(problem.expert_ids)
    weights = torch.from_numpy(problem.trace.weights[own]).to(problem.weights)
    if not (torch.equal(problem.expert_ids, ids) and torch.equal(problem.weights, weights)):
        return False
    source = torch.arange(own.start, own.stop, device=problem.x.device)
    return not bool(dispatch.payload_differs(problem, problem.x, source).any())


def _compare(problem: Problem, got: Tensor, wanted: Iterator[tuple[int, Tensor]], exact: bool) -> _Comparison:
    """Compare a combine's output with the expected one, chunk by chunk."""
    shape = (problem.tokens, problem.shape.hidden)
    if tuple(got.shape) != shape or got.dtype != torch.bfloat16:
        text = (
            f"combined {dispatch.kind(got.shape, got.dtype)}, expected {dispatch.kind(shape, torch.bfloat16)}"
        )
        return _Comparison(math.inf, 0.0, None, {"combine_values": text})
    worst: Worst | None = None
    different = 0
    for start, want in wanted:
        have = got[start : start + len(want)].float()
        unequal = int((have != want).sum())
        if unequal:
            different += unequal
            found = _worst(problem, start, have, want)
            worst = found if worst is None or found.error > worst.error else worst
    error = worst.error if worst else 0.0
    failures = {}
    if worst and not error < COMBINE_REL_TOL:
        failures["combine_values"] = _element_text(worst)
    if worst and exact:
        failures["bit_exact"] = f"{different} of {math.prod(shape)} elements differ, {_element_text(worst)}"
    return _Comparison(error, 1.0 - different / max(1, math.prod(shape)), worst, failures)


def relative_error(have: Tensor, want: Tensor) -> Tensor:
    """The error of each combined element, FP32 as ``have`` and ``want``; inf where ``have`` is not finite."""
    error = (have - want).abs() / want.abs().clamp(min=MAGNITUDE_FLOOR)
    return torch.where(torch.isfinite(have), error, math.inf)


def _worst(problem: Problem, start: int, have: Tensor, want: Tensor) -> Worst:
    """The worst element of a chunk."""
    error = relative_error(have, want)
    row, column = divmod(int(error.argmax()), want.shape[1])
    return Worst(
        rank=problem.rank,
        token=problem.first_token(problem.rank) + start + row,
        column=column,
        got=float(have[row, column]),
        expected=float(want[row, column]),
        error=float(error[row, column]),
    )


def _element_text(worst: Worst) -> str:
    return (
        f"error {worst.error:.1e} at token {worst.token} column {worst.column}: "
        f"got {worst.got:g}, expected {worst.expected:g}"
    )


def _verdict(problem: Problem, failures: dict[str, str], comparison: _Comparison, clues: Clues) -> Verdict:
    found = failures | comparison.failures
    failed = tuple(check for check in _ORDER if check in found)
    text = "; ".join(f"{check}: {found[check]}" for check in failed)
    return Verdict(
        passed=not failed,
        failed=failed,
        error=comparison.error,
        bit_exact=comparison.bit_exact,
        worst=comparison.worst,
        message=f"{text} (rank {problem.rank})" if failed else "",
        evidence=clues.evidence() if failed else None,
    )
