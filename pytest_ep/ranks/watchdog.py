"""Bounded time: a thread that sees ranks die or stop, and writes the report when the main thread cannot."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING
from typing import Any

from pytest_ep.ranks.ballot import Ballot
from pytest_ep.ranks.identity import Identity
from pytest_ep.ranks.pulse import Status

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TICK = 0.25
"""Seconds between looks."""
LAST_WORDS = 1.5
"""Seconds that the reporter waits for the other ranks' last words: who says none by then is gone."""
INTERRUPT_GRACE = 4.0
"""Seconds that Ctrl-C leaves for the running case to end on all ranks."""
LEFT_GRACE = 1.0
"""Seconds that a rank may go on with its work after a peer left the same work."""
REPORT_LIMIT = 8.0
"""Seconds that the others wait for the reporter before they leave."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds without a sign of life from a rank's main thread, and seconds of one case as a whole."""

    rank: float
    case: float


@dataclass(frozen=True, slots=True)
class LastWords:
    """What a rank says when the run ends early."""

    status: Status
    stack: str
    printed: str


@dataclass(frozen=True, slots=True)
class Ending:
    """Why the run ends early, and what each rank said of itself: None from a rank that is gone.

    ``seen`` is each rank's last published status.
    """

    cause: str
    words: tuple[LastWords | None, ...]
    seen: tuple[Status | None, ...]


class Watchdog:
    """Publishes this rank's status, watches the others', and ends the run when one is lost.

    ``report`` runs in this thread on the lowest rank that is left; ``printed`` returns the last lines that
    this rank's running case printed; ``free`` lets this rank's main thread out of a device collective that a
    peer has left; ``stderr`` is a file descriptor past pytest's capture.
    """

    def __init__(
        self,
        identity: Identity,
        store: Store | None,
        ballot: Ballot,
        limits: Limits,
        *,
        report: Callable[[Ending], None],
        printed: Callable[[], str],
        free: Callable[[], None],
        stderr: int,
    ) -> None:
        self._identity = identity
        self._store = store
        self._ballot = ballot
        self._limits = limits
        self._report = report
        self._printed = printed
        self._free = free
        self._stderr = stderr
        self._freed = 0
        self._left_since = 0.0
        self._main = threading.get_ident()
        self._stopped = threading.Event()
        self._wake, self._waker = os.pipe()
        self._interrupted = 0.0
        self._ticks = 0
        self._seen: list[tuple[int, Status | None, float]] = [(0, None, time.monotonic())] * identity.size
        self._thread = threading.Thread(target=self._run, name="pytest-ep-watchdog", daemon=True)
        self._handlers: dict[int, object] = {}

    def start(self) -> None:
        """Take over SIGTERM and SIGINT and begin to watch. From the main thread."""
        os.set_blocking(self._waker, False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers[number] = signal.signal(number, _heard_by_the_watchdog)
        self._ballot.pulse.beat("collection")
        self._thread.start()

    def stop(self) -> None:
        """Stop watching and give the signals back. From the main thread."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join()
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        ready: list[int] = []
        while not self._stopped.is_set():
            try:
                cause = self._signalled(os.read(self._wake, 16)) if ready else ""
                cause = cause or self._look()
            except RuntimeError:
                cause = "the rendezvous store is gone: the host of rank 0, or its torchrun, has ended"
            if cause and not self._stopped.is_set():
                self._end(cause)
            ready, _, _ = select.select([self._wake], [], [], TICK)

    def _signalled(self, numbers: bytes) -> str:
        if signal.SIGTERM in numbers:
            return "this job was told to end (SIGTERM)"
        if signal.SIGINT in numbers and not self._interrupted:
            self._interrupted = time.monotonic()
            self._ballot.stop = "interrupted (Ctrl-C)"
        return ""

    def _look(self) -> str:
        status = self._ballot.pulse.status()
        # Fires only where this thread no longer runs, as the interpreter's lock is held in native code: then
        # faulthandler alone can say where, and end this rank. The others report it.
        faulthandler.dump_traceback_later(status.long or self._limits.rank, file=self._stderr, exit=True)
        cause = self._overdue(self._identity.rank, status)
        if self._interrupted and time.monotonic() - self._interrupted > INTERRUPT_GRACE:
            cause = cause or f"interrupted (Ctrl-C); the case did not end within {INTERRUPT_GRACE:.0f} s"
        if self._store is None:
            return cause
        self._ticks += 1
        self._say(self._store, f"status/{self._identity.rank}", (self._ticks, status))
        if self._store.check(["end"]):
            return cause or self._store.get("end").decode()
        self._free_if_left(self._store)
        return cause or self._look_at_others(self._store)

    def _free_if_left(self, store: Store) -> None:
        """Free the main thread where a peer left its work and this one still waits for it."""
        left = int(store.add("left", 0))
        if left <= max(self._ballot.left_seen, self._freed) or self._ballot.waiting:
            self._left_since = 0.0
            return
        now = time.monotonic()
        self._left_since = self._left_since or now
        if now - self._left_since > LEFT_GRACE:
            self._freed = left
            with contextlib.suppress(Exception):  # if it cannot be freed, the rank timeout ends the run
                self._free()

    def _look_at_others(self, store: Store) -> str:
        self._read_statuses(store)
        for rank, (_, last, when) in enumerate(self._seen):
            silent = time.monotonic() - when
            if silent > self._limits.rank + (last.long if last else 0):
                return f"rank {rank} gave no sign of life for {silent:.0f} s"
        return ""

    def _read_statuses(self, store: Store) -> None:
        for rank, (ticks, _, _) in enumerate(self._seen):
            if store.check([f"status/{rank}"]):
                now, status = pickle.loads(store.get(f"status/{rank}"))
                if now != ticks:  # what counts is when it changed here: hosts' clocks differ
                    self._seen[rank] = (now, status, time.monotonic())

    def _overdue(self, rank: int, status: Status) -> str:
        if status.age > (status.long or self._limits.rank):
            limit = "its own limit" if status.long else "--ep-rank-timeout"
            return f"rank {rank} was silent for {status.age:.0f} s in {status.phase!r} ({limit})"
        if status.case_age > self._limits.case:
            return f"the case takes more than {self._limits.case:.0f} s (--ep-case-timeout)"
        return ""

    def _end(self, cause: str) -> None:
        self._ballot.closing = True
        words: list[LastWords | None] = [None] * self._identity.size
        mine = LastWords(self._ballot.pulse.status(), self._stack(), self._printed())
        words[self._identity.rank] = mine
        reporter = self._identity.rank
        if self._store is not None:
            try:
                cause = self._store.compare_set("end", "", cause).decode()
                words = self._exchange(self._store, mine)
                reporter = next(rank for rank, said in enumerate(words) if said is not None)
            except RuntimeError:  # no store: every rank is on its own, and only rank 0 may write
                reporter = 0
        try:
            if reporter == self._identity.rank:
                self._report(self._ending(cause, words))
                self._say_reported()
            else:
                self._await_report()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _exchange(self, store: Store, mine: LastWords) -> list[LastWords | None]:
        keys = [f"last/{rank}" for rank in range(self._identity.size)]
        self._say(store, keys[self._identity.rank], mine)
        deadline = time.monotonic() + LAST_WORDS
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._read_statuses(store)
        return [pickle.loads(store.get(key)) if store.check([key]) else None for key in keys]

    def _say(self, store: Store, key: str, value: object) -> None:
        ballot: Any = pickle.dumps(value)  # the store takes bytes, though its stubs ask for str
        store.set(key, ballot)

    def _ending(self, cause: str, words: list[LastWords | None]) -> Ending:
        return Ending(cause, tuple(words), tuple(seen for _, seen, _ in self._seen))

    def _say_reported(self) -> None:
        if self._store is not None:
            self._store.set("reported", "")

    def _await_report(self) -> None:
        deadline = time.monotonic() + REPORT_LIMIT
        try:
            while time.monotonic() < deadline:
                if self._store is None or self._store.check(["reported"]):
                    return
                time.sleep(0.05)
        except RuntimeError:
            return

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._main)
        return "".join(traceback.format_stack(frame)[-8:]) if frame else ""


def announce(identity: Identity, store: Store, cause: str, text: str) -> None:
    """Tell the other ranks why this one will not come, where it cannot take part in the session at all."""
    words: Any = pickle.dumps(LastWords(Status("", "collection", 0.0, 0.0, 0.0), text, ""))
    store.set(f"last/{identity.rank}", words)
    store.compare_set("end", "", cause)
    if identity.rank == 0:
        store.set("reported", "")  # it reports for itself


def _heard_by_the_watchdog(number: int, frame: FrameType | None) -> None:
    """Do nothing: the wake-up pipe has already told the watchdog's thread."""
