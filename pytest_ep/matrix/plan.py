"""Which cells a backend has here, and why those that cannot run do not."""

from __future__ import annotations

import os
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace
from typing import Protocol

import pytest

from pytest_ep.matrix.cells import MODES
from pytest_ep.matrix.cells import PRECISIONS
from pytest_ep.matrix.cells import Cell
from pytest_ep.matrix.cells import Key
from pytest_ep.matrix.cells import Skip
from pytest_ep.matrix.machine import VISIBLE
from pytest_ep.matrix.machine import Machine
from pytest_ep.matrix.platforms import UNLISTED_EP_SIZES
from pytest_ep.matrix.platforms import Platforms
from pytest_ep.matrix.platforms import Sku
from pytest_ep.matrix.routing import UNIFORM
from pytest_ep.matrix.routing import Routing
from pytest_ep.matrix.shapes import DEFAULT_MODEL
from pytest_ep.matrix.shapes import SHAPES
from pytest_ep.matrix.shapes import Shape
from pytest_ep.matrix.skew import NO_SKEW
from pytest_ep.matrix.skew import TokenSkew
from pytest_ep.ranks.launchers import is_launched

DECODE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PREFILL = (1024, 2048, 4096, 8192)

_EVIDENCE = {
    "measured": "measured there",
    "upstream": "run there upstream",
    "expected": "expected to run there",
}


class Mode(Protocol):
    """What the matrix asks of a transport's mode."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions that it carries."""

    @property
    def token_cap(self) -> int | None:
        """The largest tokens per rank, or None."""

    @property
    def unequal_tokens(self) -> bool:
        """Whether ranks may have different numbers of tokens, some of them none."""

    @property
    def masked_ids(self) -> bool:
        """Whether a choice may be masked."""


class Adapter(Protocol):
    """What the matrix asks of a transport's class, without torch."""

    name: str

    @property
    def modes(self) -> Mapping[str, Mode]:
        """Its modes by name."""

    def unsupported(self, cell: Cell, machine: Machine) -> Skip | None:
        """What the installed wheel or the shape forbids."""

    def ranks_per_device(self, machine: Machine) -> int | None:
        """How many ranks may share one device; None for any number."""


@dataclass(frozen=True)
class Selection:
    """What the options ask for; None means everything that the matrix has.

    ``sku`` is empty for the machine's own, ``all``, or a name; ``tokens`` are per rank.
    """

    sku: str = ""
    ep_sizes: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None
    modes: tuple[str, ...] | None = None
    precisions: tuple[str, ...] | None = None
    shapes: tuple[Shape, ...] = (SHAPES[DEFAULT_MODEL],)
    routing: Routing = UNIFORM
    skew: TokenSkew = NO_SKEW


@dataclass(frozen=True)
class Planned:
    """A cell, and why it is skipped; ``skip`` is None where it runs."""

    cell: Cell
    skip: Skip | None


def plan(
    name: str,
    adapter: Adapter | None,
    selection: Selection,
    machine: Machine,
    platforms: Platforms,
    *,
    ranks: int,
    local_ranks: int,
) -> list[Planned]:
    """The selected cells of a backend, by key and then by ascending tokens.

    ``ranks`` were launched, ``local_ranks`` of them on this node. The result depends on nothing that differs
    between ranks. A key that cannot run is one item with tokens 0. Raises pytest.UsageError for a name that
    is neither in the platforms nor an adapter's, and where recorded routing is too short for what runs.
    """
    if adapter is None and name not in platforms.backends:
        raise pytest.UsageError(f"no backend {name!r}, known: {', '.join(platforms.backends)}")
    planner = _Planner(name, adapter, machine, platforms, ranks, local_ranks)
    planned: list[Planned] = []
    for key, shape in planner.keys(selection):
        planned += planner.cells(key, shape, selection)
    return planned


def known_ep_sizes(
    selection: Selection, machine: Machine, platforms: Platforms, ranks: int
) -> set[int] | None:
    """The EP sizes of the selected SKUs, and of the machine's own the number of ranks launched.

    None where any size will do.
    """
    sizes: set[int] = set()
    for name in _skus(selection, machine, platforms):
        sku = platforms.sku(name)
        if sku.any_ep_size:
            return None
        sizes.update(_ep_sizes(sku, sku.ep_sizes, machine, ranks))
    return sizes


def _ep_sizes(sku: Sku, listed: Iterable[int], machine: Machine, ranks: int) -> set[int]:
    return {*listed, ranks} if sku.name == machine.sku else {*listed}


def _skus(selection: Selection, machine: Machine, platforms: Platforms) -> tuple[str, ...]:
    if selection.sku == "all":
        return tuple(dict.fromkeys((*platforms.skus, machine.sku)))
    return (selection.sku or machine.sku,)


@dataclass(frozen=True)
class _Planner:
    name: str
    adapter: Adapter | None
    machine: Machine
    platforms: Platforms
    ranks: int
    local_ranks: int

    @property
    def listed(self) -> bool:
        """Whether the platforms speak of this backend; of a third party's they do not."""
        return self.name in self.platforms.backends

    def keys(self, selection: Selection) -> Iterable[tuple[Key, Shape]]:
        """Every selected key, in the order of the plan."""
        for sku in self.skus(selection):
            for ep_size in self.ep_sizes(sku, selection):
                for mode in self.modes(selection):
                    for precision in self.precisions(mode, selection):
                        for shape in selection.shapes:
                            yield Key(self.name, sku, ep_size, mode, precision, shape.name), shape

    def skus(self, selection: Selection) -> tuple[str, ...]:
        """The selected SKUs; of a third party's backend, "all" is the machine's, as nobody lists others."""
        if selection.sku == "all" and not self.listed:
            return (self.machine.sku,)
        return _skus(selection, self.machine, self.platforms)

    def ep_sizes(self, sku: str, selection: Selection) -> tuple[int, ...]:
        """The selected EP sizes that the sku has: those listed, and the ranks launched on this machine."""
        known = self.platforms.sku(sku)
        listed = known.ep_sizes if self.listed else UNLISTED_EP_SIZES
        sizes = _ep_sizes(known, listed, self.machine, self.ranks)
        if selection.ep_sizes is None:
            return tuple(sorted(sizes))
        any_size = known.any_ep_size or not self.listed
        return tuple(size for size in selection.ep_sizes if any_size or size in sizes)

    def modes(self, selection: Selection) -> tuple[str, ...]:
        """The selected modes that this backend has."""
        own = set(self.adapter.modes if self.adapter else ())
        if self.listed:
            own.update(self.platforms.modes(self.name))
        return tuple(mode for mode in (selection.modes or MODES) if mode in own)

    def precisions(self, mode: str, selection: Selection) -> tuple[str, ...]:
        """The selected precisions: all of the matrix's, or those that a third party's mode has."""
        if self.listed or not self.adapter:
            return selection.precisions or PRECISIONS
        own = self.adapter.modes[mode].precisions
        return tuple(precision for precision in (selection.precisions or own) if precision in own)

    def cells(self, key: Key, shape: Shape, selection: Selection) -> list[Planned]:
        """One item for a key that cannot run, else one for each of the selected tokens."""
        any_tokens = Cell(key, shape, selection.routing.name, 0, selection.skew)
        refused = self.platforms.refusal(key) if self.listed else None
        adapter = self.adapter
        if adapter is None:
            missing = Skip("no-adapter", f"no adapter for {self.name} has been written yet")
            return [Planned(any_tokens, refused or missing)]
        if skip := refused or _never(adapter, key, shape) or self.not_here(adapter, key):
            return [Planned(any_tokens, skip)]
        if skip := _not_so(adapter, key, selection):
            return [Planned(any_tokens, skip)]
        ladder = selection.tokens or (DECODE if key.mode == "low_latency" else DECODE + PREFILL)
        cells = [replace(any_tokens, tokens=tokens) for tokens in sorted(ladder)]
        unsupported = [adapter.unsupported(cell, self.machine) for cell in cells]
        if all(unsupported):
            return [Planned(any_tokens, unsupported[0])]
        planned = [
            Planned(cell, self.too_many_tokens(adapter, cell) or skip)
            for cell, skip in zip(cells, unsupported, strict=True)
        ]
        for one in planned:
            if one.skip is None and (text := selection.routing.refusal(key.ep_size, one.cell.tokens)):
                raise pytest.UsageError(f"--ep-routing {selection.routing.path}: {text}")
        return planned

    def not_here(self, adapter: Adapter, key: Key) -> Skip | None:
        """Why a key does not run in this launch: another sku, another number of ranks, too few devices."""
        if key.sku != self.machine.sku:
            claim = self.platforms.claim(key)
            known, source = (f" ({_EVIDENCE[claim.evidence]})", claim.source) if claim else ("", "")
            return Skip(
                "other-sku", f"a case of {key.sku}{known}; this machine is {self.machine.sku}", source
            )
        if key.ep_size != self.ranks:
            launch = f"torchrun --nproc-per-node {key.ep_size}"
            needs = f"needs {_counted(key.ep_size, 'rank')}, launched with {self.ranks}"
            return Skip("ep-size", f"{needs}: {launch}")
        devices, each = self.machine.devices, adapter.ranks_per_device(self.machine)
        if each is not None and self.local_ranks > each * devices:
            have = f"{self.local_ranks} ranks on this node have {_counted(devices, 'device')}"
            takes = f"{have}; {self.name} takes {_counted(each, 'rank')} per device"
            return Skip("too-few-devices", f"{takes}{_narrowed(devices)}")
        return None

    def too_many_tokens(self, adapter: Adapter, cell: Cell) -> Skip | None:
        """Why a case has too many tokens per rank, by the platforms or by the adapter."""
        if self.listed and (skip := self.platforms.refusal(cell.key, cell.max_tokens)):
            return skip
        cap = adapter.modes[cell.key.mode].token_cap
        if cap is not None and cell.max_tokens > cap:
            return Skip("token-cap", f"{self.name} {cell.key.mode} takes at most {cap} tokens per rank")
        return None


def _never(adapter: Adapter, key: Key, shape: Shape) -> Skip | None:
    """Why a key runs on no machine: the adapter lacks its mode or precision, or some rank has no expert."""
    mode = adapter.modes.get(key.mode)
    if mode is None or key.precision not in mode.precisions:
        return Skip("no-adapter", f"the adapter for {key.backend} has no {key.mode} {key.precision} yet")
    if key.ep_size > shape.experts:
        return Skip("too-few-experts", f"{shape.name} has {shape.experts} experts for {key.ep_size} ranks")
    return None


def _not_so(adapter: Adapter, key: Key, selection: Selection) -> Skip | None:
    """Why a key that runs does not do so with the tokens or the routing that the options ask for."""
    mode, routing = adapter.modes[key.mode], selection.routing
    if selection.skew.uneven(key.ep_size) and not mode.unequal_tokens:
        reason = f"{key.backend} {key.mode} needs as many tokens on each rank: drop --ep-token-skew"
        return Skip("unequal-tokens", reason)
    if routing.recording is not None and routing.recording.masked and not mode.masked_ids:
        masked = f"masked choices (id -1), which {routing.path} has: record without them"
        return Skip("masked-ids", f"{key.backend} {key.mode} does not define {masked}")
    return None


def _narrowed(devices: int) -> str:
    """Say what to do where the launcher may have left each rank GPUs of its own alone."""
    by_torchrun = "RANK" in os.environ or not is_launched(os.environ)
    if by_torchrun and not any(name in os.environ for name in VISIBLE):
        return ""
    return (
        f"; each rank sees {_counted(devices, 'GPU')} of its host: if that has more, launch with srun's "
        "--gpu-bind=none, or without CUDA_VISIBLE_DEVICES for each rank"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
