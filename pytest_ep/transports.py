"""One live transport at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace

import pytest

from pytest_ep.alike import difference
from pytest_ep.backends.base import BackendUnavailable
from pytest_ep.backends.base import EPBackend
from pytest_ep.backends.base import ModeFacts
from pytest_ep.matrix.cells import PROBE_TOKENS
from pytest_ep.matrix.cells import Cell
from pytest_ep.matrix.cells import Key
from pytest_ep.oracle import reduction as models
from pytest_ep.oracle.reduction import Reduction
from pytest_ep.ranks.ballot import AgreedExit
from pytest_ep.ranks.fate import AgreedFailure
from pytest_ep.ranks.fate import AgreedSkip
from pytest_ep.ranks.fate import Failure
from pytest_ep.ranks.fate import Unavailable
from pytest_ep.results.record import CLOSING
from pytest_ep.results.record import CaseResult
from pytest_ep.run import PLANNED
from pytest_ep.run import Run
from pytest_ep.workload import routes
from pytest_ep.workload.routes import Routes
from pytest_ep.workload.routing import Trace

ROUTINGS = 8
ROUTING_LIMIT = 1800.0
"""Seconds that a rank may take for the routing of a key: EP64 with T = 8192 takes one core a minute, once."""
SEED = 67
"""Part of the workload's identity: published copy counts hold for it."""


@dataclass(frozen=True, slots=True)
class Live:
    """A constructed transport, how it adds, its scale-up domain (ranks), and the routing of its cases.

    It was sized for ``max_tokens`` on a rank; ``largest`` is its case of most tokens, or a probe.
    """

    key: Key
    backend: EPBackend
    reduction: Reduction
    facts: ModeFacts
    largest: Cell
    max_tokens: int
    domain: int
    routes: Routes
    routings: int

    def traces(self, tokens_by_rank: Sequence[int]) -> Iterator[Trace]:
        """Yield a case's routing, then others for the same tokens: one after another, up to ``routings``."""
        tokens = sum(tokens_by_rank)
        yield self.routes.of(tokens_by_rank)
        for number in range(1, min(self.routings, self.routes.tokens // tokens)):
            yield self.routes.of(tokens_by_rank, number * tokens)


class Transports:
    """Holds the transport of the current key, and closes it on all ranks when the key changes."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._live: Live | None = None
        self._refused: dict[Key, AgreedSkip] = {}
        self._failed: dict[Key, str] = {}
        self._lost = ""

    def of(self, cell: Cell, backend: type[EPBackend], items: Iterable[pytest.Item]) -> Live:
        """Return the live transport of a cell's key, sized for the largest selected T of that key.

        Raises AgreedSkip where the transport refuses this machine, AgreedFailure where construction fails;
        either holds for the rest of the key.
        """
        key = cell.key
        self._recover()
        if self._live is None or self._live.key != key:
            # Before any library waits for the others: a rank that has left its case is heard of here alone.
            self._run.fate.together("transport", lambda: None)
            self.close()
            self._recover()
        if key in self._refused:
            raise AgreedSkip(self._refused[key].code, self._refused[key].reason)
        if key in self._failed:
            raise AgreedFailure(Failure(f"not run: no transport since {self._failed[key]}"))
        if self._live is None:
            self._live = self._construct(cell, backend, selected(key, items))
        return self._live

    def close(self) -> None:
        """Close the live transport on all ranks together. A failure of it is no case's, and fails the run."""
        if self._run.fate.broken_by:
            self._drop()
            return
        live, self._live = self._live, None
        if live is not None:
            try:
                self._run.fate.together("closing the transport", live.backend.close)
            except AgreedFailure as failed:
                cell = replace(live.largest, tokens=PROBE_TOKENS)
                self._run.ledger.add(CaseResult.failed(f"closing {live.key}", cell, failed.failure, CLOSING))

    def _drop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(Exception):  # it may wait for nobody: its groups are gone
                live.backend.close()

    def _recover(self) -> None:
        """After a fault left ranks in different places: new groups, and a new transport when asked."""
        if not self._run.fate.broken_by:
            return
        since = self._run.fate.broken_by
        if not self._lost and any(self._run.fate.together("device health", self._device_fault)):
            self._lost = f"not run: a device's context is lost since {since}"
        if self._lost:
            raise AgreedFailure(Failure(self._lost))
        self._drop()
        try:
            self._run.fate.together("rebuilding the process groups", self._run.mend)
        except AgreedFailure:
            self._lost = f"not run: the process groups could not be rebuilt since {since}"
            raise

    def _device_fault(self) -> str:
        if not self._run.grouped:
            return ""
        try:
            self._run.ranks.synchronize()
        except Exception as error:  # a sticky error: every later call on the device would say the same
            return str(error)
        return ""

    def _construct(self, cell: Cell, backend: type[EPBackend], cells: Sequence[Cell]) -> Live:
        run, key = self._run, cell.key
        max_tokens = max(one.max_tokens for one in cells)
        largest = max(cells, key=lambda one: one.tokens)
        made: list[EPBackend] = []

        def construct() -> None:
            try:
                made.append(backend(run.ranks, cell.shape, key.mode, key.precision, max_tokens))
                run.ranks.synchronize()
            except BackendUnavailable as refusal:
                raise Unavailable(refusal.code, refusal.reason) from None

        run.fate.together("process groups", self._build_groups)
        routing = self._routing(largest, self._routings(backend.modes[key.mode]))
        try:
            run.fate.together("construction", construct)
            _same_versions(run.fate.together("versions", lambda: dict(made[0].versions)))
        except (AgreedSkip, AgreedFailure) as ended:
            self._give_up(key, ended, made)
            raise
        live = made[0]
        run.versions[key.backend] = live.versions
        run.ledger.constructed[key] = live.facts
        domain = run.platforms.sku(key.sku, run.machine.devices).scale_up_domain
        return Live(
            key,
            live,
            models.named(live.reduction, domain),
            backend.modes[key.mode],
            largest,
            max_tokens,
            domain,
            routing,
            self._routings(backend.modes[key.mode]),
        )

    def _build_groups(self) -> None:
        self._run.ranks.barrier()

    def _give_up(self, key: Key, ended: AgreedSkip | AgreedFailure, made: Iterable[EPBackend]) -> None:
        for one in made:
            with contextlib.suppress(Exception):
                one.close()
        if isinstance(ended, AgreedSkip):
            self._refused[key] = ended
        else:
            self._failed[key] = self._run.pulse.case

    def _routings(self, facts: ModeFacts) -> int:
        """Pieces of the trace that timed pairs cycle through, where they are captured in a graph."""
        return ROUTINGS if facts.graph_safe and self._run.machine.devices else 1

    def _routing(self, largest: Cell, pieces: int) -> Routes:
        """Load ``pieces`` times the routing of the largest case, the same on every rank."""
        run = self._run
        tokens = pieces * sum(largest.tokens_by_rank)
        found: list[Routes] = []

        def load() -> str:
            # Choices that must be distinct take long where top_k is near the number of experts.
            with run.pulse.long_phase("routing", ROUTING_LIMIT):
                loaded = routes.load_routes(
                    run.options.selection.routing,
                    largest.shape,
                    SEED,
                    tokens,
                    run.trace_cache,
                    write=run.identity.rank == 0,
                )
            found.append(loaded)
            return loaded.digest(largest.tokens_by_rank)

        # Rank 0 writes what is missing before the others read.
        first = run.fate.together("routing", lambda: load() if run.identity.rank == 0 else "")[0]
        digests = run.fate.together("routing digest", lambda: first if run.identity.rank == 0 else load())
        stop_on_different_routing(digests)
        return found[0]


def _same_versions(said: Sequence[Mapping[str, str]]) -> None:
    if unlike := difference(said, [f"rank {rank}" for rank in range(len(said))]):
        raise AgreedFailure(Failure(f"{unlike}; give every rank the same packages"))


def selected(key: Key, items: Iterable[pytest.Item]) -> list[Cell]:
    """Return the selected cases of a key that run, or its probes without any."""
    cells: dict[bool, list[Cell]] = {True: [], False: []}
    for item in items:
        planned = item.stash.get(PLANNED, None)
        if planned is not None and planned.cell.key == key and planned.skip is None:
            cells["probe" in getattr(item, "fixturenames", ())].append(planned.cell)
    return cells[False] or cells[True]


def stop_on_different_routing(digests: Sequence[str]) -> None:
    """End the session on every rank where two ranks built different routing."""
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise AgreedExit(
                f"rank {rank} built other routing than rank 0 ({digest[:12]} against {digests[0][:12]}): "
                "give every rank the same packages, or clear pytest's cache with --cache-clear",
                pytest.ExitCode.TESTS_FAILED,
            )
