"""The graph clock on a device that exists in its own time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from typing import cast

import pytest
import torch

from pytest_ep.timing import graphs
from pytest_ep.timing.graphs import FILL_PAIRS
from pytest_ep.timing.graphs import SETTLED
from pytest_ep.timing.graphs import GraphSampler
from pytest_ep.timing.graphs import laps
from pytest_ep.timing.graphs import pair_seconds
from pytest_ep.timing.graphs import settle
from tests.fake_device import EVENT_NODE
from tests.fake_device import Device
from tests.fake_device import OnlyRank
from tests.fake_device import Piece
from tests.fake_device import Transport

ROWS = torch.ones(1, 4, dtype=torch.bfloat16)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    made.install(monkeypatch)
    monkeypatch.setattr(graphs, "inspect", lambda backend, problem, handle: made.arrived(problem))
    return made


def sampler_of(
    transport: Any,
    problems: list[Piece] | None = None,
    pair_seconds: float = 15e-6,
    between: Callable[[], None] | None = None,
) -> GraphSampler:
    pieces = cast(Any, problems or [Piece()])
    ranks = cast(Any, OnlyRank())
    return GraphSampler(transport, pieces, ROWS, ranks, pair_seconds=pair_seconds, between=between)


def test_a_window_is_what_it_takes_without_its_event_nodes(device: Device) -> None:
    taken = sampler_of(Transport(device)).batch(3)
    assert taken["dispatch"] == [pytest.approx(10e-6)] * 3
    assert taken["combine"] == [pytest.approx(5e-6)] * 3


def test_a_roundtrip_is_the_mean_pair_between_two_event_nodes(device: Device) -> None:
    sampler = sampler_of(Transport(device))
    pairs = sampler.says()["pairs_per_replay"]
    assert pairs == 12
    assert sampler.batch(2)["roundtrip"] == [pytest.approx(15e-6 + EVENT_NODE / pairs)] * 2


def test_the_fill_pairs_are_in_no_sample(device: Device) -> None:
    class Cold(Transport):
        """The first pairs of each replay are slow."""

        def dispatch(self, problem: Piece) -> None:
            tape = self.device.tape
            pairs = len(tape) // 4 if tape is not None else FILL_PAIRS
            self.device.run("dispatch", 1e-3 if pairs < FILL_PAIRS else problem.dispatch_seconds)

    sampler = sampler_of(Cold(device))
    before = device.now
    taken = sampler.batch(1)
    assert device.now - before > 2 * FILL_PAIRS * 1e-3, "both graphs had their slow pairs"
    assert taken["dispatch"] == [pytest.approx(10e-6)]
    assert taken["roundtrip"] == [pytest.approx(15e-6, rel=0.05)]


def test_samples_are_means_over_all_routings(device: Device) -> None:
    sampler = sampler_of(Transport(device), [Piece(seconds * 1e-6) for seconds in (10, 20, 60)], 35e-6)
    taken = sampler.batch(1)
    assert sampler.says()["routings"] == 3
    assert taken["dispatch"] == [pytest.approx(30e-6)]
    assert taken["roundtrip"] == [pytest.approx(35e-6, rel=0.01)]


@pytest.mark.parametrize(
    ("pair_seconds", "expected"),
    [(0.0, 12), (18e-6, 12), (150e-6, 10), (684e-6, 2), (1.4e-3, 1), (10.0, 1)],
)
def test_a_replay_takes_about_12_ms_in_1_to_12_laps(pair_seconds: float, expected: int) -> None:
    assert laps(pair_seconds, 8) == expected


def test_a_window_of_its_own_has_each_pair_of_4_laps_at_most(device: Device) -> None:
    pieces = [Piece(10e-6), Piece(20e-6)]
    assert sampler_of(Transport(device), pieces, 18e-6).says()["windows_per_replay"] == 8
    assert sampler_of(Transport(device), pieces, 3e-3).says()["windows_per_replay"] == 4
    assert sampler_of(Transport(device), pieces, 1.0).says()["windows_per_replay"] == 2


def test_a_process_has_captured_graphs_before_the_first_that_is_timed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[int] = []
    capture = torch.cuda.graph

    def counting(graph: Any) -> Any:
        captured.append(len(captured))
        return capture(graph)

    monkeypatch.setattr(torch.cuda, "graph", counting)
    settle.cache_clear()
    sampler_of(Transport(device))
    assert len(captured) == SETTLED + 2
    sampler_of(Transport(device))
    assert len(captured) == SETTLED + 4, "once in a process"


def test_what_comes_between_pairs_is_in_no_window_and_a_roundtrip_is_the_sum(device: Device) -> None:
    calls = 0

    def flush() -> None:
        nonlocal calls
        calls += 1
        device.run("memset", 50e-6)

    pieces = [Piece(10e-6), Piece(20e-6)]
    sampler = sampler_of(Transport(device), pieces, between=flush)
    assert calls == len(pieces), "one before each timed pair, as nodes of the graph"
    before = device.now
    taken = sampler.batch(1)
    assert device.now - before > len(pieces) * 50e-6, "replayed with the pairs"
    assert taken["dispatch"] == [pytest.approx(15e-6)]
    assert taken["combine"] == [pytest.approx(5e-6)]
    assert taken["roundtrip"] == [taken["dispatch"][0] + taken["combine"][0]]
    assert len(sampler.outputs()) == 1
    assert sampler.says()["pairs_per_replay"] == len(pieces)


def test_the_cost_of_an_empty_window_is_recorded(device: Device) -> None:
    sampler = sampler_of(Transport(device))
    sampler.batch(1)
    assert sampler.says()["empty_window_us"] == pytest.approx(EVENT_NODE * 1e6)


def test_outputs_are_those_of_the_last_replay_and_poisoned_before_it(device: Device) -> None:
    transport = Transport(device)
    sampler = sampler_of(transport)
    sampler.batch(1)
    assert [torch.equal(output, ROWS.expand(2, -1)) for _, output in sampler.outputs()] == [True, True]
    assert sampler.faults() == []
    transport.writes = False
    sampler.batch(3)
    assert all(output.isnan().all() for _, output in sampler.outputs())
    assert sampler.faults() == ["6 replays gave another output than the first"]


def test_what_the_last_dispatch_brought_is_a_fault_where_it_is_wrong(device: Device) -> None:
    pieces = [Piece(), Piece()]
    sampler = sampler_of(Transport(device), pieces)
    device.wrong = pieces[0]
    assert sampler.faults() == []
    device.wrong = pieces[-1]
    assert sampler.faults() == ["timed dispatch: weights"]


def test_a_pair_takes_what_the_device_needs_and_not_what_launching_costs(device: Device) -> None:
    pieces = cast(Any, [Piece(10e-6), Piece(20e-6)])
    transport = Transport(device)
    found = pair_seconds(cast(Any, transport), pieces, ROWS, cast(Any, OnlyRank()))
    assert found == pytest.approx((20e-6 + 15e-6 + 5e-6) / 2 + EVENT_NODE / 2, rel=0.05)
