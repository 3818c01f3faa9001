"""The two classes under which FlashInfer's one-sided transport goes, as one interface."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar
from typing import Protocol

from pytest_ep.backends.base import BackendUnavailable
from pytest_ep.matrix.shapes import Shape

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_ep.ranks.group import Ranks

INVALID = -1
"""Written over the ids of every receive slot that dispatch did not fill."""


class Wire(Protocol):
    """One mapped workspace. Dispatch and combine alternate; ``limit`` is the most tokens of any rank.

    Planes lie in the workspace, one for each source rank: R of ``limit`` slots. A slot's place says nothing
    about which token is in it.
    """

    module: ClassVar[str]
    upstream: ClassVar[str]
    kernels: ClassVar[str]
    """The function in ``flashinfer.jit.comm`` that specifies the kernel module."""

    def __init__(self, ranks: Ranks, shape: Shape, max_tokens: int) -> None:
        """Map the workspace, on all ranks together; peers may not write before all have come out of this."""

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, limit: int) -> Sequence[Tensor | None]:
        """Exchange tokens [T, H] BF16, ids [T, K] int32, weights [T, K] FP32; return the planes of each."""

    def region(self, limit: int) -> Tensor:
        """[R, limit, H] BF16, where combine reads: legal after dispatch, at one address for each limit."""

    def combine(self, region: Tensor, limit: int) -> Tensor:
        """[T, H] BF16: the messages of the last dispatch's tokens, reduced."""

    def release(self) -> None:
        """Unmap, on this rank, once no kernel of any rank runs."""


class AlltoAllWire:
    """``MoeAlltoAll``, up to 0.7.3."""

    module: ClassVar[str] = "flashinfer.comm.trtllm_moe_alltoall"
    upstream: ClassVar[str] = "MoeAlltoAll"
    kernels: ClassVar[str] = "gen_moe_alltoall_module"

    def __init__(self, ranks: Ranks, shape: Shape, max_tokens: int) -> None:
        from flashinfer.comm.mapping import Mapping
        from flashinfer.comm.mnnvl import MnnvlConfig

        self._hidden = shape.hidden
        mapping = Mapping(
            world_size=ranks.size,
            rank=ranks.rank,
            gpus_per_node=ranks.identity.local_size,
            tp_size=ranks.size,
            moe_ep_size=ranks.size,
        )
        construct = getattr(importlib.import_module(self.module), self.upstream)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._alltoall = construct(
                mapping,
                max_num_tokens=max_tokens,
                top_k=shape.top_k,
                num_experts=shape.experts,
                hidden_size=shape.hidden,
                mnnvl_config=MnnvlConfig(comm_backend=communicator(ranks)),
            )

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, limit: int) -> Sequence[Tensor | None]:
        """As Wire says; the planes are [R, limit, columns]."""
        planes: Sequence[Tensor | None] = self._alltoall.dispatch(
            ids, [x, ids, weights], limit, invalid_token_expert_id=INVALID, expert_id_payload_index=1
        )
        return planes

    def region(self, limit: int) -> Tensor:
        """As Wire says."""
        import torch

        region: Tensor = self._alltoall.get_combine_payload_tensor_in_workspace(
            limit, self._hidden, torch.bfloat16
        )
        return region

    def combine(self, region: Tensor, limit: int) -> Tensor:
        """As Wire says."""
        combined: Tensor = self._alltoall.combine(region, limit, payload_in_workspace=True)
        return combined

    def release(self) -> None:
        """As Wire says."""
        # Upstream keeps workspaces by size alone: the next one would be served this one, whatever the group.
        alltoall = self._alltoall
        del self._alltoall
        alltoall._reset_workspace()


class OneSidedWire:
    """``NVLinkOneSidedAlltoAll``, its successor, which alone is left in 0.7.4."""

    module: ClassVar[str] = "flashinfer.moe_ep"
    upstream: ClassVar[str] = "NVLinkOneSidedAlltoAll"
    kernels: ClassVar[str] = "gen_nvlink_one_sided_alltoall_module"

    def __init__(self, ranks: Ranks, shape: Shape, max_tokens: int) -> None:
        moe_ep = importlib.import_module(self.module)
        self._ranks = ranks.size
        # Left to itself it takes other kernels, with another reduction, for some T on some devices.
        config = moe_ep.NVLinkOneSidedConfig(cft=False, lamport=False, comm_backend=communicator(ranks))
        params = moe_ep.MoEEpCommParams(
            num_experts=shape.experts,
            top_k=shape.top_k,
            max_tokens_per_rank=max_tokens,
            hidden_size=shape.hidden,
            invalid_expert_id=INVALID,
        )
        bootstrap = moe_ep.BootstrapConfig(world_size=ranks.size, rank=ranks.rank)
        self._alltoall = getattr(moe_ep, self.upstream)(bootstrap, params, config)

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, limit: int) -> Sequence[Tensor | None]:
        """As Wire says; the planes are [R * limit, columns]."""
        result = self._alltoall.dispatch(x, ids, weights, runtime_max_tokens_per_rank=limit)
        return (result.hidden_states, result.topk_ids, result.topk_weights)

    def region(self, limit: int) -> Tensor:
        """As Wire says."""
        import torch

        flat: Tensor = self._alltoall.get_combine_input_buffer(torch.bfloat16)
        return flat.view(self._ranks, limit, -1)

    def combine(self, region: Tensor, limit: int) -> Tensor:
        """As Wire says."""
        combined: Tensor = self._alltoall.combine(region)
        return combined

    def release(self) -> None:
        """As Wire says."""
        alltoall = self._alltoall
        del self._alltoall
        alltoall.destroy()


def choose() -> type[Wire]:
    """The wire whose class the wheel has. Raises BackendUnavailable where it has neither."""
    wires: tuple[type[Wire], ...] = (AlltoAllWire, OneSidedWire)
    for wire in wires:
        try:
            module = importlib.import_module(wire.module)
        except ModuleNotFoundError as missing:
            if not (missing.name or "").startswith("flashinfer"):
                raise
        else:
            if hasattr(module, wire.upstream):
                return wire
    names = " nor ".join(f"{wire.module}.{wire.upstream}" for wire in wires)
    raise BackendUnavailable("flashinfer-no-transport", f"this flashinfer has neither {names}")


def communicator(ranks: Ranks) -> Any:
    """A communicator of the wheel's own kind over exactly the EP group.

    Unlike the wheel's bridge from torch.distributed it makes no process group and holds none: a rank that
    abandons the groups frees its peers, and the wheel, as it unmaps, learns the size after they are gone.
    Raises TypeError where the wheel asks for a method that it does not have.
    """
    import torch.distributed as dist
    from flashinfer.comm.mnnvl import CommBackend

    class EPGroup(CommBackend):  # type: ignore[misc]
        def Get_rank(self) -> int:
            return ranks.rank

        def Get_size(self) -> int:
            return ranks.size

        def allgather(self, data: Any) -> list[Any]:
            gathered: list[Any] = [None] * ranks.size
            dist.all_gather_object(gathered, data, group=ranks.control)
            return gathered

        def bcast(self, data: Any, root: int) -> Any:
            held = [data]
            dist.broadcast_object_list(held, src=root, group=ranks.control)
            return held[0]

        def barrier(self) -> None:
            ranks.barrier()

        def Split(self, color: int, key: int) -> Any:
            # One color and keys in order of rank: the mapping has no dimension but the EP group's.
            return self

    asked = {name for name in dir(CommBackend) if not name.startswith("_")}
    if missing := sorted(asked - set(vars(EPGroup))):
        raise TypeError(f"this flashinfer's communicators have {', '.join(missing)}, which ours lacks")
    return EPGroup()
