"""Agreement between ranks, over the rendezvous store alone."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any

import pytest

from pytest_ep.ranks.pulse import Pulse

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from pytest_ep.ranks.identity import Identity

FIRST_NAP, LONGEST_NAP = 1e-4, 2e-2
"""Seconds between looks at the store: short while the ranks are in step, longer once one is late."""


LEAVING, FAILING = "leaves the session: ", "fails in the session: "
"""Begin the topic of a rank that will come to no other."""


class AgreedExit(pytest.exit.Exception):  # type: ignore[misc, name-defined]
    """Every rank raises it at the same point: nobody need be told."""


class OutOfStep(AgreedExit):
    """Ranks came to different topics in one turn. Unless it is caught, every rank leaves the session."""

    def __init__(self, topics: list[str]) -> None:
        said = ", ".join(f"rank {rank} is at {there}" for rank, there in enumerate(topics))
        said, code = f"pytest_ep: the ranks lost step: {said}", pytest.ExitCode.INTERNAL_ERROR
        for rank, there in enumerate(topics):
            if there.startswith((LEAVING, FAILING)):
                said = f"rank {rank} {there}"
                code = pytest.ExitCode.INTERRUPTED if there.startswith(LEAVING) else code
                break
        super().__init__(said, code)
        self.topics = topics


class Ballot:
    """One fixed sequence of turns in which every rank says something and hears what all said.

    It depends on no NCCL or gloo group, so it outlives a broken one. It never waits in native code: between
    looks the main thread hears signals. A rank that never comes is the watcher's to judge, so a turn waits
    as long as the watcher lets it.
    """

    def __init__(self, identity: Identity, store: Store | None, pulse: Pulse) -> None:
        self.rank = identity.rank
        self.size = identity.size
        self.pulse = pulse
        self.closing = False
        self.stop = ""
        self.waiting = False
        self.left_seen = 0
        self._store = store
        self._hosts_store = identity.hosts_store
        self._turn = 0

    def enter(self, step: str) -> None:
        """Publish that this rank begins ``step``: if it dies there, the watcher looks too late."""
        self.pulse.beat(step)
        self._publish()

    def begin_case(self, case: str) -> None:
        """Publish that this rank begins an item; "" ends it."""
        self.pulse.begin_case(case)
        self._publish()

    def _publish(self) -> None:
        self._keep_out()
        self.pulse.steps += 1  # last: a look of the watcher's before it counts as earlier
        if self._store is not None:
            status: Any = pickle.dumps(self.pulse.status())
            self._ask(lambda store: store.set(f"step/{self.rank}", status))

    def gather(self, topic: str, value: object) -> list[Any]:
        """Return what each rank said at this turn, by rank. Values are pickled.

        Raises OutOfStep on every rank where one is at another topic.
        """
        self.pulse.beat()
        self._keep_out()
        if self._store is None:
            return [value]
        self._turn += 1
        keys = [f"turn/{self._turn}/{rank}" for rank in range(self.size)]
        ballot: Any = pickle.dumps((topic, value))  # the store takes bytes, though its stubs ask for str
        self._ask(lambda store: store.set(keys[self.rank], ballot))
        self._await(keys, topic)
        votes = [pickle.loads(vote) for vote in self._ask(lambda store: store.multi_get(keys))]
        if self._turn > 2:  # every rank has read turn n - 2, or it could not have voted in turn n - 1
            self._ask(lambda store: store.delete_key(f"turn/{self._turn - 2}/{self.rank}"))
        topics = [vote[0] for vote in votes]
        if len(set(topics)) > 1:
            raise OutOfStep(topics)
        return [vote[1] for vote in votes]

    def place(self, topic: str) -> int:
        """Take a place in the order in which ranks come to ``topic`` before the next turn: 1 is first."""
        if self._store is None:
            return 1
        self._ask(lambda store: store.add("left", 1))
        return int(self._ask(lambda store: store.add(f"order/{self._turn}/{topic}", 1)))

    def catch_up(self) -> None:
        """Note that all who left their work until now have been heard in a turn."""
        if self._store is not None:
            self.left_seen = int(self._ask(lambda store: store.add("left", 0)))

    def follow(self, topic: str, *, leads: bool, limit: float, leave: Callable[[], None]) -> None:
        """Wait for the rank that leads to have come here, at most ``limit`` seconds.

        A rank whose process hosts the store then waits as long for the others to have seen it. ``leave`` is
        called before they say that they have: the store may be gone from then on.
        """
        if self._store is None:
            return
        deadline = time.monotonic() + limit
        with contextlib.suppress(RuntimeError):  # the store's host has left: so may everyone
            if leads:
                self._store.set(topic, "")
            awaited = [topic]
            if self._hosts_store:
                awaited += [f"{topic}/{rank}" for rank in range(1, self.size)]
            while not self._store.check(awaited) and time.monotonic() < deadline:
                self.pulse.beat()
                time.sleep(LONGEST_NAP)
            leave()
            self._store.set(f"{topic}/{self.rank}", "")

    def _await(self, keys: list[str], topic: str) -> None:
        phase, nap, waited = self.pulse.phase, FIRST_NAP, 0.0
        self.waiting = True
        while not self._ask(lambda store: store.check(keys)):
            time.sleep(nap)
            waited += nap
            if waited > 20 * nap:
                nap = min(2 * nap, LONGEST_NAP)
            self.pulse.beat(f"waiting for the other ranks after {phase} ({topic})")
        self.waiting = False
        self.pulse.beat(phase)

    def _ask(self, question: Callable[[Store], Any]) -> Any:
        assert self._store is not None
        try:
            answer = question(self._store)
        except RuntimeError:
            # The host of the store is gone; the watcher finds the same and writes the report.
            self.closing = True
            answer = None
        self._keep_out()
        return answer

    def _keep_out(self) -> None:
        """Wait for ever where the watcher reports from its own thread and ends the process."""
        while self.closing:
            time.sleep(0.1)
