"""What MoeAlltoAll does in every release that has it; the releases differ in their signatures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from typing import ClassVar

import torch
from torch import Tensor

from .. import _faults
from .._device import require
from .._facts import FACTS
from ..jit.core import JitSpec
from . import _ops
from .mapping import Mapping
from .mnnvl import MnnvlConfig
from .mnnvl import MnnvlMemory

METAINFO = (
    "FLAG_VAL_OFFSET_INDEX",
    "LOCAL_TOKEN_COUNTER_OFFSET_INDEX",
    "SEND_COUNTERS_OFFSET_INDEX",
    "RECV_COUNTERS_OFFSET_INDEX",
    "DISPATCH_COMPLETION_FLAGS_OFFSET_INDEX",
    "COMBINE_COMPLETION_FLAGS_OFFSET_INDEX",
    "TOPK_TARGET_RANKS_OFFSET_INDEX",
    "TOPK_SEND_INDICES_OFFSET_INDEX",
    "PAYLOAD_DATA_OFFSET_INDEX",
    "NUM_METAINFO_FIELDS",
)
MAX_TOP_K = 22


class _Modules:
    """The loaded kernel module of this process."""

    loaded: Any = None


def get_moe_alltoall_module() -> Any:
    """Build the module on first use and load it."""
    if _Modules.loaded is None:
        _Modules.loaded = JitSpec("mnnvl_moe_alltoall").build_and_load()
    return _Modules.loaded


def aux_size(ep_size: int, tokens: int) -> int:
    """Bytes that flags, counters and routes take in front of the payloads."""
    offset = _ops.align(8 + 2 * 4 * ep_size)
    offset = _ops.align(_ops.align(offset + 4 * ep_size) + 4 * ep_size)
    routes = 4 * tokens * MAX_TOP_K
    return _ops.align(_ops.align(offset + routes) + routes)


def workspace_size(ep_size: int, tokens: int, dispatch_bytes: int, combine_bytes: int) -> int:
    """Bytes per rank for ``tokens`` tokens of the given payload bytes; needs the module."""
    get_moe_alltoall_module()
    rows = ep_size * tokens
    return aux_size(ep_size, tokens) + _ops.align(rows * dispatch_bytes) + _ops.align(rows * combine_bytes)


@dataclass
class A2AState:
    """Where the object stands between dispatch and combine."""

    phase: str = "idle"
    local_num_tokens: int | None = None
    combine_payload_offset: int | None = None


class BaseAlltoAll:
    """One-sided all-to-all over a workspace that is cached for the life of the process."""

    _WORKSPACE_CACHE: ClassVar[dict[tuple[Any, ...], dict[str, Any]]] = {}
    _METAINFO_INDEX: ClassVar[dict[str, int] | None] = None

    @classmethod
    def _init_constants(cls) -> None:
        get_moe_alltoall_module()
        cls._METAINFO_INDEX = {name: index for index, name in enumerate(METAINFO)}

    def _construct(
        self,
        mapping: Mapping,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        size: int | None,
        hidden_size: int | None,
        config: MnnvlConfig | None,
        more_key: tuple[Any, ...] = (),
    ) -> None:
        self._init_constants()
        if size is None:
            assert hidden_size is not None, (
                "hidden_size must be provided if workspace_size_per_rank is not provided"
            )
            row = 2 * hidden_size
            size = workspace_size(mapping.moe_ep_size, max_num_tokens, row + 8 * top_k, row)
        MnnvlMemory.initialize()
        if config:
            MnnvlMemory.set_comm_from_config(mapping, config)
        if not isinstance(top_k, int) or top_k <= 0:
            raise ValueError("top_k must be a positive int")
        if not isinstance(num_experts, int) or num_experts <= 0:
            raise ValueError("num_experts must be a positive int")
        self.workspace_size_per_rank = size
        self.max_num_tokens = max_num_tokens
        self.ep_size = mapping.moe_ep_size
        self.ep_rank = mapping.moe_ep_rank
        self.top_k = top_k
        self.num_experts = num_experts
        self._key = (size, self.ep_rank, self.ep_size, max_num_tokens, *more_key)
        self._WORKSPACE = self._get_workspace(mapping)
        self.mnnvl_mem: MnnvlMemory = self._WORKSPACE["mnnvl_mem"]
        self.workspace: Tensor = self._WORKSPACE["workspace"]
        self.metainfo: Tensor = self._WORKSPACE["metainfo"]
        self._state = A2AState()

    def _get_workspace(self, mapping: Mapping) -> dict[str, Any]:
        if self._key not in self._WORKSPACE_CACHE:
            memory = MnnvlMemory(mapping, self.workspace_size_per_rank)
            workspace = memory.as_torch_strided_tensor(torch.uint8)
            _ops.initialize(workspace, self.ep_rank, self.ep_size)
            if FACTS.barrier:
                _ops.record_of(workspace).comm.barrier()
            metainfo = torch.zeros(len(METAINFO) - 1, dtype=torch.int64)
            entry = {"mnnvl_mem": memory, "workspace": workspace, "metainfo": metainfo}
            self._WORKSPACE_CACHE[self._key] = entry
        return self._WORKSPACE_CACHE[self._key]

    def _reset_workspace(self) -> None:
        """Forget the workspace; its memory goes with this object."""
        del self._WORKSPACE
        del self._WORKSPACE_CACHE[self._key]
        self._state.phase = "deleted"

    def _geometry(self, runtime_max: int) -> _ops.Geometry:
        assert runtime_max <= self.max_num_tokens, "runtime_max_tokens_per_rank exceeds max_num_tokens"
        return _ops.Geometry(runtime_max, self.ep_rank, self.ep_size, self.top_k, self.num_experts)

    def _dispatch(
        self, ids: Tensor, payloads: list[Tensor], runtime_max: int, invalid: int | None, index: int | None
    ) -> list[Tensor]:
        assert self._state.phase == "idle", "dispatch called twice without combine"
        geometry = self._geometry(runtime_max)
        record = _ops.record_of(self.workspace)
        _ops.check_inputs(ids, payloads, geometry)
        offsets, end = _ops.plane_offsets(payloads, aux_size(self.ep_size, self.max_num_tokens), geometry)
        require(
            end <= len(record.own),
            f"workspace size per rank insufficient, need {end} bytes but has {len(record.own)}",
        )
        received = _ops.dispatch(ids, payloads, record, offsets, geometry)
        self._state = A2AState("dispatched", ids.shape[0], _ops.align(end))
        if invalid is not None:
            assert index is not None, "expert_id_payload_index required when invalid_token_expert_id is set"
            _ops.sanitize(received[index], record, invalid)
        if _faults.active("missing-payload") is not None:
            return received[:-1]
        if _faults.active("bare-tensor") is not None:
            return received[0]  # type: ignore[return-value]  # that is the fault
        return received

    def _combine(self, payload: Tensor, runtime_max: int, in_workspace: bool) -> Tensor:
        assert self._state.phase == "dispatched", "combine called before successful dispatch"
        geometry = self._geometry(runtime_max)
        require(payload.is_contiguous(), "payload must be contiguous")
        require(payload.dim() == 3, "payload must be [ep_size, runtime_max_tokens_per_rank, hidden]")
        expected = (self.ep_size, runtime_max)
        require(payload.shape[:2] == expected, f"payload shape {payload.shape[:2]} vs. {expected}")
        region = self._region(runtime_max, payload.shape[2], payload.dtype)
        if in_workspace:
            require(
                payload.data_ptr() == region.data_ptr(),
                "payload_in_workspace is True but tensor pointer mismatch",
            )
        assert self._state.local_num_tokens is not None
        record = _ops.record_of(self.workspace)
        output = _ops.combine(payload, self._state.local_num_tokens, record, region, geometry)
        self._state = A2AState()
        return output

    def _region(self, runtime_max: int, hidden: int, dtype: torch.dtype) -> Tensor:
        record, offset = _ops.record_of(self.workspace), self._state.combine_payload_offset
        assert offset is not None
        size = self.ep_size * runtime_max * hidden * dtype.itemsize
        require(offset + size <= len(record.own), "workspace insufficient for combine payload region")
        return _ops.view(record, offset, (self.ep_size, runtime_max, hidden), dtype)

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> Tensor:
        """[ep_size, runtime_max, hidden]: where combine reads."""
        if self._state.phase != "dispatched":
            raise RuntimeError("get_combine_payload_tensor_in_workspace called before successful dispatch")
        return self._region(runtime_max_tokens_per_rank, hidden_size, dtype)
