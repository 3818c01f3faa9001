"""NVLinkOneSidedAlltoAll: the successor of MoeAlltoAll, with its own phases and its own release."""

from __future__ import annotations

from typing import Any
from typing import ClassVar

import torch
from torch import Tensor

from .. import _faults
from .._device import require
from .._facts import FACTS
from ..comm import _ops
from ..comm.comm_backend import TorchDistBackend
from ..comm.mapping import Mapping
from ..comm.mnnvl import MnnvlConfig
from ..comm.mnnvl import MnnvlMemory
from ..jit.core import JitSpec
from .config import BootstrapConfig
from .config import MoEEpCommParams
from .config import MoEEpDispatchResult
from .config import NVLinkOneSidedConfig

PLANE_ALIGNMENT = 256


class _OneSided:
    """Dispatch and combine of one EP group, one round at a time."""

    _WORKSPACES: ClassVar[dict[tuple[Any, ...], dict[str, Any]]] = {}

    def __init__(self, bootstrap: BootstrapConfig, params: MoEEpCommParams, config: Any = None) -> None:
        self.config = NVLinkOneSidedConfig() if config is None else config
        comm = self.config.comm_backend or TorchDistBackend(bootstrap.process_group)
        _check_group(comm, bootstrap)
        self.params = params
        self.ep_rank = bootstrap.rank
        self.ep_size = bootstrap.world_size
        self._check_params()
        JitSpec(
            "nvlink_one_sided_alltoall" if not FACTS.moe_alltoall else "mnnvl_moe_alltoall"
        ).build_and_load()
        size = self.ep_size
        mapping = Mapping(size, self.ep_rank, size, tp_size=size, moe_ep_size=size)
        MnnvlMemory.initialize()
        MnnvlMemory.set_comm_from_config(mapping, MnnvlConfig(comm))
        self._state: dict[str, Any] | None = self._acquire(mapping)
        self._round: tuple[int, int] | None = None

    def _check_params(self) -> None:
        params = self.params
        if params.num_experts % self.ep_size:
            raise ValueError(
                f"NVLinkOneSidedAlltoAll requires num_experts ({params.num_experts}) "
                f"divisible by the EP size ({self.ep_size})"
            )
        if params.top_k not in FACTS.top_ks:
            raise ValueError(f"NVLinkOneSidedAlltoAll supports top_k in {FACTS.top_ks}, got {params.top_k}")
        if self.ep_size > FACTS.max_ranks:
            raise ValueError(
                f"NVLinkOneSidedAlltoAll supports at most {FACTS.max_ranks} EP ranks, got {self.ep_size}"
            )

    def _acquire(self, mapping: Mapping) -> dict[str, Any]:
        params, rows = self.params, self.ep_size * self.params.max_tokens_per_rank
        row = params.hidden_size * params.token_dtype.itemsize
        extra = 8 * params.top_k + self.config.extra_payload_bytes_per_token
        start = _ops.align(8 + 20 * self.ep_size + 8 * params.max_tokens_per_rank * params.top_k, 1024)
        region = _ops.align(start + rows * (row + extra) + 4 * PLANE_ALIGNMENT, PLANE_ALIGNMENT)
        size = _ops.align(region + rows * max(row, 2 * params.hidden_size), PLANE_ALIGNMENT)
        key = (self.ep_rank, self.ep_size, start, region, size)
        if key not in self._WORKSPACES:
            memory = MnnvlMemory(mapping, size)
            workspace = memory.as_torch_strided_tensor(torch.uint8)
            _ops.initialize(workspace, self.ep_rank, self.ep_size)
            record = _ops.record_of(workspace)
            record.comm.barrier()
            self._WORKSPACES[key] = {
                "key": key,
                "mnnvl_mem": memory,
                "record": record,
                "start": start,
                "region": region,
                "refcount": 0,
                "round_owner": None,
            }
        self._WORKSPACES[key]["refcount"] += 1
        return self._WORKSPACES[key]

    @classmethod
    def is_platform_supported(cls) -> bool:
        """Whether this rank can run it."""
        return MnnvlMemory.supports_mnnvl()

    def _require_state(self) -> dict[str, Any]:
        if self._state is None:
            raise RuntimeError("NVLinkOneSidedAlltoAll has been destroyed")
        return self._state

    def _dispatch(
        self, payloads: list[Tensor], id_index: int, limit: int | None, limit_name: str
    ) -> tuple[list[Tensor], int]:
        state = self._require_state()
        if state["round_owner"] is self:
            raise RuntimeError("dispatch called twice without an intervening combine")
        if state["round_owner"] is not None:
            raise RuntimeError(
                "another NVLinkOneSidedAlltoAll sharing this workspace has a dispatch awaiting its combine; "
                "instances that share a workspace must run their rounds one after another"
            )
        capacity = self.params.max_tokens_per_rank
        limit = capacity if limit is None else limit
        if not 0 < limit <= capacity:
            raise ValueError(f"{limit_name}={limit} must be in (0, {capacity}]")
        geometry = self._geometry(limit)
        ids = payloads[id_index]
        _ops.check_inputs(ids, payloads, geometry)
        require(ids.shape[0] <= limit, "Local token count exceeds the runtime capacity")
        offsets, end = _ops.plane_offsets(payloads, state["start"], geometry)
        require(end <= state["region"], "Dispatch payload exceeds its workspace capacity")
        received = _ops.dispatch(ids, payloads, state["record"], offsets, geometry)
        _ops.sanitize(received[id_index], state["record"], self.params.invalid_expert_id)
        self._round = (limit, ids.shape[0])
        state["round_owner"] = self
        return [plane.flatten(0, 1) for plane in received], limit

    def _geometry(self, limit: int) -> _ops.Geometry:
        return _ops.Geometry(limit, self.ep_rank, self.ep_size, self.params.top_k, self.params.num_experts)

    def get_combine_input_buffer(self, dtype: torch.dtype) -> Tensor:
        """[ep_size * tokens_per_rank, hidden]: the fixed place that combine reads."""
        if self._round is None:
            raise RuntimeError("get_combine_input_buffer called before dispatch")
        state, rows = self._require_state(), self.ep_size * self._round[0]
        return _ops.view(state["record"], state["region"], (rows, self.params.hidden_size), dtype)

    def combine(
        self, expert_output: Tensor, *, output: Tensor | None = None, active_rank_mask: Tensor | None = None
    ) -> Tensor:
        """[T, hidden]: each token's messages summed over ranks."""
        if self._round is None:
            raise RuntimeError("combine called before dispatch")
        state, (limit, tokens) = self._require_state(), self._round
        if expert_output.dim() not in {2, 3}:
            raise ValueError(f"expert_output must be 2D or 3D, got shape {tuple(expert_output.shape)}")
        payload = expert_output.view(self.ep_size, limit, -1)
        region = _ops.view(state["record"], state["region"], tuple(payload.shape), payload.dtype)
        combined = _ops.combine(payload, tokens, state["record"], region, self._geometry(limit))
        self._round = None
        state["round_owner"] = None
        return combined if output is None else output.copy_(combined)

    def destroy(self) -> None:
        """Give up this instance's share; the last one frees the workspace."""
        state = self._state
        if state is None:
            return
        if state["round_owner"] is self:
            state["round_owner"] = None
        self._state = None
        self._round = None
        state["refcount"] -= 1
        if state["refcount"] == 0:
            self._WORKSPACES.pop(state["key"])
            state.clear()


def _check_group(comm: Any, bootstrap: BootstrapConfig) -> None:
    """The communicator is the EP group, and every rank's platform will do: one verdict for all."""
    if comm.Get_size() != bootstrap.world_size:
        raise ValueError(
            f"MNNVL communicator has {comm.Get_size()} ranks but the EP group has "
            f"world_size={bootstrap.world_size}"
        )
    if comm.Get_rank() != bootstrap.rank:
        raise ValueError(
            f"MNNVL communicator rank {comm.Get_rank()} does not match the EP rank {bootstrap.rank}"
        )
    verdicts = comm.allgather(MnnvlMemory.supports_mnnvl())
    unsupported = [rank for rank, supported in enumerate(verdicts) if not supported]
    if unsupported:
        raise RuntimeError(
            f"NVLink backends are not supported on EP ranks {unsupported}; see their logs for the reason"
        )


def _payloads(
    hidden: Tensor, scale: Tensor | None, ids: Tensor, weights: Tensor | None
) -> tuple[list[Tensor], int]:
    ids = ids if ids.dtype == torch.int32 else ids.to(torch.int32)
    payloads = [hidden] if scale is None else [hidden, scale]
    return payloads + ([ids] if weights is None else [ids, weights]), len(payloads)


def _result(
    received: list[Tensor], id_index: int, limit: int, scaled: bool, weighted: bool
) -> MoEEpDispatchResult:
    lost = _faults.active("missing-payload") is not None
    return MoEEpDispatchResult(
        hidden_states=received[0],
        topk_ids=received[id_index],
        topk_weights=received[id_index + 1] if weighted and not lost else None,
        tokens_per_rank=limit,
        hidden_states_scale=received[1] if scaled else None,
    )


class _OneSided071(_OneSided):
    def dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None = None,
        *,
        hidden_states_scale: Tensor | None = None,
        max_tokens_per_rank: int | None = None,
        eplb_local_stats: Tensor | None = None,
        active_rank_mask: Tensor | None = None,
    ) -> MoEEpDispatchResult:
        payloads, index = _payloads(hidden_states, hidden_states_scale, topk_ids, topk_weights)
        received, limit = self._dispatch(payloads, index, max_tokens_per_rank, "max_tokens_per_rank")
        return _result(received, index, limit, hidden_states_scale is not None, topk_weights is not None)


class _OneSided074(_OneSided):
    def dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None = None,
        *,
        hidden_states_scale: Tensor | None = None,
        runtime_max_tokens_per_rank: int | None = None,
        eplb_local_stats: Tensor | None = None,
        active_rank_mask: Tensor | None = None,
    ) -> MoEEpDispatchResult:
        payloads, index = _payloads(hidden_states, hidden_states_scale, topk_ids, topk_weights)
        name = "runtime_max_tokens_per_rank"
        received, limit = self._dispatch(payloads, index, runtime_max_tokens_per_rank, name)
        return _result(received, index, limit, hidden_states_scale is not None, topk_weights is not None)


NVLinkOneSidedAlltoAll: Any = _OneSided074 if FACTS.name == "0.7.4" else _OneSided071
NVLinkOneSidedAlltoAll.__name__ = NVLinkOneSidedAlltoAll.__qualname__ = "NVLinkOneSidedAlltoAll"
