"""A case timed by every clock of a device that exists in its own time, and what its rows then say."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_ep import measure
from pytest_ep.backends.base import Received
from pytest_ep.case import Agreed
from pytest_ep.matrix.cells import Cell
from pytest_ep.matrix.cells import Key
from pytest_ep.matrix.shapes import Shape
from pytest_ep.measure import Timing
from pytest_ep.oracle.checks import Verdict
from pytest_ep.oracle.reduction import named
from pytest_ep.ranks.fate import AgreedFailure
from pytest_ep.results.record import Measurement
from pytest_ep.timing import device
from pytest_ep.timing.device import Speed
from pytest_ep.workload.problem import Problem
from pytest_ep.workload.problem import build_problem
from pytest_ep.workload.routing import load_trace
from tests.fake_device import Device
from tests.fake_device import KernelRecorder
from tests.fake_device import OnlyRank

SHAPE = Shape("small", hidden=64, experts=16, top_k=4)
CELL = Cell(Key("on_device", "h200", 1, "normal", "bf16", "small"), SHAPE, "uniform", 4)
DISPATCH_US, COMBINE_US, LAUNCH_US, FLUSH_US = 10.0, 5.0, 70.0, 40.0


class OnDevice:
    """One kernel for each step; issued eagerly, the host takes longer than both."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.tells_metadata_apart = False
        self.right = self.right_eagerly = self.carries_weights = True

    def _launch(self) -> None:
        if self.device.tape is None:
            self.device.now += LAUNCH_US / 1e6

    def constant_planes(self, problem: Problem) -> int:
        return 1

    def stage_constant(self, problem: Problem, rows: Tensor) -> Tensor:
        return rows.expand(problem.tokens, -1)

    def metadata(self, problem: Problem) -> bool:
        self._launch()
        return self.tells_metadata_apart

    def dispatch(self, problem: Problem) -> None:
        self._launch()
        self.device.run("dispatch", DISPATCH_US / 1e6)

    def receive(self, problem: Problem, handle: None) -> Received:
        ids = problem.expert_ids.long()
        counts = torch.bincount(ids.flatten(), minlength=SHAPE.experts)
        weights = problem.weights if self.carries_weights else problem.weights * 2
        return Received(problem.x, ids, weights, counts)

    def combine(self, problem: Problem, handle: None, staged: Tensor) -> Tensor:
        output = torch.empty_like(staged)
        self._launch()
        self.device.run("combine", COMBINE_US / 1e6)
        eager = self.device.tape is None

        def write() -> None:
            right = self.right and (self.right_eagerly or not eager)
            output.copy_(staged if right else staged + 1)

        self.device.issue(write)
        return output


class Bench:
    """Times one case with some options."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = Device()
        self.device.install(monkeypatch)
        self.backend = OnDevice(self.device)
        self.speeds = [Speed(1980, ()), Speed(1200, ("power cap",))]
        monkeypatch.setattr(measure, "Profiler", lambda: KernelRecorder(self.device))
        monkeypatch.setattr(device, "speed", lambda _: self.speeds.pop(0))
        monkeypatch.setattr(measure, "L2Flush", lambda _: lambda: self.device.run("memset", FLUSH_US / 1e6))

    def measure(self, *clocks: str, graph_safe: bool = True, **options: Any) -> Measurement:
        return self.timing(*clocks, graph_safe=graph_safe, **options).measure(self.problem())

    def problem(self) -> Problem:
        return build_problem(SHAPE, load_trace(SHAPE, 67, 4, None, write=False), 0, (4,), "cpu", "int64")

    def timing(self, *clocks: str, graph_safe: bool, **options: Any) -> Timing:
        chosen = {
            "clocks": clocks,
            "iterations": None,
            "target_ci": 1.0,
            "time_budget": 9.0,
            "exact": False,
            "flush_l2": False,
            "idle": (),
            "profile": None,
        }
        run: Any = SimpleNamespace(
            options=SimpleNamespace(**chosen | options),
            ranks=OnlyRank(device=torch.device("cuda", 0)),
            fate=SimpleNamespace(together=together),
            link_gbps=lambda _: None,
        )
        trace = self.problem().trace
        live: Any = SimpleNamespace(
            backend=self.backend,
            facts=SimpleNamespace(graph_safe=graph_safe, index_dtype="int64"),
            reduction=named("rank-sum-fp32", 1),
            max_tokens=4,
            domain=1,
            traces=lambda _: iter([trace, trace]),
        )
        return Timing(run, live, CELL, agree)


def together(_: str, work: Callable[[], Any]) -> list[Any]:
    return [work()]


def agree(verdicts: Sequence[Verdict], where: str) -> Agreed:
    (verdict,) = verdicts
    assert verdict.passed, f"{where}{verdict.message}"
    return Agreed(verdict.error, verdict.bit_exact)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def us(value: float, rel: float = 0.05) -> Any:
    return pytest.approx(value, rel=rel)


def test_by_default_a_graph_owns_the_rows_and_events_stand_beside(bench: Bench) -> None:
    rows = bench.measure("auto").rows()
    # An event takes 3 us of the device, so an eager window has those of its first.
    expected = {"dispatch": DISPATCH_US, "combine": COMBINE_US, "roundtrip": DISPATCH_US + COMBINE_US}
    for component, row in rows.items():
        launches = LAUNCH_US * (2 if component == "roundtrip" else 1) + 3
        assert (row["clock"], row["samples"], row["target_met"]) == ("graph", 16, True)
        assert row["p50_us"] == us(expected[component])
        assert row["event_p50_us"] == us(expected[component] + launches)
        assert row["launch_us"] == us(launches)
        assert "kernel_span_us" not in row
    assert rows["roundtrip"]["overlap_lost_us"] == pytest.approx(0.0, abs=0.5)
    assert not any(name.startswith("idle") for name in rows["roundtrip"])


def test_launch_cost_is_event_less_graph_whichever_owns_the_rows(bench: Bench) -> None:
    row = bench.measure("event", "graph").rows()["dispatch"]
    assert (row["clock"], row["graph_p50_us"]) == ("event", us(DISPATCH_US))
    assert row["launch_us"] == us(LAUNCH_US + 3)


def test_kernels_stand_beside_with_their_sums_and_spans(bench: Bench) -> None:
    rows = bench.measure("graph", "kernel").rows()
    assert rows["roundtrip"]["kernel_p50_us"] == us(DISPATCH_US + COMBINE_US)
    assert rows["roundtrip"]["kernel_span_us"] == us(DISPATCH_US + COMBINE_US + LAUNCH_US)
    listed: Any = rows["dispatch"]["kernels"]
    (kernel,) = listed
    assert kernel == {"name": "dispatch", "count": 24, "total_us": us(24 * DISPATCH_US)}
    assert "launch_us" not in rows["dispatch"]


def test_kernels_may_own_the_rows(bench: Bench) -> None:
    row = bench.measure("kernel", "event").rows()["combine"]
    assert (row["clock"], row["p50_us"], row["kernel_span_us"]) == ("kernel", us(5.0), us(5.0))
    assert "launch_us" not in row, "events less kernels are not launches alone"


def test_a_transport_that_cannot_be_captured_is_timed_by_what_is_left(bench: Bench) -> None:
    rows = bench.measure("event", "graph", graph_safe=False).rows()
    assert "graph_p50_us" not in rows["dispatch"]
    assert bench.timing("event", "graph", graph_safe=False).refusal() == ""
    assert "cannot be captured" in bench.timing("graph", graph_safe=False).refusal()


def test_the_devices_speed_before_and_after_is_in_every_row(bench: Bench) -> None:
    for row in bench.measure("event").rows().values():
        assert (row["throttled"], row["throttle_reasons"]) == (True, ["power cap"])
        assert row["sm_clock_mhz"] == [1980, 1200]


@pytest.mark.parametrize("clock", ["graph", "event", "kernel"])
def test_a_flush_is_in_no_window_of_any_clock(bench: Bench, clock: str) -> None:
    rows = bench.measure(clock, flush_l2=True).rows()
    launch = LAUNCH_US + 3 if clock == "event" else 0
    assert rows["dispatch"]["p50_us"] == us(DISPATCH_US + launch)
    assert rows["dispatch"]["l2_flushed"] is True
    if clock == "graph":
        assert rows["roundtrip"]["p50_us"] == us(DISPATCH_US + COMBINE_US)
    assert ("overlap_lost_us" in rows["roundtrip"]) == (clock != "graph")


@pytest.mark.parametrize("apart", [True, False])
def test_metadata_has_its_median_beside_dispatch_where_an_eager_clock_owns_the_rows(
    bench: Bench, apart: bool
) -> None:
    bench.backend.tells_metadata_apart = apart
    rows = bench.measure("event").rows()
    assert [one for one, row in rows.items() if "metadata_us" in row] == ["dispatch"] * apart
    if apart:
        assert rows["dispatch"]["metadata_us"] == pytest.approx(LAUNCH_US + 3)


def test_ranks_that_do_not_agree_whether_metadata_can_be_told_apart_fail_the_case(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = bench.timing("event", graph_safe=True)
    bench.backend.tells_metadata_apart = True

    def together_with_another(topic: str, work: Callable[[], Any]) -> list[Any]:
        return [work()] + [("dispatch", "combine", "roundtrip")] * (topic == "timing: warm-up")

    monkeypatch.setattr(timing, "_together", together_with_another)
    with pytest.raises(AgreedFailure) as failed:
        timing.measure(bench.problem())
    assert str(failed.value).startswith("metadata() is true on rank 0 alone")


def test_pauses_are_timed_by_the_eager_clock_beside_no_pause(bench: Bench) -> None:
    rows = bench.measure("graph", idle=("1ms", "100us")).rows()
    eager = us(DISPATCH_US + COMBINE_US + 2 * LAUNCH_US + 3)
    found = {name: value for name, value in rows["roundtrip"].items() if name.startswith("idle")}
    assert found == {"idle_steady_us": eager, "idle_1ms_us": eager, "idle_100us_us": eager}


def test_a_case_timed_again_has_the_same_clock_and_few_samples(bench: Bench) -> None:
    timing = bench.timing("graph", graph_safe=True)
    again = timing.again(bench.problem())
    assert again == {"dispatch": us(10.0), "combine": us(5.0), "roundtrip": us(15.0)}


@pytest.mark.parametrize("clock", ["graph", "event", "kernel"])
def test_what_any_clock_timed_is_checked(bench: Bench, clock: str) -> None:
    bench.backend.right = False
    with pytest.raises(AssertionError, match="last timed output: "):
        bench.measure(clock)


def test_so_is_what_another_clock_timed_beside(bench: Bench) -> None:
    bench.backend.right_eagerly = False
    assert bench.measure("graph").clock == "graph"
    bench.speeds = [Speed(1980, ())] * 2
    with pytest.raises(AssertionError, match="last timed output: "):
        bench.measure("graph", "event")


@pytest.mark.parametrize("clock", ["graph", "event", "kernel"])
def test_what_the_last_timed_dispatch_brought_is_checked_too(bench: Bench, clock: str) -> None:
    bench.backend.carries_weights = False
    with pytest.raises(AssertionError, match="timed dispatch: weights: "):
        bench.measure(clock)
