from __future__ import annotations

import math

import numpy as np
import pytest

from pytest_ep.timing.statistics import SampleError
from pytest_ep.timing.statistics import checked
from pytest_ep.timing.statistics import combine_ranks
from pytest_ep.timing.statistics import median
from pytest_ep.timing.statistics import noise
from pytest_ep.timing.statistics import percentile
from pytest_ep.timing.statistics import thin


def test_percentiles_are_nearest_rank() -> None:
    samples = np.array([50.0, 20.0, 15.0, 40.0, 35.0])
    assert [percentile(samples, q) for q in (5, 30, 40, 50, 100)] == [15, 20, 20, 35, 50]


def test_the_99th_percentile_of_100_samples_is_the_second_largest() -> None:
    assert percentile(np.arange(1.0, 101.0), 99) == 99


def test_the_median_of_an_even_count_is_the_mean_of_the_two_middle_ones() -> None:
    assert median(np.array([4.0, 1.0, 3.0, 2.0])) == 2.5


def test_an_iteration_lasts_as_long_as_on_its_slowest_rank() -> None:
    maxima, spread = combine_ranks([[1.0, 5.0, 3.0], [4.0, 2.0, 3.0]])
    assert maxima.tolist() == [4.0, 5.0, 3.0]
    assert spread.tolist() == [3.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("faulty", "complaint"),
    [
        ([], "rank 1 has no samples"),
        ([1.0], "rank 1 has 1 samples where rank 0 has 2"),
        ([1.0, 0.0], "rank 1: sample 1 of 2 is 0.0 s"),
        ([-1.0, 1.0], "rank 1: sample 0 of 2 is -1.0 s"),
        ([1.0, math.nan], "rank 1: sample 1 of 2 is nan s"),
        ([math.inf, 1.0], "rank 1: sample 0 of 2 is inf s"),
    ],
)
def test_a_rank_without_a_sound_sample_is_named(faulty: list[float], complaint: str) -> None:
    with pytest.raises(SampleError) as caught:
        combine_ranks([[1.0, 2.0], faulty, [1.0, 2.0]])
    assert str(caught.value).startswith(complaint)
    assert "\n" not in str(caught.value)


def test_no_ranks_are_no_measurement() -> None:
    with pytest.raises(SampleError, match="no rank"):
        combine_ranks([])


def test_a_table_is_not_mistaken_for_samples() -> None:
    with pytest.raises(SampleError):
        checked([[1.0, 2.0], [3.0, 4.0]], "rank 0")


def test_noise_of_ten_samples_spans_the_second_to_the_ninth() -> None:
    # P[Binomial(10, 1/2) < 2] = 11/1024 = 1.1 %, P[< 3] = 56/1024 = 5.5 %: the depth is 2.
    samples = np.array([1.0, 90.0, 95.0, 98.0, 99.0, 101.0, 102.0, 105.0, 130.0, 900.0])
    assert noise(samples) == pytest.approx(50 * (130.0 - 90.0) / 100.0)


def test_noise_needs_six_samples() -> None:
    assert noise(np.arange(1.0, 6.0)) is None
    # P[Binomial(6, 1/2) < 1] = 1/64 = 1.6 %: from the smallest to the largest.
    assert noise(np.arange(1.0, 7.0)) == pytest.approx(50 * (6 - 1) / 3.5)


def test_noise_of_many_samples_follows_the_normal_approximation() -> None:
    n = 20_001
    samples = np.linspace(1.0, 3.0, n)
    # The ends lie 1.96 sqrt(n) / 2 ranks from the middle, and a rank is 2 / n wide.
    expected = 100 * (1.96 * math.sqrt(n) / 2 * (2.0 / n)) / 2.0
    assert noise(samples) == pytest.approx(expected, rel=0.02)


def test_the_interval_covers_the_true_median_in_at_least_95_percent() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(1000):
        ordered = np.sort(random.exponential(size=30))
        # P[Binomial(30, 1/2) < 10] = 2.1 %, P[< 11] = 4.9 %.
        covered += bool(ordered[9] <= math.log(2) <= ordered[20])
        assert noise(ordered) == pytest.approx(50 * (ordered[20] - ordered[9]) / np.median(ordered))
    assert covered >= 940


def test_few_samples_are_kept_as_they_are() -> None:
    samples = np.arange(1.0, 513.0)
    assert thin(samples) is samples


@pytest.mark.parametrize("count", [513, 2048, 9999])
def test_thinned_samples_stay_in_order_and_evenly_spaced(count: int) -> None:
    kept = thin(np.arange(float(count)))
    steps = np.diff(kept)
    assert kept.size == 512
    assert kept[0] == 0
    assert steps.min() >= 1
    assert steps.max() - steps.min() <= 1
    assert count - kept[-1] <= math.ceil(count / 512)
