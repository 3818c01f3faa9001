"""The kernel clock: which kernels belong to which window, and what a sample is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from typing import cast

import pytest
import torch

from pytest_ep.timing.kernels import SPAN
from pytest_ep.timing.kernels import Activity
from pytest_ep.timing.kernels import KernelSampler
from pytest_ep.timing.kernels import Profiler
from pytest_ep.timing.kernels import windows
from tests.fake_device import Device
from tests.fake_device import KernelRecorder
from tests.fake_device import OnlyRank
from tests.fake_device import Piece
from tests.fake_device import Transport

ROWS = torch.ones(1, 4, dtype=torch.bfloat16)


class Gapped(Transport):
    """The device idles for 3 us between the two kernels of a combine."""

    def combine(self, problem: Piece, handle: None, staged: torch.Tensor) -> torch.Tensor:
        self.device.run("fetch", 4e-6)
        self.device.now += 3e-6
        self.device.run("reduce", 1e-6)
        return staged.clone()


def sampler_of(device: Device, **more: Any) -> KernelSampler:
    ranks, backend, problem = cast(Any, OnlyRank()), cast(Any, Gapped(device)), cast(Any, Piece())
    return KernelSampler(backend, problem, ROWS, ranks, clock=KernelRecorder(device), **more)


def test_a_sample_is_the_sum_of_its_kernels_and_the_span_has_the_gaps_too() -> None:
    taken = sampler_of(Device()).batch(2)
    assert taken["dispatch"] == taken["dispatch" + SPAN] == [pytest.approx(10e-6)] * 2
    assert taken["combine"] == [pytest.approx(5e-6)] * 2
    assert taken["combine" + SPAN] == [pytest.approx(8e-6)] * 2
    assert taken["roundtrip"] == [pytest.approx(15e-6)] * 2
    assert taken["roundtrip" + SPAN] == [pytest.approx(18e-6)] * 2


def test_kernels_are_listed_by_their_total_and_the_first_recording_does_not_count() -> None:
    sampler = sampler_of(Device())
    assert sampler.says_of("combine") == {"kernels": []}
    sampler.batch(2)
    sampler.batch(1)
    assert sampler.says_of("combine")["kernels"] == [
        {"name": "fetch", "count": 3, "total_us": pytest.approx(12.0)},
        {"name": "reduce", "count": 3, "total_us": pytest.approx(3.0)},
    ]
    assert [kernel["name"] for kernel in sampler.says_of("roundtrip")["kernels"]] == [
        "dispatch",
        "fetch",
        "reduce",
    ]


class Blind(KernelRecorder):
    """Sees nothing the first time."""

    def during(self, work: Callable[[], object]) -> list[Activity]:
        seen = super().during(work)
        first, self.first = getattr(self, "first", True), False
        return [] if first else seen


def test_a_profiler_may_miss_what_it_is_warmed_up_with() -> None:
    device = Device()
    ranks, backend, problem = cast(Any, OnlyRank()), cast(Any, Gapped(device)), cast(Any, Piece())
    sampler = KernelSampler(backend, problem, ROWS, ranks, clock=Blind(device))
    assert sampler.batch(1)["dispatch"] == [pytest.approx(10e-6)]


def test_what_comes_between_pairs_is_in_no_sample() -> None:
    device = Device()
    sampler = sampler_of(device, between=lambda: device.run("memset", 1.0))
    assert sampler.batch(1)["dispatch"] == [pytest.approx(10e-6)]
    assert "memset" not in {kernel["name"] for kernel in sampler.says_of("roundtrip")["kernels"]}


def mark(at: float) -> Activity:
    return Activity("spin_kernel", at, at)


def test_windows_are_between_every_other_pair_of_marks_in_order_of_time() -> None:
    first, second, outside = Activity("a", 1.5, 2), Activity("b", 5, 6), Activity("c", 3, 4)
    recorded = [second, mark(4.5), mark(7), outside, mark(1), first, mark(2.5)]
    assert windows(recorded, 2) == [[first], [second]]


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        ([], "kernels in 0 of 1 windows and 0 of 2 marks"),
        ([mark(1), Activity("a", 2, 3)], "kernels in 1 of 1 windows and 1 of 2 marks"),
        ([mark(1), mark(2)], "kernels in 0 of 1 windows and 2 of 2 marks"),
    ],
)
def test_a_profiler_that_saw_too_little_is_an_error(recorded: list[Activity], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        windows(recorded, 1)


def test_a_window_ends_once_all_streams_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("mark"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    profiler = Profiler()
    profiler.start()
    profiler.end()
    assert log == ["mark", "synchronize", "mark"]
