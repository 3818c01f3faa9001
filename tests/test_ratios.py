"""Ratios of medians: how wide their intervals are, and what is called a change in real noise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pytest_ep.results import times
from pytest_ep.results.verdicts import FASTER
from pytest_ep.results.verdicts import SAME
from pytest_ep.results.verdicts import SLOWER
from pytest_ep.results.verdicts import Floor
from pytest_ep.timing.ratios import PRIOR_FREEDOM
from pytest_ep.timing.ratios import LaunchNoise
from pytest_ep.timing.ratios import Measured
from pytest_ep.timing.ratios import Ratio
from pytest_ep.timing.ratios import launch_noise
from pytest_ep.timing.ratios import measure
from pytest_ep.timing.ratios import ratio
from pytest_ep.timing.ratios import scale
from pytest_ep.timing.ratios import slow_launches
from pytest_ep.timing.statistics import student
from tests.real_noise import RealNoise

ONE_PERCENT = LaunchNoise(0.0, 0.01)


def half(found: Ratio) -> float:
    return math.log(found.high / found.low) / 2


def launches(*medians: float, sd: float = 0.001) -> Measured:
    source = np.random.default_rng(1)
    return measure(medians, [one * np.exp(source.normal(0, sd, 40)) for one in medians])


@pytest.mark.parametrize(
    ("freedom", "published"),
    [(5, 4.0321), (6, 3.7074), (7, 3.4995), (8, 3.3554), (10, 3.1693), (20, 2.8453), (120, 2.6174)],
)
def test_student_quantile_is_that_of_the_tables(freedom: int, published: float) -> None:
    assert student(0.995, freedom) == pytest.approx(published, rel=1e-3)


def test_the_ratio_is_that_of_the_geometric_means_of_the_launches_medians() -> None:
    found = ratio(launches(10.0, 40.0), launches(30.0, 30.0), ONE_PERCENT)
    assert found.value == pytest.approx(1.5)
    assert found.low < found.value < found.high


def test_one_launch_a_side_is_as_uncertain_as_launches_are_assumed_to_be() -> None:
    found = ratio(launches(10.0, sd=0.0), launches(11.0, sd=0.0), ONE_PERCENT)
    assert half(found) == pytest.approx(student(0.995, 2 * PRIOR_FREEDOM) * math.sqrt(2) * 0.01)


def test_sampling_error_adds_to_that_of_launches() -> None:
    exact, sampled = (ratio(launches(10.0, sd=sd), launches(10.0, sd=sd), ONE_PERCENT) for sd in (0.0, 0.1))
    # The median of 40 samples is uncertain by about 1.25 sd / sqrt(40), here 2 %.
    assert 1.7 < half(sampled) / half(exact) < 2.8


def test_launches_that_happen_to_agree_are_no_evidence_that_launches_agree() -> None:
    alike = launches(10.0, 10.0, 10.0, sd=0.0)
    found = ratio(alike, alike, ONE_PERCENT)
    assert 0.008 < half(found) < 0.03


def test_launches_that_differ_widen_the_interval_and_more_launches_narrow_it() -> None:
    calm, wild = launches(10.0, 10.1, 9.9), launches(10.0, 11.0, 9.0)
    assert half(ratio(wild, wild, ONE_PERCENT)) > 3 * half(ratio(calm, calm, ONE_PERCENT))
    many = launches(*([10.0, 11.0, 9.0] * 4))
    assert half(ratio(many, many, ONE_PERCENT)) < half(ratio(wild, wild, ONE_PERCENT)) / 1.5


def drawn(count: int, launch_sd: float, sampling_sd: float) -> tuple[list[Measured], float]:
    """Return sides of so many launches each, and the true variance of one launch."""
    source = np.random.default_rng(count)
    logs = source.normal(0, launch_sd, (1000, count, 1)) + source.normal(0, sampling_sd, (1000, count, 40))
    sides = [measure([float(np.median(one)) for one in side], list(side)) for side in np.exp(logs)]
    return sides, float(np.median(logs, axis=2).var())


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize(
    ("launch_sd", "sampling_sd"),
    [(0.0, 0.02), (0.004, 0.02), (0.02, 0.0)],
    ids=["sampling", "both", "launches"],
)
def test_the_variance_of_few_launches_is_shown_without_bias(
    count: int, launch_sd: float, sampling_sd: float
) -> None:
    sides, true = drawn(count, launch_sd, sampling_sd)
    assert np.mean([side.between for side in sides]) / true == pytest.approx(1, abs=0.1)
    if not launch_sd:
        assert np.mean([side.within for side in sides]) / true == pytest.approx(1, abs=0.2)
        assert scale(sides, LaunchNoise(0.0, 0.001)) == pytest.approx(1, abs=0.1)


def test_launches_that_agree_by_chance_are_no_more_certain_than_their_samples() -> None:
    alike = launches(10.0, 10.0, 10.0, sd=0.1)
    found = ratio(alike, alike, LaunchNoise(0.0, 0.001), 0.5)
    assert half(found) == pytest.approx(
        student(0.995, 2 * (PRIOR_FREEDOM + 2)) * math.sqrt(2 * alike.within / 3)
    )


def test_a_curve_whose_launches_differ_more_than_assumed_is_less_certain_and_never_much_more() -> None:
    wild = [launches(10.0, 11.0, 9.0) for _ in range(14)]
    assert scale(wild, ONE_PERCENT) > 20
    calm = [launches(10.0, 10.0, 10.0, sd=0.0) for _ in range(14)]
    assert 0.5 < scale(calm, ONE_PERCENT) < 1
    assert scale([launches(10.0)], ONE_PERCENT) == 1


def test_noise_of_launches_is_a_time_and_a_share_of_it() -> None:
    noise = LaunchNoise(0.3, 0.01)
    assert noise.of(10.0) == pytest.approx(math.hypot(0.03, 0.01))
    assert launch_noise("graph", "dispatch").of(1e6) == pytest.approx(0.002)
    assert launch_noise("event", "dispatch").share > launch_noise("host", "dispatch").share > 0.05


@pytest.mark.parametrize(
    ("medians", "slow"),
    [
        ((10.0, 10.0, 13.0), 1),
        ((13.0, 10.0, 13.1, 10.1, 13.2), 3),
        ((10.0, 13.0), 0),  # two launches are no groups
        ((10.0, 10.3, 10.6), 0),
        ((10.0, 11.0, 12.2), 0),  # spread, not grouped
        ((10.0, 10.0, 10.25), 0),  # two groups, close together
        ((10.0,), 0),
    ],
)
def test_launches_in_two_groups_are_told_from_launches_that_differ(
    medians: tuple[float, ...], slow: int
) -> None:
    assert slow_launches(launches(*medians), LaunchNoise(0.0, 0.002), 0.03) == slow


def test_groups_must_be_further_apart_than_launches_are_wont_to_be() -> None:
    assert slow_launches(launches(10.0, 10.0, 13.0), LaunchNoise(0.0, 0.1), 0.03) == 0


@pytest.fixture(scope="module")
def noise() -> RealNoise:
    return RealNoise()


def trial(
    noise: RealNoise, number: int, source: np.random.Generator, count: int, change: float, *, alike: bool
) -> list[times.RowVerdict]:
    """Return the verdicts on some rows of sides of ``count`` launches, by a floor of 0.5 % for 1 %."""
    tokens = {int(one) for one in source.choice([key.case.tokens for key in noise.keys], 4)}
    keys = [key for key in noise.keys if key.case.tokens in tokens]
    wheel = number % len(noise.wheels)
    base = noise.side(source, wheel, keys, count, alike=alike)
    new = noise.side(source, wheel, keys, count, 1 + change, alike=alike)
    floor = Floor(0.5, 0.05) if abs(change) == 0.01 else Floor()
    rows = [
        row
        for curve in times.curves({key: (base[key], new[key]) for key in keys}, floor)
        for row in curve.rows
    ]
    if change:
        assert not [row for row in rows if row.word == SAME and abs(change) > floor.of(row.base_us)]
        assert all(abs(change) > floor.of(row.base_us) for row in rows), "the line above would say nothing"
    return rows


@pytest.mark.parametrize("alike", [False, True], ids=["apart", "alike"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("change", [0.0, 0.01, -0.01, 0.015, -0.015, 0.03, -0.03, 0.1, -0.1])
def test_real_noise_is_no_change_and_a_change_has_its_sign(
    noise: RealNoise, count: int, change: float, alike: bool
) -> None:
    """The same with 1,000 comparisons of all rows each: ci/soak compare_trials."""
    source = np.random.default_rng([count, round(1000 * (1 + change))])
    rows = [row for number in range(20) for row in trial(noise, number, source, count, change, alike=alike)]
    assert len(rows) > 150
    words = [row.word for row in rows]
    assert all(row.ratio is not None for row in rows)
    if not change:
        assert words.count(SLOWER) + words.count(FASTER) <= len(rows) / 100
        assert SAME in words
        return
    right, opposite = (SLOWER, FASTER) if change > 0 else (FASTER, SLOWER)
    assert opposite not in words
    least = {0.1: 0.9, 0.03: 0.4}.get(abs(change), 0)
    assert words.count(right) > len(rows) * least
