"""What each rank publishes of itself in the rendezvous store, and what this one last read of the others."""

from __future__ import annotations

import os
import pickle
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from pytest_ep.ranks.identity import Identity
from pytest_ep.ranks.output import last_lines
from pytest_ep.ranks.pulse import Status

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True, slots=True)
class Notice:
    """What a rank published last: ``ticks`` counts them, the rest of it says which process it is."""

    ticks: int
    status: Status
    host: str
    local_rank: int
    pid: int


class Bulletin:
    """Posts this rank's notices and reads the others', dated by when they changed here: clocks differ."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._ticks = 0
        self.posted = ""
        self._changed = [time.monotonic()] * identity.size
        self.notices: list[Notice | None] = [None] * identity.size

    def post(self, store: Store, status: Status) -> None:
        """Publish what this rank's main thread does, and what it has printed where that is captured."""
        self._ticks += 1
        local_rank = self._identity.local_rank
        notice: Any = pickle.dumps(Notice(self._ticks, status, platform.node(), local_rank, os.getpid()))
        store.set(f"status/{self._identity.rank}", notice)
        if (printed := last_lines()) != self.posted:
            self.posted = printed
            store.set(f"printed/{self._identity.rank}", printed)

    def read(self, store: Store) -> None:
        """Look for new notices."""
        for rank, known in enumerate(self.notices):
            if store.check([f"status/{rank}"]):
                notice: Notice = pickle.loads(store.get(f"status/{rank}"))
                if known is None or notice.ticks != known.ticks:
                    self.notices[rank], self._changed[rank] = notice, time.monotonic()

    def silent(self, limit: float) -> str:
        """Name the first rank that gave no notice for longer than ``limit`` and its declared long phase."""
        for rank, (notice, when) in enumerate(zip(self.notices, self._changed, strict=True)):
            silent = time.monotonic() - when
            if silent > limit + (notice.status.long if notice else 0):
                return f"rank {rank} gave no sign of life for {silent:.0f} s"
        return ""

    def seen(self, store: Store | None) -> tuple[Status | None, ...]:
        """Return each rank's last known status: what it published at its last step, or its later notice."""
        known = [notice.status if notice else None for notice in self.notices]
        for rank, status in enumerate(known):
            key = f"step/{rank}"
            if store is not None and store.check([key]):
                step: Status = pickle.loads(store.get(key))
                if status is None or step.steps > status.steps:
                    known[rank] = step
        return tuple(known)

    def printed(self, store: Store) -> list[str]:
        """Return the last lines that each rank has published."""
        keys = [f"printed/{rank}" for rank in range(len(self.notices))]
        return [store.get(key).decode() if store.check([key]) else "" for key in keys]

    def is_lowest_here(self) -> bool:
        """Whether no rank below this one lives on this host: all that can be known without a store."""
        return all(rank > self._identity.local_rank for rank in self._others_here())

    def is_alone_here(self) -> bool:
        """Whether no other rank lives on this host."""
        return not self._others_here()

    def _others_here(self) -> list[int]:
        """The local ranks of this host that live, this one apart."""
        return [
            notice.local_rank
            for notice in self.notices
            if notice is not None
            and notice.host == platform.node()
            and notice.local_rank != self._identity.local_rank
            and _lives(notice.pid)
        ]


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
