"""The watchdog where the store gives no answer or a library never returns, and how it lets a session end."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_ep.ranks import watchdog
from pytest_ep.ranks.ballot import Ballot
from pytest_ep.ranks.bulletin import Bulletin
from pytest_ep.ranks.bulletin import Notice
from pytest_ep.ranks.identity import Identity
from pytest_ep.ranks.pulse import Pulse
from pytest_ep.ranks.pulse import Status
from pytest_ep.ranks.watchdog import Ending
from pytest_ep.ranks.watchdog import LastWords
from pytest_ep.ranks.watchdog import Limits
from pytest_ep.ranks.watchdog import Watchdog
from tests.launching import python

RANK_1 = Identity(rank=1, size=2, local_rank=0, local_size=1)
SCRIPT = """
import os, signal, sys, threading, time
from pytest_ep.ranks.ballot import Ballot
from pytest_ep.ranks.identity import Identity
from pytest_ep.ranks.pulse import Pulse
from pytest_ep.ranks.watchdog import Limits, Watchdog

class CutOff:
    def set(self, key, value):
        threading.Event().wait()

limit, is_told = float(sys.argv[1]), sys.argv[2] == "told"
identity = Identity(rank=1, size=2, local_rank=0, local_size=1)
ballot = Ballot(identity, CutOff(), Pulse())
ends = {"report": lambda ending: print(ending.cause, ending.alone), "printed": str, "free": lambda: None}
Watchdog(identity, CutOff(), ballot, Limits(limit, 600.0), **ends, stderr=2).start()
if is_told:
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""
LOST = "the rendezvous store gives no answer: its host is gone, or the way to it True"


@pytest.mark.parametrize(
    ("limit", "told", "within", "said"),
    [("4", "", 4 + 5, LOST), ("60", "told", 5 + 2, f"this job was told to end (SIGTERM), and {LOST}")],
    ids=["within_the_rank_timeout", "soon_after_sigterm"],
)
def test_a_store_that_gives_no_answer_ends_the_run(
    tmp_path: Path, limit: str, told: str, within: float, said: str
) -> None:
    result = python(tmp_path, "-c", SCRIPT, limit, told)
    assert result.ret == 1
    assert result.duration < within
    assert result.outlines == [said]


class OneLeft:
    """A store that says that one rank has left its work, and notes what is set."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def set(self, key: str, value: object) -> None:
        self.noted.append(key)

    def add(self, key: str, amount: int) -> int:
        return 1

    def check(self, keys: list[str]) -> bool:
        return True


def watching(store: object, free: object = print, stderr: int = 2) -> Watchdog:
    ballot = Ballot(RANK_1, store, Pulse())  # type: ignore[arg-type]
    ends = {"report": print, "printed": str, "free": free}
    return Watchdog(RANK_1, store, ballot, Limits(60.0, 600.0), **ends, stderr=stderr)  # type: ignore[arg-type]


def test_a_library_that_never_returns_from_an_abort_does_not_stop_the_watchdog(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "LEFT_GRACE", -1.0)
    called, ever = threading.Event(), threading.Event()

    def free() -> None:
        called.set()
        ever.wait(30)

    began = time.monotonic()
    watching(OneLeft(), free)._free_if_left(OneLeft())  # type: ignore[arg-type]
    assert called.wait(5)
    assert time.monotonic() - began < 5
    ever.set()


def test_a_rank_that_leaves_the_report_to_another_of_its_host_says_where_it_was() -> None:
    reading, writing = os.pipe()
    words = LastWords(Status("a case", "oracle", 1.0, 1.0, 0.0), "  File x, in wait\n", "")
    watching(OneLeft(), stderr=writing)._say_where(
        Ending("gone", (None, words), (None, None), ("", ""), True)
    )
    assert os.read(reading, 1000) == b"pytest_ep: rank 1 was in 'oracle'\n  File x, in wait\n"
    os.close(reading)
    os.close(writing)


def test_a_rank_stops_watching_before_it_says_goodbye_as_the_store_may_be_gone_then() -> None:
    store = OneLeft()
    ballot = Ballot(RANK_1, store, Pulse())  # type: ignore[arg-type]
    ballot.follow("goodbye", leads=False, limit=5.0, leave=lambda: store.noted.append("stopped"))
    assert store.noted == ["stopped", "goodbye/1"]


class Kept(dict[str, bytes]):
    """A store that keeps what is set."""

    def set(self, key: str, value: bytes) -> None:
        self[key] = value

    def get(self, key: str, default: object = None) -> bytes:
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def test_a_rank_is_last_seen_where_it_began_its_last_step_whatever_the_watcher_saw_before_or_meanwhile() -> (
    None
):
    store: Any = Kept()
    pulse, bulletin = Pulse(), Bulletin(RANK_1)
    ballot = Ballot(RANK_1, store, pulse)
    ballot.begin_case("a")
    ballot.enter("oracle")
    bulletin.post(store, pulse.status())
    bulletin.read(store)

    ballot.begin_case("b")
    seen = bulletin.seen(store)[1]
    assert seen is not None
    assert (seen.case, seen.phase) == ("b", "setup")
    assert bulletin.seen(None)[1] != seen, "without the store there is the notice alone"

    pulse.beat("waiting")
    bulletin.post(store, pulse.status())
    bulletin.read(store)
    seen = bulletin.seen(store)[1]
    assert seen is not None
    assert (seen.case, seen.phase) == ("b", "waiting")


@pytest.mark.parametrize(
    "step", [lambda ballot: ballot.gather("t", 1), lambda ballot: ballot.enter("s")], ids=["gather", "enter"]
)
def test_a_single_rank_keeps_out_of_the_watchers_way_too(step: Callable[[Ballot], object]) -> None:
    ballot = Ballot(Identity(), None, Pulse())
    ballot.closing = True
    goes_on = threading.Thread(target=step, args=(ballot,), daemon=True)
    goes_on.start()
    goes_on.join(0.3)
    assert goes_on.is_alive()
    ballot.closing = False
    goes_on.join(5)
    assert not goes_on.is_alive()


SIGNALS = """
import asyncio, os, signal, sys, time
from pytest_ep.ranks.ballot import Ballot
from pytest_ep.ranks.identity import Identity
from pytest_ep.ranks.pulse import Pulse
from pytest_ep.ranks.watchdog import Limits, Watchdog

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)

ends = {"report": lambda ending: print(ending.cause), "printed": str, "free": lambda: None}
ballot = Ballot(Identity(), None, Pulse())
watchdog = Watchdog(Identity(), None, ballot, Limits(60.0, 600.0), **ends, stderr=2)
watchdog.start()
asyncio.run(main())
if sys.argv[2] == "listens":
    watchdog.listen()
os.kill(os.getpid(), int(sys.argv[1]))
time.sleep(20)
"""


@pytest.mark.parametrize(
    ("number", "listens"), [(signal.SIGTERM, ""), (signal.SIGHUP, "listens")], ids=["term", "hangup"]
)
def test_a_signal_is_heard_although_an_asyncio_loop_has_closed(
    tmp_path: Path, number: signal.Signals, listens: str
) -> None:
    result = python(tmp_path, "-c", SIGNALS, str(number.value), listens)
    assert (result.ret, result.outlines) == (1, [f"this job was told to end ({number.name})"])
    assert result.duration < 10


@pytest.mark.parametrize(("local_rank", "lowest"), [(0, True), (2, False)])
def test_who_reports_for_its_host_outlasts_the_others_that_are_late(
    local_rank: int, lowest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"])
    other = Notice(1, Pulse().status(), platform.node(), 1, late.pid)
    elsewhere = Notice(1, Pulse().status(), "another host", 0, os.getpid())
    these = watching(OneLeft())
    these._bulletin = Bulletin(Identity(rank=2, size=3, local_rank=local_rank, local_size=3))
    these._bulletin.notices = [elsewhere, other, None]
    assert these._bulletin.is_lowest_here() is lowest
    these._outlast_the_others()
    assert late.poll() == 0
    assert these._bulletin.is_lowest_here()

    late = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    these._bulletin.notices = [Notice(1, Pulse().status(), platform.node(), 1, late.pid)]
    monkeypatch.setattr(watchdog, "LATE", 0.2)
    these._outlast_the_others()
    monkeypatch.setattr(watchdog, "LATE", 60.0)
    these._told = "this job was told to end (SIGTERM)"
    these._outlast_the_others()
    assert late.poll() is None, "it did not wait for that one"
    late.kill()
    late.wait()
