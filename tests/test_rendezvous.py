"""Finding the rendezvous: what is said, and how soon, where nobody or somebody else is there."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from pytest_ep import run
from pytest_ep.ranks import group
from pytest_ep.ranks.identity import Identity
from pytest_ep.ranks.rendezvous import unreachable
from tests.launching import python


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A service on a port of its own, which takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def rank(number: int, port: int, *, agent: bool = False) -> Identity:
    return Identity(number, 2, number, 2, "127.0.0.1", port, agent, "run")


def test_a_rank_that_finds_no_store_says_what_to_set_unless_an_agent_is_to_hold_it(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "CONNECT_LIMIT", 0.3)
    began = time.monotonic()
    with pytest.raises(
        pytest.UsageError, match=f"rank 1 finds no rendezvous at 127.0.0.1:{port}: set MASTER_"
    ):
        group.connect(rank(1, port))
    with pytest.raises(pytest.UsageError, match=r"torchrun's agent on that host .*refused\)$") as under_agent:
        group.connect(rank(1, port, agent=True))
    assert "MASTER_ADDR" not in str(under_agent.value)
    assert time.monotonic() - began < 2


def test_a_port_that_another_service_holds_is_named_by_its_host_and_by_its_clients(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "ANSWER_LIMIT", 0.5)
    taken = listener.getsockname()[1]
    with pytest.raises(
        pytest.UsageError, match=f"rank 0 cannot hold the rendezvous at 127.0.0.1:{taken}: set"
    ):
        group.connect(rank(0, taken))
    with pytest.raises(pytest.UsageError, match="what listens there is no rendezvous store"):
        group.connect(rank(1, taken))


def test_a_host_that_is_late_is_waited_for(port: int) -> None:
    late = threading.Timer(0.4, lambda: hosted.append(group.connect(rank(0, port))))
    hosted: list[object] = []
    late.start()
    store = group.connect(rank(1, port))
    assert store is not None
    store.set("said", "here")
    assert store.get("said") == b"here"
    late.join()


def test_a_rank_that_leaves_at_once_does_not_wait_long_to_be_heard(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "ANNOUNCE_LIMIT", 0.3)
    monkeypatch.setattr(group, "connect", lambda *_, **__: pytest.fail("waits for a store that nobody holds"))
    began = time.monotonic()
    run.announce(rank(1, port), "refuses to begin", "why")
    assert 0.3 <= time.monotonic() - began < 1.5
    assert "refused" in unreachable(rank(1, port), 0.0)


def test_a_wrong_option_under_srun_ends_ranks_other_than_0_at_once_without_a_stack(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        test_it="from pytest_ep import EPSuite\nclass TestBaseline(EPSuite):\n    backend = 'torch_a2a'\n"
    )
    srun = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    result = python(pytester.path, "-m", "pytest", "-p", "no:cacheprovider", "--ep-clock=event", env=srun)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert (result.outlines, result.errlines) == ([], [])
    assert result.duration < 10
