"""Every fault of dispatch fails the check that names it, on simulated ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_ep.backends.base import Received
from pytest_ep.oracle.checks import COMBINE_REL_TOL
from pytest_ep.oracle.checks import Verdict
from pytest_ep.oracle.checks import run_oracle
from pytest_ep.oracle.reduction import named
from pytest_ep.workload.problem import Problem
from tests.simulated import CULPRIT
from tests.simulated import RIGHT
from tests.simulated import SHAPE
from tests.simulated import Copy
from tests.simulated import Faults
from tests.simulated import Simulated
from tests.simulated import failed_anywhere
from tests.simulated import on_all_ranks
from tests.simulated import problem_of
from tests.simulated import verdicts
from tests.simulated import weights_of

SIZES = [(1, 1), (8, 8), (1,) * 4, (8,) * 4, (2,) * 8, (0, 2, 1, 3), (0, 0, 1, 0)]


@pytest.mark.parametrize("tokens_by_rank", SIZES, ids=str)
def test_a_right_transport_passes_with_error_zero_and_all_bits(tokens_by_rank: tuple[int, ...]) -> None:
    for verdict in verdicts(tokens_by_rank=tokens_by_rank, exact=True):
        assert verdict == Verdict(True, (), 0.0, 1.0, None, "")


@pytest.mark.parametrize("tokens_by_rank", [(1,) * 4, (8,) * 4, (1,) * 8], ids=str)
@pytest.mark.parametrize(
    ("used", "claimed"),
    [
        ("topk-slot-tree", "rank-sum-fp32"),
        ("rank-sum-fp32", "topk-slot-tree"),
        ("two-level", "rank-sum-fp32"),
        ("rank-sum-fp32", "two-level"),
    ],
)
def test_another_reduction_fails_combine_values_alone(
    tokens_by_rank: tuple[int, ...], used: str, claimed: str
) -> None:
    domain = len(tokens_by_rank) // 2
    group_faults = Faults(reduction=named(used, domain))

    def work(backend: Simulated, problem: Problem) -> Verdict:
        backend.faults = group_faults
        return run_oracle(backend, problem, named(claimed, domain))

    found = on_all_ranks(work, None, tokens_by_rank)
    assert failed_anywhere(found) == {"combine_values"}
    assert max(verdict.error for verdict in found) >= 4 * COMBINE_REL_TOL


@pytest.mark.parametrize("tokens_by_rank", [(1,) * 4, (8,) * 4], ids=str)
def test_a_lost_token_fails_the_source_set_here_and_the_values_there(tokens_by_rank: tuple[int, ...]) -> None:
    found = verdicts(Faults(copies=lambda copies: copies[1:]), tokens_by_rank=tokens_by_rank)
    assert found[CULPRIT].failed[:1] == ("source_set",)
    assert "counts" in found[CULPRIT].failed
    assert "1 missing, first: token" in found[CULPRIT].message
    # The culprit's first row is a token of the last rank.
    assert found[-1].failed == ("combine_values",)


@pytest.mark.parametrize("tokens_by_rank", [(1,) * 4, (8,) * 4], ids=str)
def test_a_doubled_token_fails_the_source_set_here_and_the_values_there(
    tokens_by_rank: tuple[int, ...],
) -> None:
    found = verdicts(Faults(copies=lambda copies: copies + copies[:1]), tokens_by_rank=tokens_by_rank)
    assert found[CULPRIT].failed == ("source_set", "counts")
    assert "1 repeated" in found[CULPRIT].message
    assert found[-1].failed == ("combine_values",)


def test_a_token_of_other_ranks_fails_the_source_set() -> None:
    tokens_by_rank = (8,) * 8
    owned = SHAPE.owned(8)
    ids = problem_of(0, tokens_by_rank).expert_ids
    elsewhere = ((ids < owned[CULPRIT]) | (ids >= owned[CULPRIT + 1])).all(dim=1)
    stray = int(torch.nonzero(elsewhere)[0])

    def work(backend: Simulated, problem: Problem) -> Verdict:
        if backend.rank != CULPRIT:
            return run_oracle(backend, problem, RIGHT)
        received = backend.receive

        def with_stray(problem: Problem, handle: list[Copy]) -> Received:
            good = received(problem, handle)
            good.tokens[0] = backend.group.problems[0].x[stray]
            return good

        backend.receive = with_stray  # type: ignore[method-assign]
        return run_oracle(backend, problem, RIGHT)

    verdict = on_all_ranks(work, None, tokens_by_rank)[CULPRIT]
    assert verdict.failed[:1] == ("source_set",)
    assert "1 missing, 1 of other ranks" in verdict.message


def test_gates_applied_in_dispatch_fail_weights_and_then_the_values() -> None:
    def squared(received: Received) -> Received:
        return dataclasses.replace(received, weights=weights_of(received) ** 2)

    found = verdicts(Faults(received=squared))
    assert found[CULPRIT].failed[:1] == ("weights",)
    assert set(found[CULPRIT].failed) <= {"weights", "combine_values"}
    assert "combine_values" in failed_anywhere(found)


@pytest.mark.parametrize("tokens_by_rank", [(1,) * 4, (8,) * 4], ids=str)
def test_gates_applied_in_combine_fail_the_values_alone(tokens_by_rank: tuple[int, ...]) -> None:
    def gated(messages: Tensor, received: Received) -> Tensor:
        return messages * weights_of(received).sum(dim=1, keepdim=True).to(messages.dtype)

    assert failed_anywhere(verdicts(Faults(messages=gated), tokens_by_rank=tokens_by_rank)) == {
        "combine_values"
    }


@pytest.mark.parametrize("tokens_by_rank", [(1,) * 4, (8,) * 4], ids=str)
def test_payloads_swapped_without_their_metadata_fail_metadata_weights_and_values(
    tokens_by_rank: tuple[int, ...],
) -> None:
    def swapped(received: Received) -> Received:
        tokens = received.tokens.clone()
        tokens[0], tokens[-1] = received.tokens[-1], received.tokens[0]
        return dataclasses.replace(received, tokens=tokens)

    found = verdicts(Faults(received=swapped), tokens_by_rank=tokens_by_rank)
    assert {"metadata", "weights"} <= set(found[CULPRIT].failed)
    assert "source_set" not in found[CULPRIT].failed
    # Rows run from the last rank's tokens to the first's.
    assert "combine_values" in found[0].failed
    assert "combine_values" in found[-1].failed


def test_rows_swapped_with_their_metadata_fail_only_the_values() -> None:
    def swapped(messages: Tensor, received: Received) -> Tensor:
        return torch.cat([messages[-1:], messages[1:-1], messages[:1]])

    assert failed_anywhere(verdicts(Faults(messages=swapped))) == {"combine_values"}


def test_one_flipped_payload_bit_fails_payload_alone() -> None:
    def flipped(received: Received) -> Received:
        received.tokens.view(torch.int16)[3, 500] ^= 1
        return received

    found = verdicts(Faults(received=flipped))
    assert found[CULPRIT].failed == ("payload",)
    assert "payload: 1 of" in found[CULPRIT].message
    assert failed_anywhere(found) == {"payload"}


def test_an_unreadable_source_fails_source_set_and_payload_and_combine_goes_on() -> None:
    def destroyed(received: Received) -> Received:
        received.tokens[0, :32] = math.nan
        return received

    found = verdicts(Faults(received=destroyed))
    assert {"source_set", "payload"} <= set(found[CULPRIT].failed)
    assert "1 unreadable" in found[CULPRIT].message
    assert "receive" not in found[CULPRIT].failed


def test_unmasked_ids_fail_metadata_and_multiplicity_but_not_weights() -> None:
    def unmasked(received: Received) -> Received:
        ids = received.expert_ids
        foreign = torch.arange(SHAPE.experts - 8, SHAPE.experts)
        return dataclasses.replace(received, expert_ids=torch.where(ids < 0, foreign, ids))

    found = verdicts(Faults(received=unmasked))
    assert found[CULPRIT].failed[:2] == ("metadata", "multiplicity")
    assert set(found[CULPRIT].failed) <= {"metadata", "multiplicity", "combine_values"}


def test_a_wrong_local_id_fails_metadata_but_not_multiplicity() -> None:
    def wrong(received: Received) -> Received:
        ids = received.expert_ids.clone()
        row, choice = torch.nonzero(ids >= 0)[0].tolist()
        local = set(range(8, 16)) - set(ids[row].tolist())
        ids[row, choice] = min(local)
        return dataclasses.replace(received, expert_ids=ids)

    failed = verdicts(Faults(received=wrong))[CULPRIT].failed
    assert "metadata" in failed
    assert "multiplicity" not in failed


def test_reordered_choices_within_a_row_pass() -> None:
    def flipped(received: Received) -> Received:
        return dataclasses.replace(
            received, expert_ids=received.expert_ids.flip(1), weights=weights_of(received).flip(1)
        )

    assert all(verdict.passed for verdict in verdicts(Faults(received=flipped)))


def test_one_weight_bit_fails_weights() -> None:
    def stepped(received: Received) -> Received:
        bits = weights_of(received).view(torch.int32)
        row, choice = torch.nonzero(bits)[0].tolist()
        bits[row, choice] += 1
        return received

    found = verdicts(Faults(received=stepped))
    assert found[CULPRIT].failed[:1] == ("weights",)
    assert "1 of" in found[CULPRIT].message


def test_a_wrong_count_fails_counts_alone() -> None:
    def miscounted(received: Received) -> Received:
        received.expert_counts[2] += 1
        return received

    found = verdicts(Faults(received=miscounted))
    assert found[CULPRIT].failed == ("counts",)
    assert "1 of 8 experts differ, first: expert 10 got" in found[CULPRIT].message
    assert failed_anywhere(found) == {"counts"}


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("payload", lambda r: {"tokens": r.tokens[:, :-1]}),
        ("payload", lambda r: {"tokens": r.tokens.float()}),
        ("payload", lambda r: {"tokens": torch.tensor(1.0)}),
        ("metadata", lambda r: {"expert_ids": r.expert_ids[:-1]}),
        ("metadata", lambda r: {"expert_ids": r.expert_ids.int()}),
        ("weights", lambda r: {"weights": None}),
        ("weights", lambda r: {"weights": r.weights.double()}),
        ("weights", lambda r: {"weights": r.weights[:, 1:]}),
        ("counts", lambda r: {"expert_counts": r.expert_counts[:-1]}),
        ("counts", lambda r: {"expert_counts": r.expert_counts.int()}),
    ],
    ids=[
        "tokens-short",
        "tokens-fp32",
        "tokens-scalar",
        "ids-rows",
        "ids-int32",
        "weights-none",
        "weights-fp64",
        "weights-short",
        "counts-short",
        "counts-int32",
    ],
)
def test_a_wrong_shape_or_dtype_fails_its_check_without_an_exception(
    check: str, change: Callable[[Received], dict[str, Any]]
) -> None:
    found = verdicts(Faults(received=lambda received: dataclasses.replace(received, **change(received))))
    assert check in found[CULPRIT].failed
    assert "receive" not in found[CULPRIT].failed
    assert f"{check}: " in found[CULPRIT].message
