"""The main thread's sign of life: what it is doing, and since when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank's main thread last said, as it is published.

    ``age`` is seconds since the last beat, ``case_age`` seconds since the case began without its declared
    long phases; ``long`` is the seconds that the present phase may take, or 0 for an ordinary one;
    ``steps`` counts the steps that it has entered: of two statuses the later one has more.
    """

    case: str
    phase: str
    age: float
    case_age: float
    long: float
    steps: int = 0


class Pulse:
    """Beaten by the main thread, read by the watcher thread.

    Plain attribute writes: a beat costs well under a microsecond, so it may stand next to timed windows.
    """

    def __init__(self) -> None:
        self.case = ""
        self.phase = "starting"
        self.steps = 0
        self._long = 0.0
        self._beat = time.monotonic()
        self._case_began = self._beat

    def beat(self, phase: str | None = None) -> None:
        """Say that the main thread moves on, and into which phase."""
        if phase is not None:
            self.phase = phase
        self._beat = time.monotonic()

    def begin_case(self, case: str) -> None:
        """Say which item runs now."""
        self.case = case
        self._case_began = time.monotonic()
        self.beat("setup")

    @contextmanager
    def long_phase(self, what: str, limit: float) -> Iterator[None]:
        """Declare work that may take up to ``limit`` seconds (a kernel build): neither timeout counts it."""
        before, began = self.phase, time.monotonic()
        self._long = limit
        self.beat(what)
        try:
            yield
        finally:
            self._long = 0.0
            self._case_began += time.monotonic() - began
            self.beat(before)

    def status(self) -> Status:
        """What the watcher publishes."""
        now = time.monotonic()
        case_age = 0.0 if self._long or not self.case else now - self._case_began
        return Status(self.case, self.phase, now - self._beat, case_age, self._long, self.steps)
