"""Each probe sees what it is for, and says what moved where; right transports pass all of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pytest_ep.backends.base import Received
from pytest_ep.matrix.cells import PROBE_NAMES
from pytest_ep.oracle import accumulator
from pytest_ep.oracle.accumulator import Finding
from pytest_ep.oracle.probes import PROBES
from pytest_ep.oracle.probes import probe_problem
from pytest_ep.oracle.probes import run_probe
from pytest_ep.oracle.reduction import named
from tests.simulated import CULPRIT
from tests.simulated import Faults
from tests.simulated import Group
from tests.simulated import Simulated
from tests.simulated import problem_of


def probed(name: str, faults: Faults | None = None, ranks: int = 4) -> str:
    """Run a probe on simulated ranks; return what the first rank that saw something said."""
    group = Group(ranks, faults or Faults())

    def one(rank: int) -> str:
        problem = probe_problem(PROBES[name], problem_of(rank, (8,) * ranks))
        return run_probe(PROBES[name], Simulated(group, rank), problem)

    with ThreadPoolExecutor(ranks) as pool:
        return next(filter(None, pool.map(one, range(ranks))), "")


def observed(faults: Faults | None = None, ranks: int = 4) -> list[Finding]:
    group = Group(ranks, faults or Faults())

    def one(rank: int) -> Finding:
        return accumulator.observe(Simulated(group, rank), problem_of(rank, (8,) * ranks), ranks)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def test_the_names_that_collection_knows_are_the_probes_there_are() -> None:
    assert (*PROBES, "accumulator") == PROBE_NAMES


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", PROBES)
def test_a_right_transport_passes(name: str, ranks: int) -> None:
    assert probed(name, ranks=ranks) == ""


def lost(messages: Tensor, received: Received) -> Tensor:
    return torch.zeros_like(messages)


def doubled(messages: Tensor, received: Received) -> Tensor:
    return 2 * messages


def neighbours_row(messages: Tensor, received: Received) -> Tensor:
    return messages.roll(1, 0)


def neighbours_column(messages: Tensor, received: Received) -> Tensor:
    return messages.roll(1, 1)


def vector_swapped(messages: Tensor, received: Received) -> Tensor:
    messages[:, 120:136] = messages[:, 120:136].roll(8, 1)
    return messages


@pytest.mark.parametrize(
    ("name", "fault", "says"),
    [
        ("uniform", lost, "ranks seem to have answered"),
        ("uniform", doubled, "ranks seem to have answered"),
        ("rank_powers", lost, r"lost: [1], too many: none"),
        ("rank_powers", doubled, "too many"),
        ("slots", neighbours_row, "the row of another token"),
        (
            "columns",
            neighbours_column,
            "it holds what belongs into a column whose number has the digit 63 in base 64",
        ),
        (
            "columns",
            vector_swapped,
            "got 0, expected 56; it holds what belongs into a column whose number has the digit 0",
        ),
        ("every_rank", lost, "3 ranks seem to have answered where 4 did"),
        ("one_rank", lost, "0 ranks seem to have answered where 1 did"),
        ("several_experts", lost, "ranks seem to have answered"),
    ],
)
def test_a_probe_says_what_moved(name: str, fault: object, says: str) -> None:
    assert says in probed(name, Faults(messages=fault))  # type: ignore[arg-type]


def test_repeated_calls_show_an_output_that_is_one_call_old() -> None:
    outputs: list[Tensor] = []

    def stale(combined: Tensor) -> Tensor:
        outputs.append(combined)
        return outputs[max(0, len(outputs) - 2)]

    said = probed("repeated_calls", Faults(combined=stale))

    assert "round 2 of 4" in said
    assert "that is an earlier call's answer" in said


def test_dispatch_faults_show_in_probes_too() -> None:
    def unmasked(received: Received) -> Received:
        return replace(received, expert_ids=received.expert_ids.clamp(min=0))

    assert "metadata" in probed("several_experts", Faults(received=unmasked))


def test_the_accumulator_is_named_and_compared_with_the_table() -> None:
    right, says = accumulator.judge(observed(), "rank-sum-fp32")
    assert right
    assert says == "combine follows rank-sum-fp32 (here the same function as two-level)"

    tree = observed(Faults(reduction=named("topk-slot-tree", 1)))[CULPRIT]
    right, says = accumulator.judge([tree], "rank-sum-fp32")
    assert not right
    assert says == "combine follows topk-slot-tree, but the adapter's table says rank-sum-fp32"
    assert accumulator.judge([tree], "topk-slot-tree") == (True, "combine follows topk-slot-tree")


def test_eight_ranks_give_the_classic_sum() -> None:
    findings = observed(ranks=8)

    assert {finding.classic for finding in findings} == {1.015625}
    assert "1 + 7 x 2^-9 gives 1.015625" in accumulator.judge(findings, "rank-sum-fp32")[1]


def test_a_kernel_that_follows_nothing_known_is_a_failure_that_says_how_near_it_is() -> None:
    def off(combined: Tensor) -> Tensor:
        combined[0, 0] += 1
        return combined

    right, says = accumulator.judge(observed(Faults(combined=off)), "rank-sum-fp32")

    assert not right
    assert "combine follows no known reduction (nearest is rank-sum-fp32 with 100.0% of the elements)" in says
