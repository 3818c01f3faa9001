"""Latency and bandwidth are given where a line explains the data, and as surely as it does."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_ep.timing.fit import Fit
from pytest_ep.timing.fit import fit
from pytest_ep.timing.fit import student_975

LATENCY, BANDWIDTH = 18e-6, 350e9
SIZES = [14336.0 * 2**power for power in range(14)]


def line(size: float) -> float:
    return LATENCY + size / BANDWIDTH


def found(sizes: list[float], seconds: list[float]) -> Fit:
    fitted = fit(sizes, seconds)
    assert fitted is not None
    return fitted


def test_a_line_is_found_again() -> None:
    fitted = found(SIZES, [line(size) for size in SIZES])
    assert fitted.latency == pytest.approx(LATENCY)
    assert fitted.bandwidth == pytest.approx(BANDWIDTH)
    assert fitted.r2 == pytest.approx(1)
    assert fitted.transfer == pytest.approx(1 - LATENCY / line(SIZES[-1]))
    assert fitted.points == 14


@pytest.mark.parametrize("sizes", [SIZES, [1e7 + 1e6 * step for step in range(14)]], ids=["ladder", "far"])
def test_an_interval_holds_the_truth_in_95_percent_of_noisy_curves(sizes: list[float]) -> None:
    random = np.random.default_rng(5)
    latency = bandwidth = 0
    for _ in range(1000):
        fitted = found(sizes, [line(size) + random.normal(scale=2e-6) for size in sizes])
        low, high = fitted.latency_interval
        latency += low <= LATENCY <= high
        low, end = fitted.bandwidth_interval
        assert end is not None
        bandwidth += low <= BANDWIDTH <= end
    assert 930 <= latency <= 970
    assert 930 <= bandwidth <= 970


def test_as_little_as_explains_nearly_nothing_leaves_the_bandwidth_open() -> None:
    sizes = [1e6, 2e6, 3e6, 4e6]
    fitted = found(sizes, [2.0, 2.6, 2.6, 3.2])
    low, high = fitted.bandwidth_interval
    assert 0.9 <= fitted.r2 < 0.91
    assert (low < fitted.bandwidth, high) == (True, None)


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [
        ([1e6, 2e6, 3e6], [2.0, 3.0, 4.0]),  # too few
        ([1e6, 2e6, 3e6, 3e6], [2.0, 3.0, 4.0, 4.0]),  # four points, three sizes
        ([0.0, 0.0, 0.0, 0.0], [2.0, 3.0, 4.0, 5.0]),  # nothing leaves a single rank
        ([1e6, 2e6, 3e6, 4e6], [2.0, 2.7, 2.3, 3.2]),  # R^2 of 0.63
        ([1e6, 2e6, 3e6, 4e6], [1.0, 2.2, 3.4, 4.6]),  # a latency below zero
        ([1e6, 2e6, 3e6, 4e6], [5.0, 4.0, 3.0, 2.0]),  # faster with more
        ([1e6, 2e6, 3e6, 4e6], [5.0, 5.0, 5.0, 5.0]),
    ],
)
def test_what_a_line_does_not_explain_has_no_fit(sizes: list[float], seconds: list[float]) -> None:
    assert fit(sizes, seconds) is None


def test_a_quarter_of_the_longest_time_must_be_transfer() -> None:
    sizes = [1e6, 2e6, 3e6, 4e6]
    assert fit(sizes, [10 + 0.82 * size / 1e6 for size in sizes]) is None  # 3.28 of 13.28
    assert fit(sizes, [10 + 0.84 * size / 1e6 for size in sizes]) is not None  # 3.36 of 13.36


@pytest.mark.parametrize(
    ("freedom", "published"),
    [(2, 4.303), (3, 3.182), (5, 2.571), (6, 2.447), (10, 2.228), (12, 2.179), (30, 2.042), (1000, 1.962)],
)
def test_the_quantiles_are_those_of_the_tables(freedom: int, published: float) -> None:
    assert student_975(freedom) == pytest.approx(published, rel=1e-3)
