"""What every case of one pytest run shares."""

from __future__ import annotations

import contextlib
import os
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import pytest

from pytest_ep.options import parse_options
from pytest_ep.options import platforms_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch._C._distributed_c10d import Store

    from pytest_ep.backends.base import EPBackend
    from pytest_ep.matrix.cells import Cell
    from pytest_ep.matrix.machine import Machine
    from pytest_ep.matrix.plan import Planned
    from pytest_ep.matrix.platforms import Platforms
    from pytest_ep.options import Options
    from pytest_ep.ranks.fate import Fate
    from pytest_ep.ranks.group import Ranks
    from pytest_ep.ranks.identity import Identity
    from pytest_ep.ranks.output import HeldOutput
    from pytest_ep.ranks.pulse import Pulse
    from pytest_ep.results.journal import Journal
    from pytest_ep.results.record import Ledger

Coordinates = tuple[object, ...]
"""An item's parameters, as many as tell its cell from others of the run."""

PLANNED: pytest.StashKey[Planned] = pytest.StashKey()
"""On an item: the cell that it tests. Items without it are not ours."""

ANNOUNCE_LIMIT = 2.0
"""Seconds that a rank which leaves at once waits for rank 0 to host the store."""
COLLECTIVE_TIMEOUT_FACTOR = 4
"""A collective may wait this many rank timeouts before its own library gives up: the watchdog is first."""


class Run:
    """The state of a run, built and imported as needed: it costs a session without EP cases nothing."""

    def __init__(self, config: pytest.Config, identity: Identity) -> None:
        self.config = config
        self.identity = identity
        self.held: HeldOutput | None = None
        self.active = False
        self.stderr = os.dup(2)  # pytest is not capturing yet
        self.usage_error: pytest.UsageError | None = None
        self.versions: dict[str, Mapping[str, str]] = {}
        self.planned: dict[Coordinates, Planned] = {}
        self.backends: dict[str, type[EPBackend] | None] = {}
        self.reporter = identity.rank == 0
        self.executed = 0
        self.recorded = 0
        self.resumed: dict[str, dict[str, Any]] = {}
        self.began = time.monotonic()
        self.ranks_by_host = [identity.size]
        self.journal: Journal | None = None
        self.machine_info: dict[str, Any] | None = None
        self.refusal = ""
        """Why rank 0 cannot begin; every rank then stops with it."""
        self.session: pytest.Session | None = None
        self._store: Store | None = None
        self._ranks: Ranks | None = None

    @cached_property
    def ledger(self) -> Ledger:
        """What became of each case."""
        from pytest_ep.results.record import Ledger

        return Ledger()

    @cached_property
    def pulse(self) -> Pulse:
        """The main thread's sign of life."""
        from pytest_ep.ranks.pulse import Pulse

        return Pulse()

    @cached_property
    def platforms(self) -> Platforms:
        """The platforms, with the user's file."""
        from pytest_ep.matrix.platforms import load

        return load(platforms_file(self.config))

    @cached_property
    def machine(self) -> Machine:
        """This node."""
        from pytest_ep.matrix.machine import detect

        return detect(self.platforms)

    @cached_property
    def host_facts(self) -> dict[str, str]:
        """What the hosts of a run must have in common, and a resumed run with its earlier one."""
        from pytest_ep.alike import facts

        return facts(self.machine)

    @cached_property
    def options(self) -> Options:
        """The ``--ep-*`` values. Raises pytest.UsageError."""
        return parse_options(self.config, self.platforms, lambda: self.machine, self.identity.size)

    @cached_property
    def fate(self) -> Fate:
        """The agreement of the ranks; connects to the others at first use."""
        from pytest_ep.ranks.ballot import Ballot
        from pytest_ep.ranks.fate import Fate

        if self.identity.size > 1:
            from pytest_ep.ranks.group import connect

            self._store = connect(self.identity)
        return Fate(Ballot(self.identity, self._store, self.pulse), self._say_unreported)

    @property
    def fate_store(self) -> Store | None:
        """A second client of the rendezvous store, for the watchdog's thread."""
        if self.fate.ballot.size == 1:
            return None
        from pytest_ep.ranks.group import connect

        return connect(self.identity, first=False)

    @property
    def ranks(self) -> Ranks:
        """The process groups, built on all ranks together at first use and again after a fault."""
        from pytest_ep.ranks.group import Ranks

        if self._ranks is None:
            timeout = COLLECTIVE_TIMEOUT_FACTOR * self.options.rank_timeout
            self._ranks = Ranks(
                self.identity,
                self._store,
                self.fate.ballot,
                devices=self.machine.devices,
                timeout=timeout,
                say=self.say,
            )
            self.fate.abandon = self._ranks.abandon
        return self._ranks

    @property
    def grouped(self) -> bool:
        """Whether process groups have been built."""
        return self._ranks is not None

    def free(self) -> None:
        """Let the main thread out of a device collective. From the watchdog's thread."""
        if self._ranks is not None:
            self._ranks.abort_device()

    def mend(self) -> None:
        """Build the groups anew where a fault broke them. On all ranks together."""
        if self.fate.broken_by and self._ranks is not None:
            self._ranks.rebuild()
        self.fate.broken_by = ""

    def say(self, line: str) -> None:
        """Print a line on stderr at once, past pytest's capture."""
        os.write(self.stderr, f"pytest_ep: {line}\n".encode())

    def _say_unreported(self, line: str) -> None:
        if not self.reporter:
            self.say(line)

    def identify(self, cell: Cell) -> str:
        """Return a digest of a case and of the options that its numbers depend on."""
        from pytest_ep.results.journal import identity

        options, files = self.options, {}
        if options.selection.routing.recording is not None:
            files["recording"] = options.selection.routing.recording.digest
        if options.selection.skew.weights is not None:
            files["weights"] = str(options.selection.skew.weights)
        return identity(
            cell,
            clocks=options.clocks,
            iterations=options.iterations,
            exact=options.exact,
            flush_l2=options.flush_l2,
            target_ci=options.target_ci,
            time_budget=options.time_budget,
            idle=options.idle,
            repeat=options.repeat,
            poison=options.poison,
            ranks_by_host=self.ranks_by_host,
            host=self.host_facts,
            **files,
        )

    def link_gbps(self, cell: Cell) -> float | None:
        """Peak of the scale-up link per direction, GB/s."""
        return self.platforms.sku(cell.key.sku, self.machine.devices).gbps

    @property
    def trace_cache(self) -> Path | None:
        """Where routing traces are kept between runs: pytest's own cache, where it has one and can write."""
        cache = getattr(self.config, "cache", None)
        with contextlib.suppress(OSError):  # a file system that is read-only or full
            return None if cache is None else Path(cache.mkdir("pytest_ep"))
        return None

    def close(self) -> None:
        """Leave the others. On all ranks together."""
        if self._ranks is not None:
            self._ranks.close()


def announce(identity: Identity, what: str, text: str) -> None:
    """Tell the other ranks, if there are any, why this one cannot take part.

    Who hosts the store cannot stay to be heard: the others find none.
    """
    if identity.size == 1 or identity.hosts_store:
        return
    from pytest_ep.ranks.rendezvous import unreachable

    # Rank 0 may have ended for the same reason, and in a session without EP cases hosts no store at all.
    if not identity.agent_hosts_store and unreachable(identity, ANNOUNCE_LIMIT):
        return
    from pytest_ep.ranks import group
    from pytest_ep.ranks import watchdog

    last = text.strip().rpartition("\n")[2]
    with contextlib.suppress(RuntimeError, pytest.UsageError):  # nobody listens
        store = group.connect(identity, first=False)
        assert store is not None
        watchdog.announce(identity, store, f"rank {identity.rank} {what}: {last}", text)


RUN: pytest.StashKey[Run] = pytest.StashKey()


def is_xdist_worker(config: pytest.Config) -> bool:
    """Whether this process was started by pytest-xdist."""
    return hasattr(config, "workerinput")
