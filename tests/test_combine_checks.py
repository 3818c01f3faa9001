"""What combine returned is judged by value, by bit and by shape, on simulated ranks."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pytest_ep.backends.base import Received
from pytest_ep.oracle.checks import COMBINE_REL_TOL
from pytest_ep.oracle.checks import Verdict
from pytest_ep.oracle.checks import check_timed_output
from pytest_ep.oracle.checks import constant_rows
from pytest_ep.oracle.checks import inputs_unchanged
from pytest_ep.oracle.checks import run_oracle
from pytest_ep.oracle.reduction import named
from pytest_ep.workload.problem import Problem
from pytest_ep.workload.problem import build_problem
from pytest_ep.workload.routing import load_trace
from tests.simulated import CULPRIT
from tests.simulated import RIGHT
from tests.simulated import SHAPE
from tests.simulated import Copy
from tests.simulated import Faults
from tests.simulated import Group
from tests.simulated import Simulated
from tests.simulated import failed_anywhere
from tests.simulated import on_all_ranks
from tests.simulated import problem_of
from tests.simulated import verdicts


def step_where_it_shows(combined: Tensor, step: int) -> Tensor:
    combined = combined.clone()
    # A magnitude near 100 u: one BF16 step is under a percent of it.
    row, column = torch.nonzero((combined.abs() > 3) & (combined.abs() < 4))[0].tolist()
    combined.view(torch.int16)[row, column] += step
    return combined


def test_one_bf16_step_lowers_the_bit_exact_share_and_fails_only_when_exact() -> None:
    faults = Faults(combined=lambda combined: step_where_it_shows(combined, 1))
    verdict = verdicts(faults)[CULPRIT]
    assert verdict.passed
    assert verdict.bit_exact == 1.0 - 1 / (8 * SHAPE.hidden)
    assert 0 < verdict.error < COMBINE_REL_TOL
    assert verdict.worst is not None
    assert verdict.worst.rank == CULPRIT
    assert 8 <= verdict.worst.token < 16
    exact = verdicts(faults, exact=True)[CULPRIT]
    assert exact.failed == ("bit_exact",)
    assert "1 of 4096 elements differ" in exact.message


def test_one_bf16_step_on_one_message_shows_where_the_narrowed_sum_changes() -> None:
    def stepped(messages: Tensor, received: Received) -> Tensor:
        messages[0].view(torch.int16)[(messages[0].abs() > 0.1) & (messages[0].abs() < 0.3)] += 1
        return messages

    found = verdicts(Faults(messages=stepped))
    assert min(verdict.bit_exact for verdict in found) < 1.0
    assert failed_anywhere(verdicts(Faults(messages=stepped), exact=True)) >= {"bit_exact"}


def test_a_negative_zero_is_bit_exact() -> None:
    faults = Faults(combined=lambda combined: torch.where(combined == 0, -0.0, combined))
    assert verdicts(faults, exact=True)[CULPRIT].bit_exact == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_element_is_infinitely_wrong(value: float) -> None:
    def spoiled(combined: Tensor) -> Tensor:
        combined[5, 77] = value
        return combined

    verdict = verdicts(Faults(combined=spoiled))[CULPRIT]
    assert verdict.failed == ("combine_values",)
    assert verdict.error == math.inf
    assert verdict.worst is not None
    assert (verdict.worst.token, verdict.worst.column) == (13, 77)


@pytest.mark.parametrize(
    "reshape",
    [lambda c: c[:-1], lambda c: c[:, :-1], lambda c: c.float(), lambda c: c.flatten()],
    ids=["rows", "columns", "dtype", "flat"],
)
def test_a_misshapen_combine_fails_with_nothing_to_compare(reshape: Callable[[Tensor], Tensor]) -> None:
    verdict = verdicts(Faults(combined=reshape))[CULPRIT]
    assert verdict.failed == ("combine_values",)
    assert verdict.error == math.inf
    assert verdict.bit_exact == 0.0
    assert "expected bfloat16 [8, 512]" in verdict.message


def test_the_error_is_strictly_below_the_tolerance() -> None:
    def off_by(relative: float) -> Callable[[Tensor], Tensor]:
        def change(combined: Tensor) -> Tensor:
            row, column = torch.nonzero(combined == 1.0)[0].tolist()
            combined[row, column] += relative
            return combined

        return change

    at_tolerance = verdicts(Faults(combined=off_by(COMBINE_REL_TOL)))[CULPRIT]
    assert at_tolerance.error == COMBINE_REL_TOL
    assert at_tolerance.failed == ("combine_values",)
    assert verdicts(Faults(combined=off_by(COMBINE_REL_TOL - 2**-7)))[CULPRIT].passed


def test_small_expected_values_are_judged_by_the_floor() -> None:
    def off(combined: Tensor) -> Tensor:
        row, column = torch.nonzero(combined == 0.0)[0].tolist()
        combined[row, column] = 2.0**-11
        return combined

    verdict = verdicts(Faults(combined=off))[CULPRIT]
    assert verdict.passed
    assert verdict.error == pytest.approx(2.0**-11 / 0.02)


def test_a_failing_receive_is_drained_so_that_no_rank_waits() -> None:
    def raising(received: Received) -> Received:
        raise RuntimeError("the wire came off\nat line 2")

    found = verdicts(Faults(received=raising))
    assert found[CULPRIT].failed == ("receive",)
    assert found[CULPRIT].message == "receive: RuntimeError: the wire came off (rank 1)"
    assert found[CULPRIT].error == math.inf
    # The others went on, and saw zeros in place of the culprit's messages.
    assert {verdict.failed for rank, verdict in enumerate(found) if rank != CULPRIT} == {("combine_values",)}


def test_a_failing_dispatch_is_raised() -> None:
    class Broken(Simulated):
        def dispatch(self, problem: Problem) -> list[Copy]:
            raise ConnectionError("peer gone")

    with pytest.raises(ConnectionError, match="peer gone"):
        run_oracle(Broken(Group(1, Faults()), 0), problem_of(0, (1,)), RIGHT)


def test_a_verdict_is_one_line_and_travels_between_processes() -> None:
    found = verdicts(Faults(copies=lambda copies: copies[1:]))
    for verdict in found:
        assert pickle.loads(pickle.dumps(verdict)) == verdict
        assert "\n" not in verdict.message
    worst = found[-1].worst
    assert worst is not None
    assert f"at token {worst.token} column {worst.column}: got {worst.got:g}" in found[-1].message
    assert found[-1].message.endswith("(rank 3)")


@pytest.mark.parametrize("planes", [1, 4])
@pytest.mark.parametrize("name", ["rank-sum-fp32", "two-level", "topk-slot-tree"])
def test_a_timed_output_of_constant_rows_is_bit_exact_whatever_the_placement(name: str, planes: int) -> None:
    reduction = named(name, 2)

    def work(backend: Simulated, problem: Problem) -> Verdict:
        backend.faults = Faults(reduction=reduction)
        staged = backend.stage_constant(problem, constant_rows(problem, planes))
        backend.combine(problem, backend.dispatch(problem), staged)
        handle = backend.dispatch(problem)[::-1]
        return check_timed_output(
            problem, backend.combine(problem, handle, staged), reduction, planes, exact=True
        )

    assert all(verdict == Verdict(True, (), 0.0, 1.0, None, "") for verdict in on_all_ranks(work))


@pytest.mark.parametrize("fault", ["rank", "plane", "reduction", "stale"])
def test_a_timed_output_from_a_wrong_place_fails(fault: str) -> None:
    def work(backend: Simulated, problem: Problem) -> Verdict:
        rows = constant_rows(problem, 4)
        if fault == "rank":
            rows = constant_rows(problem_of((problem.rank + 1) % 4, problem.tokens_by_rank), 4)
        elif fault == "plane":
            rows = rows.roll(1, dims=0)
        elif fault == "reduction":
            backend.faults = Faults(reduction=named("topk-slot-tree", 1))
        got = backend.combine(problem, backend.dispatch(problem), backend.stage_constant(problem, rows))
        if fault == "stale":
            got = torch.zeros_like(got)
        return check_timed_output(problem, got, RIGHT, 4)

    found = on_all_ranks(work)
    assert all(verdict.failed == ("combine_values",) for verdict in found)


def test_constant_rows_for_some_other_number_of_planes_are_refused() -> None:
    with pytest.raises(ValueError, match="3 constant planes: a token-rank layout has 1 or ep_size, 4"):
        constant_rows(problem_of(0, (1,) * 4), 3)


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_untouched_inputs_are_unchanged_and_each_touched_one_is_seen(index_dtype: str) -> None:
    trace = load_trace(SHAPE, 67, 9, None, write=False)
    problem = build_problem(SHAPE, trace, 1, (2, 4, 3), "cpu", index_dtype)
    assert inputs_unchanged(problem)
    for touched in (problem.x.view(torch.int16)[3, 400:401], problem.expert_ids[0], problem.weights[2]):
        before = touched.clone()
        touched.add_(1)
        assert not inputs_unchanged(problem)
        touched.copy_(before)
        assert inputs_unchanged(problem)
