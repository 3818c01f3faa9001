"""A failure names its cause: every fault of the table, on ranks that are threads."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_ep.matrix.shapes import Shape
from pytest_ep.oracle.checks import Verdict
from pytest_ep.oracle.diagnosis import arithmetic
from pytest_ep.oracle.diagnosis import collect
from pytest_ep.oracle.diagnosis.elements import bf16_step
from pytest_ep.oracle.diagnosis.explanations import EXPLANATIONS
from pytest_ep.oracle.diagnosis.report import Diagnosis
from pytest_ep.oracle.diagnosis.report import diagnose
from pytest_ep.oracle.reduction import Contributions
from tests.faults.diagnosed import LADDER
from tests.faults.diagnosed import At
from tests.faults.diagnosed import Fault
from tests.faults.diagnosed import simulate
from tests.faults.wrong_combines import COMBINE_FAULTS
from tests.faults.wrong_dispatches import DISPATCH_FAULTS

FAULTS = {fault.name: fault for fault in (*COMBINE_FAULTS, *DISPATCH_FAULTS)}
SEED_DEFECTS = {"bare", "without_counts", "unmasked", "ladder_sized", "by_slot", "fp32_on_tree"}
"""What the bring-up that this project began with took one hardware run each to find."""


def diagnosis(verdicts: list[Verdict]) -> Diagnosis:
    found = diagnose([verdict.evidence for verdict in verdicts], "the command")
    assert found is not None
    return found


@pytest.mark.parametrize("ep_size", [2, 4])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_its_check_and_is_named(name: str, ep_size: int) -> None:
    fault = FAULTS[name]
    # Real ranks have the whole ladder; the one fault is of a ladder's longest.
    ladder = LADDER if name == "ladder_sized" else (1, 8)
    for tokens, verdicts in simulate(fault, ep_size, ladder).items():
        if fault.unseen(ep_size, tokens):
            assert all(verdict.passed and verdict.evidence is None for verdict in verdicts)
            continue
        assert fault.checks in {check for verdict in verdicts for check in verdict.failed}
        found = diagnosis(verdicts)
        assert re.search(fault.says, found.sentence), found.text
        assert len(found.lines) <= 20, found.text
        assert found.lines[-1] == "repeat: the command"
        assert not found.data["notes"]
        assert json.loads(json.dumps(found.data, allow_nan=False)) == found.data


def test_the_table_has_every_explanation_and_the_defects_that_began_it() -> None:
    assert len(FAULTS) == len(COMBINE_FAULTS) + len(DISPATCH_FAULTS) >= 40
    assert FAULTS.keys() >= SEED_DEFECTS
    seen = sum(any(not fault.unseen(ep, 64) for ep in (2, 4)) for fault in FAULTS.values())
    assert seen >= 36


@pytest.mark.parametrize(
    "name", ["truncating", "slot_tree", "rank_missing", "message_step", "planes_mixed", "two_level"]
)
def test_eight_contributors_are_told_apart_as_well(name: str) -> None:
    shape = Shape("eight", hidden=512, experts=64, top_k=8)
    for verdicts in simulate(FAULTS[name], 8, (8,), shape).values():
        assert re.search(FAULTS[name].says, diagnosis(verdicts).sentence)


def test_every_wrong_element_is_tried_where_a_sample_would_do() -> None:
    (verdicts,) = simulate(FAULTS["message_step"], 2, (512,)).values()
    found = diagnosis(verdicts)
    wrong = found.data["combine"]["wrong"]
    assert wrong > 200_000
    assert f": {wrong} of {wrong} wrong elements" in found.sentence
    tried = {(one["name"], one["which"]): one for one in found.data["combine"]["explanations"]}
    assert tried["message step", "rank 1"]["explained"] == wrong
    assert all(one["explained"] < wrong for variant, one in tried.items() if variant[0] != "message step")


def test_two_faults_at_once_are_the_two_best_and_what_tells_them_apart() -> None:
    def half_and_half(at: At, combined: Tensor) -> Tensor:
        combined[:5] *= 0.5
        combined[5:] = combined[5:].roll(4, dims=1)
        return combined

    fault = Fault("two", "combine_values", "", give=half_and_half)
    (verdicts,) = simulate(fault, 4, (8,)).values()
    said = diagnosis(verdicts).sentence
    assert re.match(
        r"no single explanation of the \d+ wrong elements: results are off by one common factor: 1/2 "
        r"\(6\d%\), or the columns were moved by \+4 \(3\d%\); "
        r"-k 'test_probe and \(uniform or columns\)' tells",
        said,
    ), said


def test_noise_has_no_explanation_and_all_are_ruled_out() -> None:
    def noisy(at: At, combined: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return (combined.float() + torch.randn(combined.shape, generator=generator)).to(torch.bfloat16)

    (verdicts,) = simulate(Fault("noise", "", "", give=noisy), 4, (8,)).values()
    found = diagnosis(verdicts)
    assert re.match(r"no explanation fits the \d+ wrong elements; see what -k 'test_probe", found.sentence)
    assert found.data["combine"]["ruled_out"] == list(EXPLANATIONS)


def test_the_worst_element_is_told_with_its_messages() -> None:
    (verdicts,) = simulate(FAULTS["slot_tree"], 4, (8,)).values()
    found = diagnosis(verdicts)
    (element, *_) = found.data["combine"]["worst"]
    sent = dict(element["messages"])
    assert sorted(sent.values()) == [-8.0, 2**-5, 8.0] or sorted(sent.values()) == [-8.0, 0.0, 2**-5, 8.0]
    assert (element["got"], element["expected"]) == (0.0, 2**-5)
    assert element["error"] == 1.0
    assert (element["result_steps"], element["message_steps"]) == (128.0, 0.5)
    assert element["cancellation"] == 513.0
    spread = {one["rank"]: one for one in found.data["combine"]["spread"]}
    assert sum(one["wrong"] for one in spread.values()) == found.data["combine"]["wrong"]
    assert all(sum(one["by_block"]) == one["wrong"] and not one["whole"] for one in spread.values())


def test_the_spread_names_the_contributing_rank() -> None:
    (verdicts,) = simulate(FAULTS["planes_mixed"], 4, (64,)).values()
    totals = [[0, 0] for _ in range(4)]
    for one in diagnosis(verdicts).data["combine"]["spread"]:
        for rank, (wrong, everything) in enumerate(one["by_rank"]):
            totals[rank][0] += wrong
            totals[rank][1] += everything
    shares = [wrong / everything for wrong, everything in totals]
    assert shares.index(max(shares)) == 1
    assert shares[1] > 0.9


def test_evidence_travels_and_is_the_same_on_every_rank() -> None:
    (verdicts,) = simulate(FAULTS["first_lost"], 4, (8,)).values()
    there = pickle.loads(pickle.dumps(verdicts))
    assert len(pickle.dumps(verdicts)) < 50_000
    assert diagnosis(there) == diagnosis(verdicts)


@pytest.mark.parametrize("part", ["of_combine", "of_dispatch"])
def test_a_diagnosis_that_fails_changes_no_verdict(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (before,) = simulate(FAULTS["first_lost"], 2, (8,)).values()

    def broken(*given: Any) -> None:
        raise ZeroDivisionError("in the diagnosis")

    monkeypatch.setattr(collect, part, broken)
    (verdicts,) = simulate(FAULTS["first_lost"], 2, (8,)).values()
    assert [one.failed for one in verdicts] == [one.failed for one in before]
    assert [one.message for one in verdicts] == [one.message for one in before]
    assert "not diagnosed: ZeroDivisionError: in the diagnosis" in diagnosis(verdicts).text


def test_a_right_transport_is_not_diagnosed(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*given: Any) -> None:
        raise AssertionError("nothing failed")

    monkeypatch.setattr(collect, "of_combine", unwanted)
    monkeypatch.setattr(collect, "of_dispatch", unwanted)
    (verdicts,) = simulate(Fault("right", "", ""), 4, (8,)).values()
    assert all(verdict.passed and verdict.evidence is None for verdict in verdicts)
    assert diagnose([verdict.evidence for verdict in verdicts], "") is None


def contributions(values: list[float], choices: list[int], top_k: int, apart: int = 1) -> Contributions:
    """One token, one column; contributors ``apart`` ranks from each other."""
    ranks = torch.arange(len(values)) * apart
    rows = torch.tensor(values, dtype=torch.bfloat16)[:, None]
    return Contributions(rows, torch.zeros_like(ranks), ranks, torch.tensor(choices), 1, top_k)


CLASSIC = contributions([1.0] + 7 * [2.0**-9], list(range(8)), 8)
ODD = contributions([1.0, 2.0**-8 + 2.0**-9], [0, 1], 8)
APART = contributions([1.0, 2.0**-8 + 2.0**-9], [0, 1], 8, apart=4)
BACKWARDS = contributions([1.0, 2.0**-8, 2.0**-8], [2, 0, 1], 3)


@pytest.mark.parametrize(
    ("name", "given", "result"),
    [
        ("rank-sum-fp32", CLASSIC, 1.015625),
        ("topk-slot-tree", CLASSIC, 1.0078125),
        ("a sequential BF16 sum in choice order", CLASSIC, 1.0),
        ("a sequential BF16 sum in rank order", CLASSIC, 1.0),
        ("rank-sum-fp32", ODD, 1.0078125),
        ("rank-sum-fp32 truncated to BF16", ODD, 1.0),
        ("topk-slot-tree truncated to BF16", ODD, 1.0),
        ("two-level (domains of 4) truncated to BF16", ODD, 1.0078125),
        ("two-level (domains of 4) truncated to BF16", APART, 1.0),
        ("a sequential BF16 sum in choice order", BACKWARDS, 1.0078125),
        ("a sequential BF16 sum in rank order", BACKWARDS, 1.0),
        ("a pairwise BF16 tree in rank order", CLASSIC, 1.0078125),
    ],
)
def test_reductions_add_as_their_names_say(name: str, given: Contributions, result: float) -> None:
    assert float(dict(arithmetic.models(8))[name](given)) == result


@pytest.mark.parametrize(
    ("value", "step"), [(1.0, 2**-7), (1.99, 2**-7), (-2.0, 2**-6), (0.25, 2**-9), (0.0, 2**-13)]
)
def test_a_bf16_step_is_the_distance_to_the_next_number(value: float, step: float) -> None:
    assert bf16_step(value) == step
    if value:
        one = torch.tensor([value], dtype=torch.bfloat16)
        after = (one.view(torch.int16) + 1).view(torch.bfloat16)
        assert abs(float(after) - float(one)) == step


Change = Callable[[At, Tensor], Tensor]


@pytest.mark.parametrize("columns", [slice(0, 512, 2), slice(100, 140)], ids=["every-second", "a-run"])
def test_an_explanation_that_holds_for_some_columns_says_so(columns: slice) -> None:
    def partly(at: At, combined: Tensor) -> Tensor:
        combined[:, columns] *= 0.5
        return combined

    (verdicts,) = simulate(Fault("partly", "", "", give=partly), 4, (8,)).values()
    said = diagnosis(verdicts).sentence
    assert said.startswith("results are off by one common factor: 1/2: ")
    assert said.endswith("though not for the right elements beside them") == (columns.step == 2)
