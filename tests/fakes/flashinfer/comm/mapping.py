"""How ranks divide into parallel groups, as far as the one-sided transport looks."""

from __future__ import annotations


class Mapping:
    """A world of tensor-parallel ranks that holds the experts of one MoE layer."""

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        gpus_per_node: int = 8,
        *,
        cp_size: int = 1,
        tp_size: int = 1,
        pp_size: int = 1,
        moe_tp_size: int = -1,
        moe_ep_size: int = -1,
    ) -> None:
        if moe_tp_size == -1:
            moe_tp_size = tp_size if moe_ep_size == -1 else tp_size // moe_ep_size
        if moe_ep_size == -1:
            moe_ep_size = tp_size // moe_tp_size
        if tp_size * pp_size * cp_size != world_size:
            raise ValueError(
                "world_size must equal to tp_size * pp_size * cp_size, "
                f"but got {world_size} != {tp_size} * {pp_size} * {cp_size}."
            )
        if moe_tp_size * moe_ep_size != tp_size:
            raise ValueError(
                "tp_size must equal to moe_tp_size * moe_ep_size * moe_cluster_size, "
                f"but got {tp_size} != {moe_tp_size} * {moe_ep_size} * 1"
            )
        self.world_size = world_size
        self.rank = rank
        self.gpus_per_node = gpus_per_node
        self.cp_size = cp_size
        self.tp_size = tp_size
        self.pp_size = pp_size
        self.moe_tp_size = moe_tp_size
        self.moe_ep_size = moe_ep_size

    @property
    def tp_rank(self) -> int:
        """Place in the tensor-parallel group."""
        return self.rank % self.tp_size

    @property
    def moe_ep_rank(self) -> int:
        """Place in the expert-parallel group."""
        return self.tp_rank % self.moe_ep_size
