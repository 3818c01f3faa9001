"""What is one curve, and what files say of its latency and bandwidth."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_ep.matrix.cells import Cell
from pytest_ep.matrix.cells import Key
from pytest_ep.matrix.shapes import Shape
from pytest_ep.results.curves import Row
from pytest_ep.results.curves import fits
from pytest_ep.results.curves import rows_of
from pytest_ep.results.record import CaseResult

SHAPE = Shape("small", 64, 16, 4)
KEY = Key("torch_a2a", "cpu", 2, "normal", "bf16", "small")


def curve(latency_us: float, gbps: float, clock: str = "graph", **params: Any) -> list[Row]:
    """Eight sizes on a line, from 1 MB on."""
    rows: list[Row] = []
    for tokens in (1 << power for power in range(8)):
        size = tokens * 1_000_000
        row = {"bytes": size, "p50_us": latency_us + size / gbps / 1e3, "clock": clock}
        rows.append(({"backend": "a", "tokens": tokens, **params}, row))
    return rows


def test_a_curve_is_all_that_is_alike_but_for_the_tokens() -> None:
    one, other = curve(20, 300, component="dispatch"), curve(30, 200, component="combine")
    mixed = [row for pair in zip(one, other, strict=True) for row in pair]
    found = {said["component"]: said for said in fits(mixed)}
    assert found["dispatch"]["latency_us"] == pytest.approx(20)
    assert found["dispatch"]["gbps"] == pytest.approx(300)
    assert found["combine"]["latency_us"] == pytest.approx(30)
    assert found["combine"]["gbps"] == pytest.approx(200)


@pytest.mark.parametrize("apart", [{"clock": "event"}, {"token_skew": "linear"}, {"routing": "local"}])
def test_another_clock_skew_or_routing_is_another_curve(apart: dict[str, str]) -> None:
    found = fits([*curve(20, 300), *curve(50, 300, **apart)])
    assert [said["latency_us"] for said in found] == [pytest.approx(20), pytest.approx(50)]


def test_a_fit_says_of_what_and_how_surely() -> None:
    (said,) = fits(curve(20, 300, component="dispatch"))
    assert set(said) == {
        *("backend", "component", "clock", "points", "latency_us", "latency_interval_us"),
        *("gbps", "gbps_interval", "r2", "transfer_share"),
    }
    assert said["points"] == 8
    assert said["latency_interval_us"] == pytest.approx([20, 20])
    assert said["gbps_interval"] == pytest.approx([300, 300])


def test_curves_that_no_line_explains_are_left_out() -> None:
    assert fits(curve(20, 300)[:3]) == []
    assert fits(curve(1e6, 300)) == []
    assert fits([]) == []


def test_rows_are_those_of_timed_cases_with_their_coordinates() -> None:
    cell = Cell(KEY, SHAPE, "uniform", 8)
    timed = CaseResult("a", cell, "timed", rows={"combine": {"bytes": 1}})
    ((params, row),) = rows_of([timed, CaseResult("b", cell, "failed")])
    assert (params["tokens"], params["backend"], params["component"]) == (8, "torch_a2a", "combine")
    assert row == {"bytes": 1}
