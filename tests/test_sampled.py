"""Sampling until it is enough, by rank 0's clock, and what the ranks' samples say together."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any
from typing import cast

import numpy as np
import pytest

from pytest_ep import sampled
from pytest_ep.ranks.fate import AgreedFailure
from pytest_ep.sampled import Sampled
from pytest_ep.sampled import combined
from pytest_ep.sampled import sample
from pytest_ep.timing.sampling import COMPONENTS
from pytest_ep.timing.sampling import Batch

SPREAD_OUT = [1.0, 1.5, 2.0, 2.5]


class Sampler:
    """Takes the samples of a cycle in turn; counts its batches."""

    name = "host"
    series = COMPONENTS

    def __init__(self, cycle: list[float]) -> None:
        self.cycle = cycle
        self.batches: list[int] = []

    def batch(self, iterations: int) -> Batch:
        begin = sum(self.batches)
        self.batches.append(iterations)
        taken = [self.cycle[(begin + one) % len(self.cycle)] for one in range(iterations)]
        return {component: list(taken) for component in COMPONENTS}


def run_of(ranks: int = 1, **options: Any) -> Any:
    chosen = {"iterations": None, "target_ci": 1.0, "time_budget": 1e9, **options}

    def together(_: str, work: Callable[[], Any]) -> list[Any]:
        return [work()] * ranks

    return SimpleNamespace(
        options=SimpleNamespace(**chosen),
        ranks=SimpleNamespace(size=ranks),
        fate=SimpleNamespace(together=together),
    )


@pytest.fixture
def _second_by_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is a second later whenever it is read."""
    ticks = count()
    monkeypatch.setattr(sampled, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))


def taken(sampler: Sampler, run: Any, number: int | None = None) -> Sampled:
    return sample(run, cast(Any, sampler), number)


def test_samples_that_agree_are_enough_at_the_floor() -> None:
    sampler = Sampler([1.0, 1.001])
    found = taken(sampler, run_of())
    assert sampler.batches == [8, 8]
    assert found.met is True
    assert found.median_us("combine") == pytest.approx(1.0005e6)


def test_samples_that_do_not_agree_end_at_the_cap_and_say_so() -> None:
    found = taken(Sampler(SPREAD_OUT), run_of())
    assert {values.size for values in found.seconds.values()} == {512}
    assert found.met is False


def test_a_wider_target_is_met_sooner() -> None:
    sampler = Sampler(SPREAD_OUT)
    assert taken(sampler, run_of(target_ci=30.0)).met is True
    assert 16 <= sum(sampler.batches) < 512


@pytest.mark.usefixtures("_second_by_second")
def test_the_budget_ends_sampling_but_not_before_the_floor() -> None:
    sampler = Sampler(SPREAD_OUT)
    found = taken(sampler, run_of(time_budget=4.0))
    assert (sampler.batches, found.elapsed, found.met) == ([8] * 4, 4.0, False)
    sampler = Sampler(SPREAD_OUT)
    taken(sampler, run_of(time_budget=0.5))
    assert sampler.batches == [8, 8]


@pytest.mark.parametrize(("option", "argument"), [(11, None), (99, 11)])
def test_a_number_that_was_given_is_taken_exactly_and_no_target_is_judged(
    option: int, argument: int | None
) -> None:
    sampler = Sampler([1.0])
    found = taken(sampler, run_of(iterations=option), argument)
    assert (sampler.batches, found.met) == ([8, 3], None)


def test_each_rank_has_all_its_samples() -> None:
    found = taken(Sampler([1.0, 2.0]), run_of(ranks=3, iterations=4))
    assert len(found.by_rank) == 3
    assert all(batch["dispatch"] == [1.0, 2.0, 1.0, 2.0] for batch in found.by_rank)


def of_ranks(*ranks: list[float]) -> Sampled:
    by_rank = [{"dispatch": samples} for samples in ranks]
    seconds, spread = combined(by_rank)
    return Sampled(seconds, spread, by_rank, 0.0, None)


def test_the_slowest_rank_the_fastest_and_late_iterations_are_named() -> None:
    found = of_ranks([1.0, 1.0, 1.0, 1.0], [1.1, 1.1, 1.1, 0.9], [1.05, 1.05, 1.05, 4.0])
    assert found.skew("dispatch") == {
        "rank_p50_us": [pytest.approx(1e6), pytest.approx(1.1e6), pytest.approx(1.05e6)],
        "slowest_rank": 1,
        "slowest_share": 0.75,
        "fastest_rank": 0,
        "fastest_share": 0.75,
        "late": 1,
        "skewed": False,
    }


def test_an_iteration_of_three_medians_is_late_and_one_below_is_not() -> None:
    assert of_ranks([1.0, 1.0, 1.0, 3.0]).skew("dispatch")["late"] == 1
    assert of_ranks([1.0, 1.0, 1.0, 2.99]).skew("dispatch")["late"] == 0


def test_a_spread_of_half_of_the_median_is_skewed() -> None:
    assert of_ranks([1.0] * 3, [0.5] * 3).skew("dispatch")["skewed"] is True
    assert of_ranks([1.0] * 3, [0.51] * 3).skew("dispatch")["skewed"] is False
    assert of_ranks([1.0] * 3).skew("dispatch")["skewed"] is False


def test_an_unsound_sample_fails_every_rank_and_is_named() -> None:
    with pytest.raises(AgreedFailure, match=r"dispatch: rank 1: sample 1 of 2 is nan s"):
        combined([{"dispatch": [1.0, 1.0]}, {"dispatch": [1.0, np.nan]}])
