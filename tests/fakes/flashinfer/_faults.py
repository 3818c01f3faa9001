"""The switch: PYTEST_EP_FAKE_FAULT=name[:number][@rank], several of them separated by commas.

The number is seconds for what takes time, otherwise which call (or which T) is meant. Without a rank the
fault is on every rank. Entries are those of facts/field-reports.md.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

from ._facts import FACTS

PIDFD = frozenset({"pidfd"})
SOCKETS = frozenset({"sockets", "agreed"})
ANY = PIDFD | SOCKETS
FAULTS: dict[str, tuple[float, frozenset[str], str]] = {
    "partial-communicator": (0, ANY, "2: the wheel has no TorchDistBackend"),
    "slow-map": (0.5, ANY, "2: the mapping is ready late; a peer's dispatch before that is a launch failure"),
    "missing-payload": (0, ANY, "3: dispatch returns one tensor fewer"),
    "bare-tensor": (0, ANY, "3: dispatch returns the first tensor alone"),
    "raise-in-sanitize": (1, ANY, "4: the numbered dispatch raises after its exchange"),
    "raise-in-combine": (1, ANY, "4: the numbered combine raises before its exchange"),
    "wrong-group-size": (0, ANY, "5: the communicator spans one rank more than the EP group"),
    "double-combine": (0, ANY, "15: combine returns twice the sum"),
    "unreduced-combine": (0, ANY, "15: combine returns the staged plane"),
    "wrong-accumulator": (0, ANY, "15: combine adds in the other generation's precision"),
    "pidfd-refused": (0, PIDFD, "17: pidfd_getfd is not permitted"),
    "imex-refused": (0, ANY, "17: no IMEX channel"),
    "fd-timeout": (1.0, SOCKETS, "19: a peer never offers its descriptor"),
    "links-down": (0, ANY, "19: not every NVLink of the device is up"),
    "build-sleep": (1.0, ANY, "21: the build takes that many seconds"),
    "build-fails": (0, ANY, "21: ninja fails"),
    "block-at-T": (3, ANY, "30: dispatch never returns for that T"),
    "hang-dispatch": (1, ANY, "23: the numbered dispatch never returns"),
    "hang-combine": (1, ANY, "23: the numbered combine never returns"),
    "die-in-dispatch": (1, ANY, "53: the process is killed inside the numbered dispatch"),
    "launch-failure": (2, ANY, "54: from the numbered dispatch on every call fails"),
}


@dataclass(frozen=True)
class Fault:
    """A fault switched on for this rank."""

    name: str
    number: float


def parse(text: str) -> dict[str, tuple[float, int | None]]:
    """Name to (number, rank) of every fault in the switch; ValueError for a name that does not exist here."""
    found: dict[str, tuple[float, int | None]] = {}
    for item in filter(None, text.split(",")):
        match = re.fullmatch(r"([A-Za-z-]+)(?::([0-9.]+))?(?:@(\d+))?", item)
        if match is None or match[1] not in FAULTS:
            raise ValueError(
                f"PYTEST_EP_FAKE_FAULT: unknown fault {item!r}; known: {', '.join(sorted(FAULTS))}"
            )
        default, where, _ = FAULTS[match[1]]
        if FACTS.handles not in where:
            raise ValueError(f"PYTEST_EP_FAKE_FAULT: {match[1]} cannot happen in flashinfer {FACTS.name}")
        number = default if match[2] is None else float(match[2])
        found[match[1]] = (number, None if match[3] is None else int(match[3]))
    return found


ACTIVE = parse(os.environ.get("PYTEST_EP_FAKE_FAULT", ""))


def this_rank() -> int:
    """The rank in the job, as torchrun counts."""
    return int(os.environ.get("RANK", "0"))


def active(name: str) -> Fault | None:
    """The fault, if it is on for this rank."""
    if name not in ACTIVE:
        return None
    number, rank = ACTIVE[name]
    return Fault(name, number) if rank in {None, this_rank()} else None


def at(name: str, call: int) -> bool:
    """Whether this call, counted from 1, is the one that the fault names."""
    fault = active(name)
    return fault is not None and call == int(fault.number)


def hang() -> None:
    """What waiting for a peer that never comes looks like from outside."""
    while True:
        time.sleep(0.05)
