"""Where eager windows begin and end, and what is done outside of them."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from typing import cast

import torch

from pytest_ep.timing.sampling import WARMUP_PAIRS
from pytest_ep.timing.sampling import EagerSampler
from tests.fake_device import Device
from tests.fake_device import OnlyRank
from tests.fake_device import Piece
from tests.fake_device import Transport

ALIGNED = ["synchronize", "barrier", "start"]
"""No wait for the device between the ranks' alignment and the start."""


class Logging(Transport):
    """Writes its calls into the ranks' log."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(Device())
        self.log = log

    def dispatch(self, problem: Piece) -> None:
        self.log.append("dispatch")

    def combine(self, problem: Piece, handle: None, staged: torch.Tensor) -> torch.Tensor:
        self.log.append("combine")
        return staged


def sampler_of(log: list[str], transport: type[Logging] | None = None, **more: Any) -> EagerSampler:
    ranks: Any = OnlyRank(log=log)
    clock: Any = SimpleNamespace(
        name="host",
        start=lambda: log.append("start"),
        end=lambda: log.append("end"),
        seconds=lambda start, end: 1.0,
    )
    backend, problem = cast(Any, (transport or Logging)(log)), cast(Any, Piece())
    return EagerSampler(backend, problem, torch.ones(1, 4, dtype=torch.bfloat16), ranks, clock=clock, **more)


def test_dispatch_its_combine_and_a_roundtrip_are_windows_of_aligned_ranks() -> None:
    log: list[str] = []
    sampler = sampler_of(log)
    assert log.count("dispatch") == log.count("combine") == WARMUP_PAIRS
    log.clear()
    assert sampler.batch(1) == {"dispatch": [1.0], "combine": [1.0], "roundtrip": [1.0]}
    windows = (["dispatch"], ["combine"], ["dispatch", "combine"])
    assert log == [entry for calls in windows for entry in (*ALIGNED, *calls, "end", "synchronize")]


def test_metadata_that_can_be_told_apart_has_a_window_of_its_own_in_each_turn() -> None:
    log: list[str] = []

    class Separable(Logging):
        def metadata(self, problem: Piece) -> bool:
            self.log.append("metadata")
            return True

    sampler = sampler_of(log, transport=Separable, metadata=True, between=lambda: log.append("flush"))
    log.clear()
    assert set(sampler.batch(2)) == {"dispatch", "combine", "roundtrip", "metadata"}
    places = [place for place, entry in enumerate(log) if entry == "metadata"]
    assert len(places) == 2
    for place in places:
        assert log[place - 4 : place + 3] == ["flush", *ALIGNED, "metadata", "end", "synchronize"]


def test_what_comes_between_pairs_is_before_the_alignment_of_their_first_window() -> None:
    log: list[str] = []
    sampler = sampler_of(log, between=lambda: log.append("flush"))
    assert "flush" not in log
    log.clear()
    sampler.batch(2)
    assert log.count("flush") == 4
    for place in (place for place, entry in enumerate(log) if entry == "flush"):
        assert log[place + 1 : place + 5] == [*ALIGNED, "dispatch"]


def test_a_pair_after_a_pause_comes_after_an_untimed_pair_and_the_pause() -> None:
    log: list[str] = []
    sampler = sampler_of(log)
    log.clear()
    began = time.monotonic()
    assert sampler.pair_after(0.02) == 1.0
    assert time.monotonic() - began >= 0.02
    assert log == [
        *("dispatch", "combine", "synchronize"),
        *(*ALIGNED, "dispatch", "combine", "end", "synchronize"),
    ]
