"""Clocks: where a timed window begins and ends."""

from __future__ import annotations

import time
from typing import Any
from typing import Protocol

import torch


class Clock(Protocol):
    """A clock takes a mark on each side of a window and says afterwards how long it was."""

    name: str

    def start(self) -> Any:
        """Mark the beginning now, without waiting for anything."""

    def end(self) -> Any:
        """Mark the end of the work that was issued since."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks; legal once the device was synchronised."""


class HostClock:
    """The host's monotonic clock; a device's work is waited for inside the window."""

    name = "host"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> int:
        """Read the clock, ns."""
        return time.perf_counter_ns()

    def end(self) -> int:
        """Read the clock once the device is done, ns."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter_ns()

    def seconds(self, start: int, end: int) -> float:
        """Nanoseconds to seconds."""
        return (end - start) / 1e9


class EventClock:
    """CUDA events on the current stream, around eager calls: host launch cost is inside at small T."""

    name = "event"

    def start(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    end = start

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the events' distance, which CUDA gives in milliseconds."""
        return float(start.elapsed_time(end)) / 1e3


def choose(name: str, device: torch.device) -> Clock:
    """Return the clock of that name; ``auto`` is event on an accelerator and host on a CPU.

    Raises ValueError, one line, where this machine has no such clock.
    """
    if name == "event" and device.type == "cpu":
        raise ValueError("--ep-clock event needs an accelerator; this machine has none: use auto or host")
    if name == "host" or device.type == "cpu":
        return HostClock(device)
    return EventClock()
