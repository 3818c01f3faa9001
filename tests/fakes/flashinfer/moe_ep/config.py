"""What a transport of ``moe_ep`` is constructed from, and what its dispatch returns."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from .._facts import FACTS


@dataclass(frozen=True)
class BootstrapConfig:
    """The EP group."""

    world_size: int
    rank: int
    stream: int = 0
    auto_bootstrap: bool = True
    nccl_comm: int | None = None
    process_group: Any = None
    tcp_store: Any = None
    device: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.world_size <= 0:
            raise ValueError(f"world_size must be positive, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} not in [0, {self.world_size})")


@dataclass(frozen=True)
class MoEEpCommParams:
    """Sizes of the MoE layer."""

    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    hidden_size: int
    dtype: torch.dtype | None = None
    dispatch_format: Any = None
    invalid_expert_id: int = -1

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "max_tokens_per_rank", "hidden_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                raise ValueError(f"MoEEpCommParams.{name} must be a positive int")
        if self.top_k > self.num_experts:
            raise ValueError(f"MoEEpCommParams.top_k ({self.top_k}) exceeds num_experts ({self.num_experts})")
        if 0 <= self.invalid_expert_id < self.num_experts:
            raise ValueError(
                "MoEEpCommParams.invalid_expert_id must lie outside "
                f"[0, num_experts={self.num_experts}), got {self.invalid_expert_id}"
            )

    @property
    def token_dtype(self) -> torch.dtype:
        """BF16 unless said otherwise."""
        return torch.bfloat16 if self.dtype is None else self.dtype


@dataclass
class _Config071:
    backend_name: str = "nvlink_one_sided"
    extra_payload_bytes_per_token: int = 0
    eplb_stats_num_experts: int = 0
    enable_rank_mask: bool = False
    use_low_precision_combine: bool = False
    comm_backend: Any = None


@dataclass
class _Config074(_Config071):
    cft: bool | None = None
    cft_max_tokens_for_dispatch: int = 128
    cft_max_tokens_for_combine: int = 128
    lamport: bool | None = None
    lamport_max_tokens: int | None = None
    timeout_sec: int = 300
    enable_pdl: bool | None = None


NVLinkOneSidedConfig: Any = _Config074 if FACTS.name == "0.7.4" else _Config071


@dataclass(frozen=True)
class MoEEpDispatchResult:
    """Flat receive planes [ep_size * tokens_per_rank, columns]."""

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor | None
    tokens_per_rank: int
    hidden_states_scale: Tensor | None = None
    eplb_gathered_stats: Tensor | None = None
