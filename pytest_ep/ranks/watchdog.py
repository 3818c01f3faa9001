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
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING
from typing import Any

from pytest_ep.ranks.ballot import Ballot
from pytest_ep.ranks.bulletin import Bulletin
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
UNANSWERED = 0.75
"""Share of the rank limit after which a store that gives no answer counts as gone."""
LAST_ANSWER = 3.5
"""Seconds after which it does where this rank ends anyhow: who sent SIGTERM sends SIGKILL soon."""
STOP_LIMIT = 5.0
"""Seconds that the end of a session waits for a watchdog which waits for the store."""
END_LIMIT = 30.0
"""Seconds after which a rank that ends is ended by faulthandler, whatever it still waits for."""
ENDS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that tell a job to end: of a scheduler or torchrun, of a terminal that is gone."""
LATE = 3.0
"""Seconds that who reports for its host waits for the host's others to end, unless it was told to end."""
SETTLE = 0.5
"""Seconds in which ranks that are killed together are gone."""


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

    ``seen`` is each rank's last published status, ``printed`` the last lines that it published. Without a
    store this rank is ``alone``: of others it knows no more than that.
    """

    cause: str
    words: tuple[LastWords | None, ...]
    seen: tuple[Status | None, ...]
    printed: tuple[str, ...]
    alone: bool


class Watchdog:
    """Publishes this rank's status, watches the others', and ends the run when one is lost.

    ``report`` runs in a thread of this, on the lowest rank that is left, or without a store on that of each
    host; ``printed`` returns the last lines that this rank's running case printed; ``free`` lets this rank's
    main thread out of a device collective that a peer has left; ``stderr`` is a file descriptor past
    pytest's capture.
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
        self._bulletin = Bulletin(identity)
        self._asks = 0
        self._asking = False
        self._told = ""
        self._prodded = threading.Event()
        self._reports = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="pytest-ep-watchdog", daemon=True)
        self._guard = threading.Thread(target=self._stand_guard, name="pytest-ep-guard", daemon=True)
        self._handlers: dict[int, object] = {}

    def start(self) -> None:
        """Take over the signals that end a job and begin to watch. From the main thread."""
        os.set_blocking(self._waker, False)
        self.listen()
        for number in (*ENDS, signal.SIGINT):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                self._handlers[number] = signal.signal(number, self._pass_on)
        self._ballot.pulse.beat("collection")
        self._thread.start()
        self._guard.start()

    def listen(self) -> None:
        """Have signals heard whatever the main thread waits for. An asyncio loop that closes ends that."""
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)

    def stop(self) -> None:
        """Stop watching and give the signals back. From the main thread."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._prodded.set()
        os.write(self._waker, b"\0")  # no signal has this number
        for thread in (self._thread, self._guard):
            thread.join(None if self._ballot.closing else STOP_LIMIT)
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                cause = self._told or self._look()
            except RuntimeError:
                cause = "the rendezvous store is gone: the host of rank 0, or its torchrun, has ended"
            if cause and not self._stopped.is_set():
                self._end(cause)
            self._prodded.wait(TICK)

    def _stand_guard(self) -> None:
        """Hear signals; end this rank where the other thread waits for ever for an answer of the store."""
        asks, quiet = 0, 0.0
        while not self._stopped.is_set():
            ready, _, _ = select.select([self._wake], [], [], TICK)
            if ready:
                self._hear(os.read(self._wake, 16))
            # Counted here: while the interpreter's lock is held neither thread runs, whatever the clock says.
            quiet = quiet + TICK if self._asking and self._asks == asks else 0.0
            asks = self._asks
            ends = bool(self._told) or self._ballot.closing
            if quiet > (LAST_ANSWER if ends else UNANSWERED * self._limits.rank):
                lost = "the rendezvous store gives no answer: its host is gone, or the way to it"
                self._end_alone(f"{self._told}, and {lost}" if self._told else lost)

    def _hear(self, numbers: bytes) -> None:
        for number in set(ENDS).intersection(numbers):
            self._told = f"this job was told to end ({signal.Signals(number).name})"
            self._prodded.set()
        if signal.SIGINT in numbers and not self._interrupted:
            self._interrupted = time.monotonic()
            self._ballot.stop = "interrupted (Ctrl-C)"

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Write what the wake-up descriptor would have: heard twice is heard once."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, bytes([number]))

    @contextlib.contextmanager
    def _question(self) -> Iterator[None]:
        """Let the guard know while an answer of the store is awaited."""
        self._asks += 1
        self._asking = True
        try:
            yield
        finally:
            self._asking = False

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
        with self._question():
            self._bulletin.post(self._store, status)
            if self._store.check(["end"]):
                return cause or self._store.get("end").decode()
            self._free_if_left(self._store)
            self._bulletin.read(self._store)
        return cause or self._bulletin.silent(self._limits.rank)

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
            # The library may wait for ever in it: not in this thread, which the rank timeout needs.
            threading.Thread(target=self._let_out, name="pytest-ep-free", daemon=True).start()

    def _let_out(self) -> None:
        with contextlib.suppress(Exception):  # if it cannot be freed, the rank timeout ends the run
            self._free()

    def _overdue(self, rank: int, status: Status) -> str:
        if status.age > (status.long or self._limits.rank):
            limit = "its own limit" if status.long else "--ep-rank-timeout"
            return f"rank {rank} was silent for {status.age:.0f} s in {status.phase!r} ({limit})"
        if status.case_age > self._limits.case:
            return f"the case takes more than {self._limits.case:.0f} s (--ep-case-timeout)"
        return ""

    def _end(self, cause: str) -> None:
        mine = self._last_words()
        try:
            with self._question():
                ending, reporter = self._exchange(cause, mine)
        except RuntimeError:  # no store: every host is on its own
            ending, reporter = self._without_store(cause, mine)
        self._reports.acquire()  # for good: one of the two threads ends the process
        self._leave(ending, reporter)

    def _end_alone(self, cause: str) -> None:
        if self._reports.acquire(blocking=False):
            self._leave(*self._without_store(cause, self._last_words()))

    def _last_words(self) -> LastWords:
        faulthandler.dump_traceback_later(END_LIMIT, file=self._stderr, exit=True)
        self._ballot.closing = True
        return LastWords(self._ballot.pulse.status(), self._stack(), self._printed())

    def _leave(self, ending: Ending, reporter: int) -> None:
        try:
            if reporter == self._identity.rank:
                self._report(ending)
                if ending.alone:
                    self._outlast_the_others()
                else:
                    self._say_reported()
            elif ending.alone:
                self._say_where(ending)
            else:
                self._await_report()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _outlast_the_others(self) -> None:
        """Let the ranks of this host that are late find one that reports: who finds none reports, too."""
        deadline = time.monotonic() + LATE
        while not (self._told or self._bulletin.is_alone_here()) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _say_where(self, ending: Ending) -> None:
        """Say on stderr what no report will: the reporter of this host hears of no other rank's stack."""
        rank = self._identity.rank
        if (words := ending.words[rank]) is not None:
            said = f"pytest_ep: rank {rank} was in {words.status.phase!r}\n{words.stack}"
            os.write(self._stderr, said.encode())

    def _exchange(self, cause: str, mine: LastWords) -> tuple[Ending, int]:
        """Return what the ranks know together, and the lowest that is left. Raises RuntimeError."""
        store = self._store
        if store is None:
            return self._without_store(cause, mine)
        cause = store.compare_set("end", "", cause).decode()
        keys = [f"last/{rank}" for rank in range(self._identity.size)]
        said: Any = pickle.dumps(mine)  # the store takes bytes, though its stubs ask for str
        store.set(keys[self._identity.rank], said)
        deadline = time.monotonic() + LAST_WORDS
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._bulletin.read(store)
        words = tuple(pickle.loads(store.get(key)) if store.check([key]) else None for key in keys)
        reporter = next(rank for rank, said in enumerate(words) if said is not None)
        seen = self._bulletin.seen(store)
        return Ending(cause, words, seen, tuple(self._bulletin.printed(store)), False), reporter

    def _without_store(self, cause: str, mine: LastWords) -> tuple[Ending, int]:
        words: list[LastWords | None] = [None] * self._identity.size
        # What torch's store client says of the loss would hide what the case printed.
        words[self._identity.rank] = replace(mine, printed=self._bulletin.posted or mine.printed)
        if self._identity.size > 1:
            time.sleep(SETTLE)
        reporter = self._identity.rank if self._bulletin.is_lowest_here() else -1
        alone = self._identity.size > 1
        seen = self._bulletin.seen(None)
        return Ending(cause, tuple(words), seen, ("",) * len(words), alone), reporter

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
