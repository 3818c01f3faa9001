"""One live transport at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from pytest_ep.backends.base import BackendUnavailable
from pytest_ep.backends.base import EPBackend
from pytest_ep.backends.base import ModeFacts
from pytest_ep.matrix.cells import Cell
from pytest_ep.matrix.cells import Key
from pytest_ep.oracle import reduction as models
from pytest_ep.oracle.reduction import Reduction
from pytest_ep.ranks.fate import AgreedFailure
from pytest_ep.ranks.fate import AgreedSkip
from pytest_ep.ranks.fate import Failure
from pytest_ep.ranks.fate import Unavailable
from pytest_ep.run import PLANNED
from pytest_ep.run import Run
from pytest_ep.workload import routing
from pytest_ep.workload.routing import Trace

SEED = 67
"""Part of the workload's identity: published copy counts hold for it."""


@dataclass(frozen=True, slots=True)
class Live:
    """A constructed transport, how it adds, its scale-up domain (ranks), the routing of its largest case."""

    key: Key
    backend: EPBackend
    reduction: Reduction
    facts: ModeFacts
    max_tokens: int
    domain: int
    longest: Trace

    def trace(self, tokens: int) -> Trace:
        """Return the routing of the first ``tokens`` tokens of the group."""
        return Trace(self.longest.expert_ids[:tokens], self.longest.weights[:tokens])


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
        if self._live is not None and self._live.key != key:
            self.close()
        if key in self._refused:
            raise AgreedSkip(self._refused[key].code, self._refused[key].reason)
        if key in self._failed:
            raise AgreedFailure(Failure(f"not run: no transport since {self._failed[key]}"))
        if self._live is None:
            self._live = self._construct(cell, backend, largest(key, items))
        return self._live

    def close(self) -> None:
        """Close the live transport on all ranks together."""
        live, self._live = self._live, None
        if live is not None:
            self._run.fate.together("closing the transport", live.backend.close)

    def _recover(self) -> None:
        """After a fault left ranks in different places: new groups, and a new transport when asked."""
        if not self._run.fate.broken_by:
            return
        live, self._live = self._live, None
        since = self._run.fate.broken_by
        if not self._lost and any(self._run.fate.ballot.gather("device health", self._device_fault())):
            self._lost = f"not run: a device's context is lost since {since}"
        if self._lost:
            raise AgreedFailure(Failure(self._lost))
        if live is not None:
            with contextlib.suppress(Exception):  # it may wait for nobody: its groups are gone
                live.backend.close()
        try:
            self._run.fate.together("rebuilding the process groups", self._run.mend)
        except AgreedFailure:
            self._lost = f"not run: the process groups could not be rebuilt since {since}"
            raise

    def _device_fault(self) -> str:
        try:
            self._run.ranks.synchronize()
        except Exception as error:  # a sticky error: every later call on the device would say the same
            return str(error)
        return ""

    def _construct(self, cell: Cell, backend: type[EPBackend], max_tokens: int) -> Live:
        run, key = self._run, cell.key
        made: list[EPBackend] = []

        def construct() -> None:
            try:
                made.append(backend(run.ranks, cell.shape, key.mode, key.precision, max_tokens))
                run.ranks.synchronize()
            except BackendUnavailable as refusal:
                raise Unavailable(refusal.code, refusal.reason) from None

        run.fate.together("process groups", run.ranks.barrier)
        longest = self._routing(cell, max_tokens)
        try:
            run.fate.together("construction", construct)
        except (AgreedSkip, AgreedFailure) as ended:
            for one in made:
                with contextlib.suppress(Exception):
                    one.close()
            if isinstance(ended, AgreedSkip):
                self._refused[key] = ended
            else:
                self._failed[key] = run.pulse.case
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
            max_tokens,
            domain,
            longest,
        )

    def _routing(self, cell: Cell, max_tokens: int) -> Trace:
        run = self._run
        tokens, cache = max_tokens * run.identity.size, run.trace_cache
        traces: list[Trace] = []

        def load() -> str:
            trace = routing.load_trace(cell.shape, SEED, tokens, cache, write=run.identity.rank == 0)
            traces.append(trace)
            return trace.digest

        # Rank 0 writes what is missing before the others read.
        run.fate.together("routing", lambda: load() if run.identity.rank == 0 else None)
        digests = run.fate.together(
            "routing digest", lambda: traces[0].digest if run.identity.rank == 0 else load()
        )
        stop_on_different_routing(digests)
        return traces[0]


def largest(key: Key, items: Iterable[pytest.Item]) -> int:
    """Return the most tokens per rank of the selected cases of a key that run, or its probes' without any."""
    tokens = {True: [0], False: [0]}
    for item in items:
        planned = item.stash.get(PLANNED, None)
        if planned is not None and planned.cell.key == key and planned.skip is None:
            tokens["probe" in getattr(item, "fixturenames", ())].append(planned.cell.tokens)
    return max(tokens[False]) or max(tokens[True])


def stop_on_different_routing(digests: Sequence[str]) -> None:
    """End the session on every rank where two ranks built different routing."""
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            pytest.exit(
                f"rank {rank} built other routing than rank 0 ({digest[:12]} against {digests[0][:12]}): "
                "give every rank the same packages, or clear pytest's cache with --cache-clear",
                returncode=pytest.ExitCode.TESTS_FAILED,
            )
