"""MoeAlltoAll with the signatures of the imitated release."""

from __future__ import annotations

from typing import Any
from typing import ClassVar

from torch import Tensor
from typing_extensions import deprecated

from .._facts import FACTS
from ..tllm_enums import SfLayout
from ._alltoall import BaseAlltoAll
from ._alltoall import get_moe_alltoall_module
from ._alltoall import workspace_size
from .mapping import Mapping
from .mnnvl import MnnvlConfig

__all__ = ["MoeAlltoAll", "get_moe_alltoall_module", "moe_a2a_get_workspace_size_per_rank"]
if not FACTS.moe_alltoall:
    raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)


class _Alltoall068(BaseAlltoAll):
    def __init__(
        self,
        mapping: Mapping,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: MnnvlConfig | None = None,
    ) -> None:
        self._construct(
            mapping,
            max_num_tokens,
            top_k,
            num_experts,
            workspace_size_per_rank,
            hidden_size,
            mnnvl_config,
            self._more_key(),
        )

    def _more_key(self) -> tuple[Any, ...]:
        return ()

    def dispatch(
        self,
        token_selected_experts: Tensor,
        input_payloads: list[Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
    ) -> list[Tensor]:
        return self._dispatch(
            token_selected_experts,
            input_payloads,
            runtime_max_tokens_per_rank,
            invalid_token_expert_id,
            expert_id_payload_index,
        )

    def combine(
        self, payload: Tensor, runtime_max_tokens_per_rank: int, payload_in_workspace: bool = False
    ) -> Tensor:
        return self._combine(payload, runtime_max_tokens_per_rank, payload_in_workspace)


class _Alltoall0614(_Alltoall068):
    def combine(
        self,
        payload: Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        output_dtype: Any = None,
        output_scales: Tensor | None = None,
        output_scalar_scale: float = 1.0,
        sf_layout: SfLayout = SfLayout.layout_linear,
    ) -> Tensor:
        return self._combine(payload, runtime_max_tokens_per_rank, payload_in_workspace)


class _Alltoall0616(_Alltoall0614):
    def __init__(
        self,
        mapping: Mapping,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: MnnvlConfig | None = None,
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
    ) -> None:
        super().__init__(
            mapping,
            max_num_tokens,
            top_k,
            num_experts,
            workspace_size_per_rank,
            hidden_size,
            mnnvl_config,
        )

    def _more_key(self) -> tuple[Any, ...]:
        return (0,)

    def dispatch(
        self,
        token_selected_experts: Tensor,
        input_payloads: list[Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
        eplb_local_stats: Tensor | None = None,
        active_rank_mask: Tensor | None = None,
    ) -> list[Tensor]:
        return super().dispatch(
            token_selected_experts,
            input_payloads,
            runtime_max_tokens_per_rank,
            invalid_token_expert_id,
            expert_id_payload_index,
        )

    def combine(
        self,
        payload: Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        output_dtype: Any = None,
        output_scales: Tensor | None = None,
        output_scalar_scale: float = 1.0,
        sf_layout: SfLayout = SfLayout.layout_linear,
        output: Tensor | None = None,
        *,
        use_low_precision: bool = False,
        active_rank_mask: Tensor | None = None,
    ) -> Tensor:
        combined = self._combine(payload, runtime_max_tokens_per_rank, payload_in_workspace)
        return combined if output is None else output.copy_(combined)


@deprecated("MoeAlltoAll is deprecated; use flashinfer.moe_ep.NVLinkOneSidedAlltoAll.")
class _Alltoall071(_Alltoall0616):
    def __init__(
        self,
        mapping: Mapping,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: MnnvlConfig | None = None,
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
        *,
        backend: str = "trtllm",
    ) -> None:
        if backend != "trtllm":
            raise ValueError('backend="cake" requires compute capability 10.0 or 10.3, got (9, 0)')
        super().__init__(
            mapping,
            max_num_tokens,
            top_k,
            num_experts,
            workspace_size_per_rank,
            hidden_size,
            mnnvl_config,
        )

    def _more_key(self) -> tuple[Any, ...]:
        return (0, "trtllm")


class _Classes:
    by_release: ClassVar[dict[str, type[_Alltoall068]]] = {
        "0.6.8": _Alltoall068,
        "0.6.14": _Alltoall0614,
        "0.6.16": _Alltoall0616,
        "0.7.1": _Alltoall071,
    }


MoeAlltoAll: Any = _Classes.by_release[FACTS.name]
MoeAlltoAll.__name__ = MoeAlltoAll.__qualname__ = "MoeAlltoAll"

if FACTS.rank_mask:

    def moe_a2a_get_workspace_size_per_rank(
        ep_size: int,
        max_num_tokens: int,
        total_dispatch_payload_size_per_token: int,
        combine_payload_size_per_token: int,
        eplb_stats_num_experts: int = 0,
    ) -> int:
        """Bytes per rank; builds the module."""
        return workspace_size(
            ep_size, max_num_tokens, total_dispatch_payload_size_per_token, combine_payload_size_per_token
        )

else:

    def moe_a2a_get_workspace_size_per_rank(  # type: ignore[misc]  # the signature of the older releases
        ep_size: int,
        max_num_tokens: int,
        total_dispatch_payload_size_per_token: int,
        combine_payload_size_per_token: int,
    ) -> int:
        """Bytes per rank; builds the module."""
        return workspace_size(
            ep_size, max_num_tokens, total_dispatch_payload_size_per_token, combine_payload_size_per_token
        )
