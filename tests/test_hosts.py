"""Medians of ranks and hosts."""

from __future__ import annotations

import pytest

from pytest_ep.matrix.cells import Cell
from pytest_ep.matrix.cells import Key
from pytest_ep.matrix.shapes import SHAPES
from pytest_ep.results.hosts import medians
from pytest_ep.results.hosts import ranks_by_host
from pytest_ep.results.hosts import scattered
from pytest_ep.results.record import JSON
from pytest_ep.results.record import CaseResult


@pytest.mark.parametrize(
    ("local_sizes", "expected"), [([1], [1]), ([4] * 8, [4, 4]), ([2, 2, 2, 2, 3, 3, 3], [2, 2, 3])]
)
def test_ranks_lie_on_hosts_in_order(local_sizes: list[int], expected: list[int]) -> None:
    assert ranks_by_host(local_sizes) == expected


def test_ranks_dealt_out_over_hosts_in_turn_are_told_apart_from_blocks() -> None:
    assert scattered(["a"]) == scattered(["a", "a", "b", "c", "c"]) == ""
    assert scattered(["a", "b", "a", "b"]).startswith(
        "rank 2 is on a again, after rank 1 on b: place the ranks"
    )


def test_a_host_has_the_median_of_its_ranks() -> None:
    shape = SHAPES["deepseek_v3"]
    cell = Cell(Key("torch_a2a", "cpu", 5, "normal", "bf16", shape.name), shape, "uniform", 8)
    rows: dict[str, dict[str, JSON]] = {"dispatch": {"rank_p50_us": [1.0, 2.0, 9.0, 4.0, 8.0]}}
    found = medians([CaseResult("a", cell, "timed", rows=rows), CaseResult("b", cell, "failed")], [3, 2])
    assert found == [
        {
            "case": "a",
            "component": "dispatch",
            "rank_p50_us": [1.0, 2.0, 9.0, 4.0, 8.0],
            "host_p50_us": [2.0, 6.0],
        }
    ]
