"""Reduction models against vectors worked by hand."""

from __future__ import annotations

import pytest
import torch

from pytest_ep.oracle.reduction import Contributions
from pytest_ep.oracle.reduction import named

MODELS = ("rank-sum-fp32", "two-level", "topk-slot-tree")


def one_token(messages: dict[int, float], choices: dict[int, int], top_k: int) -> Contributions:
    """The messages of one token by rank, and each rank's first choice."""
    ranks = sorted(messages)
    return Contributions(
        rows=torch.tensor([[messages[rank]] for rank in ranks]),
        token=torch.zeros(len(ranks), dtype=torch.int64),
        rank=torch.tensor(ranks),
        choice=torch.tensor([choices[rank] for rank in ranks]),
        tokens=1,
        top_k=top_k,
    )


def in_slots(*slots: float) -> Contributions:
    """Rank r's message at choice r; a choice of 0.0 belongs to a rank that stands at an earlier one."""
    present = {rank: value for rank, value in enumerate(slots) if value}
    return one_token(present, {rank: rank for rank in present}, top_k=len(slots))


def reduced(name: str, contributions: Contributions, domain: int = 1) -> float:
    result = named(name, domain)(contributions)
    assert result.dtype == torch.float32
    assert result.shape == (1, 1)
    return float(result)


def test_one_and_seven_small_ones_tell_tree_from_fp32() -> None:
    # 7 x 2^-9: alone with the 1 the first is lost (a tie to even), the other six arrive as 2^-8 and 2^-7.
    contributions = in_slots(1.0, *[2.0**-9] * 7)
    assert reduced("topk-slot-tree", contributions) == 1.0078125
    # 1.013671875 lies between 1.0078125 and 1.015625, nearer to the second.
    assert reduced("rank-sum-fp32", contributions) == 1.015625


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        # K = 4: (256 + 1) + (-256 + 0) loses the 1, (256 + -256) + (1 + 0) keeps it.
        ((256.0, 1.0, -256.0, 0.0), 0.0),
        ((256.0, -256.0, 1.0, 0.0), 1.0),
        ((256.0, 0.0, -256.0, 1.0), 1.0),
        # K = 6: ((0 1)(2 3)) then (4 5), which waits as an odd leftover until s = 4.
        ((256.0, 0.0, 1.0, 0.0, -256.0, 0.0), 0.0),
        ((256.0, 0.0, 0.0, 0.0, -256.0, 1.0), 1.0),
        ((1.0, 0.0, 0.0, 0.0, 256.0, -256.0), 1.0),
        # K = 3 and 5: the last choice has no partner at first.
        ((256.0, 1.0, -256.0), 0.0),
        ((1.0, 256.0, -256.0), 0.0),
        ((256.0, -256.0, 1.0), 1.0),
        ((256.0, -256.0, 0.0, 0.0, 1.0), 1.0),
        ((256.0, 0.0, 0.0, 1.0, -256.0), 0.0),
        # Every addition rounds to even: 256 + 1 -> 256, 256 + 3 -> 260.
        ((256.0, 1.0), 256.0),
        ((256.0, 3.0), 260.0),
        ((5.0,), 5.0),
    ],
)
def test_the_slot_tree_adds_in_its_own_order(slots: tuple[float, ...], expected: float) -> None:
    assert reduced("topk-slot-tree", in_slots(*slots)) == expected


def test_the_slot_tree_places_a_message_by_choice_and_not_by_rank() -> None:
    messages = {0: 256.0, 1: -256.0, 2: 1.0}
    assert reduced("topk-slot-tree", one_token(messages, {0: 0, 1: 1, 2: 2}, top_k=4)) == 1.0
    assert reduced("topk-slot-tree", one_token(messages, {0: 0, 1: 2, 2: 1}, top_k=4)) == 0.0


def test_rank_sum_narrows_once_and_in_the_end() -> None:
    assert reduced("rank-sum-fp32", in_slots(256.0, 1.0, -256.0)) == 1.0
    assert reduced("rank-sum-fp32", in_slots(256.0, 1.0)) == 256.0
    assert reduced("rank-sum-fp32", in_slots(256.0, 1.0, 1.0)) == 258.0


@pytest.mark.parametrize(
    ("domain", "expected"),
    [
        (1, 1.0),  # every rank its own domain: nothing to narrow early
        (2, 0.0),  # 256 + 1 -> 256, then -256
        (3, 1.0),  # all in one domain
        (4, 1.0),
    ],
)
def test_two_level_narrows_each_domain(domain: int, expected: float) -> None:
    assert reduced("two-level", in_slots(256.0, 1.0, -256.0), domain) == expected


def test_two_level_groups_consecutive_ranks() -> None:
    first = {0: 256.0, 3: 1.0, 7: -256.0}
    last = {0: 256.0, 4: 1.0, 7: -256.0}
    choices = {0: 0, 3: 1, 4: 1, 7: 2}
    assert reduced("two-level", one_token(first, choices, top_k=3), domain=4) == 0.0
    assert reduced("two-level", one_token(last, choices, top_k=3), domain=4) == 1.0


def test_two_level_narrows_the_sum_of_its_domains_too() -> None:
    # Domains 256 and 3: FP32 keeps 259, BF16 has 260.
    assert reduced("two-level", one_token({0: 256.0, 8: 3.0}, {0: 0, 8: 1}, top_k=2), domain=8) == 260.0


@pytest.mark.parametrize("name", MODELS)
def test_each_token_and_column_is_reduced_for_itself(name: str) -> None:
    contributions = Contributions(
        rows=torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]]),
        token=torch.tensor([0, 2, 2]),
        rank=torch.tensor([0, 0, 1]),
        choice=torch.tensor([0, 0, 1]),
        tokens=3,
        top_k=2,
    )
    assert named(name, 1)(contributions).tolist() == [[1.0, 10.0], [0.0, 0.0], [6.0, 60.0]]


@pytest.mark.parametrize("name", MODELS)
def test_no_tokens_reduce_to_none(name: str) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    contributions = Contributions(torch.zeros(0, 4), none, none, none, tokens=0, top_k=8)
    assert named(name, 2)(contributions).shape == (0, 4)


def test_a_model_carries_its_name() -> None:
    assert [named(name, 2).name for name in MODELS] == list(MODELS)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown reduction 'ring': known are rank-sum-fp32, two-level"):
        named("ring", 1)


def test_a_domain_without_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="scale-up domain of 0 ranks"):
        named("two-level", 0)
