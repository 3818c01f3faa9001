"""FlashInfer's one-sided all-to-all over NVLink: ranks store tokens into one another's memory."""

from __future__ import annotations

import contextlib
import gc
import importlib
import time
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import ClassVar

from pytest_ep.backends import flashinfer_setup
from pytest_ep.backends import flashinfer_wheel
from pytest_ep.backends import flashinfer_wires
from pytest_ep.backends.base import BackendUnavailable
from pytest_ep.backends.base import EPBackend
from pytest_ep.backends.base import ModeFacts
from pytest_ep.backends.base import Received
from pytest_ep.backends.construction import ConstructionFault
from pytest_ep.backends.construction import agree
from pytest_ep.backends.flashinfer_wheel import Wheel
from pytest_ep.backends.flashinfer_wires import INVALID
from pytest_ep.backends.flashinfer_wires import Wire
from pytest_ep.matrix.cells import Cell
from pytest_ep.matrix.cells import Skip
from pytest_ep.matrix.machine import Machine
from pytest_ep.matrix.shapes import Shape

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_ep.ranks.group import Ranks
    from pytest_ep.workload.problem import Problem


@dataclass(slots=True)
class Exchange:
    """An open pair: the planes of tokens, ids and weights, the most tokens of any rank, the filled slots.

    ``slots`` [N] are indices into the planes laid end to end, known once they have been read.
    """

    planes: Sequence[Tensor | None]
    limit: int
    slots: Tensor | None = None


class FlashInferEP(EPBackend):
    """Messages are summed by the receiving rank, one for each rank that a token went to.

    Which slot of a source's plane a token lands in is the sender's choice, and slots that nothing landed in
    hold what was there before. Ids arrive global, of all ranks' experts.
    """

    name: ClassVar[str] = "flashinfer_ep"
    modes: ClassVar[Mapping[str, ModeFacts]] = {
        "normal": ModeFacts(
            layout="token-rank",
            weighting="unweighted-rank-sum",
            index_dtype="int32",
            strict_pairs=True,
            graph_safe=True,
            precisions=("bf16",),
        )
    }
    needs_device: ClassVar[bool] = True

    @classmethod
    def unsupported(cls, cell: Cell, machine: Machine) -> Skip | None:
        """What the machine lacks, or the wheel forbids by its version, its files and its companions."""
        if cls.needs_device and not machine.devices:
            reason = "the transport consists of CUDA kernels and this machine has no GPU: torch_a2a runs here"
            return Skip("needs-accelerator", reason)
        return flashinfer_wheel.refusal(cls.wheel(), cell.shape, cell.key.ep_size, cell.max_tokens)

    @classmethod
    def ranks_per_device(cls, machine: Machine) -> int | None:
        """Any number: kernels of ranks that share a device take turns, and only their times are wrong."""
        return None

    @classmethod
    def wheel(cls) -> Wheel | None:
        """The installation that is tested."""
        return flashinfer_wheel.installed()

    def __init__(self, ranks: Ranks, shape: Shape, mode: str, precision: str, max_tokens: int) -> None:
        """Agree on the wheel, try peer access, build, map, and exchange one token: a fault is setup's."""
        self._ranks = ranks
        self._shape = shape
        self._wire: Wire | None = None
        self._regions: dict[int, Tensor] = {}
        self._planes: dict[int, list[Tensor]] = {}
        self._open = 0
        self._closed = False
        began = time.perf_counter()
        wire = self._agree_on_wheel()
        agree(ranks, "peer access", lambda: flashinfer_setup.check_peers(ranks))
        free = self._free_memory()
        built = self._build(wire)

        def map_workspace() -> None:
            self._wire = flashinfer_setup.granted(lambda: wire(ranks, shape, max_tokens))

        try:
            # No peer writes into a workspace before its owner has come here: agreeing is a barrier.
            agree(ranks, "mapping the workspace", map_workspace, collective=True)
            first = agree(ranks, "first pair", lambda: self._first_pair(max_tokens), collective=True)
        except (BackendUnavailable, ConstructionFault):
            self.close()
            raise
        self.facts = {
            "device_memory_bytes": float(free - self._free_memory()),
            "build_s": built,
            "construction_s": time.perf_counter() - began - built,
            "first_pair_s": max(first),
        }

    def dispatch(self, problem: Problem) -> Exchange:
        """Store each token, with its ids and weights, once into the memory of each rank that it goes to."""
        return self._dispatch(problem.x, problem.expert_ids, problem.weights, problem.max_tokens)

    def receive(self, problem: Problem, handle: Exchange) -> Received:
        """Keep the filled slots, mask what belongs to other ranks and count what belongs to this one."""
        import torch

        tokens, ids, weights = self._flat(handle)
        slots = self._slots(handle)
        first, end = self._shape.owned(self._ranks.size)[self._ranks.rank :][:2]
        ids = ids[slots].long()
        local = (ids >= first) & (ids < end)
        return Received(
            tokens=tokens[slots],
            expert_ids=ids.where(local, -1),
            # Selected, not multiplied: what other ranks' weights are does not matter.
            weights=weights[slots].where(local, 0.0),
            expert_counts=torch.bincount(ids[local] - first, minlength=end - first),
        )

    def stage(self, problem: Problem, handle: Exchange, messages: Tensor) -> Tensor:
        """Write each message into the slot in which its token was received."""
        region = self._regions[handle.limit]
        region.view(-1, self._shape.hidden)[self._slots(handle)] = messages
        return region

    def stage_constant(self, problem: Problem, rows: Tensor) -> Tensor:
        """Fill each source's plane with its row."""
        if problem.max_tokens not in self._regions:  # only a dispatch shows where combine will read
            handle = self.dispatch(problem)
            self.combine(problem, handle, self._regions[handle.limit])
        region = self._regions[problem.max_tokens]
        region.copy_(rows[:, None])
        return region

    def constant_planes(self, problem: Problem) -> int:
        """One for each source rank."""
        return problem.ep_size

    def combine(self, problem: Problem, handle: Exchange, staged: Tensor) -> Tensor:
        """Fetch the messages from where they were staged and add them."""
        return self._combine(staged, handle.limit)

    def poison(self, problem: Problem) -> bool:
        """Fill the planes that the last dispatch of this size filled, and the region that combine reads."""
        region = self._regions.get(problem.max_tokens)
        if region is not None:
            region.fill_(float("nan"))
        for plane in self._planes.get(problem.max_tokens, ()):
            plane.fill_(float("nan") if plane.is_floating_point() else problem.shape.experts)
        return region is not None

    def close(self) -> None:
        """Unmap the workspace once every rank's kernels are done; also after the process groups are gone."""
        if self._closed:
            return
        self._closed = True
        try:
            self._drain()
            self._ranks.synchronize()
        finally:
            self._ranks.ballot.gather("closing flashinfer_ep", None)
            wire, self._wire = self._wire, None
            self._regions.clear()
            self._planes.clear()
            if wire is not None:
                wire.release()
            del wire
            gc.collect()

    def _agree_on_wheel(self) -> type[Wire]:
        """Import it everywhere and find the same installation everywhere."""
        wheel = self.wheel()
        assert wheel is not None, "a cell without a wheel carries a skip mark"
        assert wheel.version is not None
        own, version = wheel.versions[flashinfer_wheel.PYTHON], wheel.version

        def look() -> Mapping[str, str]:
            said = flashinfer_setup.imported(lambda: importlib.import_module("flashinfer").__version__)
            if not flashinfer_wheel.is_same(str(said), version):
                reason = f"flashinfer {said} is imported where {own} is installed: remove one of the two"
                raise BackendUnavailable("flashinfer-mixed", reason)
            flashinfer_setup.imported(flashinfer_wires.choose)
            return wheel.versions

        versions = agree(self._ranks, "importing flashinfer", look)
        for rank, other in enumerate(versions):
            if other != versions[0]:
                differ = ", ".join(
                    f"{name} {other.get(name)} against {versions[0].get(name)}"
                    for name in sorted({*other, *versions[0]})
                    if other.get(name) != versions[0].get(name)
                )
                reason = f"rank {rank} has {differ} of rank 0: install the same on every node"
                raise BackendUnavailable("flashinfer-mixed", reason)
        self.versions = wheel.versions
        self.reduction = flashinfer_wheel.reduction(version)
        if self._ranks.rank == 0 and not flashinfer_wheel.is_read(version):
            self._ranks.say(
                f"flashinfer {own} is a development build: {self.reduction} is a guess by its order"
            )
        return flashinfer_wires.choose()

    def _build(self, wire: type[Wire]) -> float:
        """Build the kernels on one rank of each host; return the seconds of the slowest."""
        ranks, version = self._ranks, self.versions[flashinfer_wheel.PYTHON]
        what = f"building the FlashInfer {version} kernels"
        with ranks.pulse.long_phase(what, flashinfer_setup.BUILD_LIMIT):
            built = agree(ranks, what, lambda: flashinfer_setup.build_kernels(ranks, wire.kernels, version))
        return float(max(built))

    def _first_pair(self, max_tokens: int) -> float:
        """Exchange one token a rank and wait for the device; return the seconds."""
        import torch

        shape, device = self._shape, self._ranks.device
        spread = torch.arange(shape.top_k, dtype=torch.int32, device=device) * shape.experts // shape.top_k
        began = time.perf_counter()
        handle = self._dispatch(
            torch.ones(1, shape.hidden, dtype=torch.bfloat16, device=device),
            spread.to(torch.int32)[None],
            torch.ones(1, shape.top_k, device=device),
            max_tokens,
        )
        self._combine(self._regions[handle.limit], handle.limit)
        self._ranks.synchronize()
        return time.perf_counter() - began

    def _dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, limit: int) -> Exchange:
        assert self._wire is not None
        self._drain()
        self._open = limit
        try:
            planes = self._wire.dispatch(x, ids, weights, limit)
            if limit not in self._regions:
                self._regions[limit] = self._wire.region(limit)
            self._planes[limit] = [plane for plane in planes if plane is not None]
        except Exception:
            self._drain()
            raise
        return Exchange(planes, limit)

    def _combine(self, region: Tensor, limit: int) -> Tensor:
        assert self._wire is not None
        try:
            combined = self._wire.combine(region, limit)
        except Exception:
            self._drain()
            raise
        self._open = 0
        return combined

    def _drain(self) -> None:
        """Take part in the combine of a pair that an exception left open: the other ranks may wait in it."""
        limit, self._open = self._open, 0
        if limit and self._wire is not None:
            with contextlib.suppress(Exception):  # never dispatched, or the device is lost
                self._wire.combine(self._wire.region(limit), limit)

    def _flat(self, handle: Exchange) -> tuple[Tensor, Tensor, Tensor]:
        """Planes end to end, [R * limit, columns] of each payload. Raises RuntimeError for anything else."""
        import torch

        rows, top_k = self._ranks.size * handle.limit, self._shape.top_k
        wanted = [
            ((rows, self._shape.hidden), torch.bfloat16),
            ((rows, top_k), torch.int32),
            ((rows, top_k), torch.float32),
        ]
        flat = [plane.flatten(0, -2) for plane in handle.planes if plane is not None and plane.dim() > 1]
        found = [(tuple(plane.shape), plane.dtype) for plane in flat]
        if found != wanted:
            raise RuntimeError(f"dispatch returned planes {found}, expected {wanted}")
        return flat[0], flat[1], flat[2]

    def _slots(self, handle: Exchange) -> Tensor:
        if handle.slots is None:
            handle.slots = (self._flat(handle)[1] != INVALID).any(dim=1).nonzero()[:, 0]
        return handle.slots

    def _free_memory(self) -> int:
        """Bytes that no rank has taken of this rank's device."""
        import torch

        if self._ranks.device.type != "cuda":
            return 0
        return torch.cuda.mem_get_info(self._ranks.device)[0]
