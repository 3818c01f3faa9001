"""The baseline: torch.distributed all-to-all, each token sent once per destination rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import ClassVar

from pytest_ep.backends.base import EPBackend
from pytest_ep.backends.base import ModeFacts
from pytest_ep.backends.base import Received
from pytest_ep.matrix.shapes import Shape

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_ep.ranks.group import Ranks
    from pytest_ep.workload.problem import Problem


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one dispatch leaves for its combine: row counts per rank, and which token each sent row was."""

    sent: list[int]
    received: list[int]
    order: Tensor
    tokens: Tensor
    metadata: Tensor


class TorchA2A(EPBackend):
    """All-to-all of torch.distributed over NCCL or gloo; messages are summed in FP32 and narrowed once.

    The layout, the count exchange and the host's read of the counts depend on this step's routing, so they
    are part of dispatch.
    """

    name: ClassVar[str] = "torch_a2a"
    maturity: ClassVar[str] = "baseline"
    modes: ClassVar[Mapping[str, ModeFacts]] = {
        "normal": ModeFacts(
            layout="token-rank",
            weighting="unweighted-rank-sum",
            index_dtype="int64",
            strict_pairs=False,
            graph_safe=False,
            precisions=("bf16",),
            masked_ids=True,
        )
    }

    def __init__(self, ranks: Ranks, shape: Shape, mode: str, precision: str, max_tokens: int) -> None:
        """Place the owner table and connect every pair of ranks once."""
        import torch

        self.reduction = "rank-sum-fp32"
        self.versions = {"torch": torch.__version__}
        self._ranks = ranks
        self._shape = shape
        bounds = torch.tensor(shape.owned(ranks.size))
        owners = torch.bucketize(torch.arange(shape.experts), bounds[1:], right=True)
        # A masked choice is id -1: it reads the last entry, which names a rank that does not exist.
        self._owners = torch.cat([owners, torch.tensor([ranks.size])]).to(ranks.device)
        self._poisoned = False
        self._all_to_all(torch.zeros(ranks.size, device=ranks.device))

    def dispatch(self, problem: Problem) -> Exchange:
        """Exchange counts, then tokens, then ids and weights."""
        import torch

        order, sent, received = self._layout(problem)
        metadata = torch.cat([problem.expert_ids.int(), problem.weights.view(torch.int32)], 1)
        return Exchange(
            sent,
            received,
            order,
            self._all_to_all(problem.x[order], sent, received),
            self._all_to_all(metadata[order], sent, received),
        )

    def metadata(self, problem: Problem) -> bool:
        """Exchange counts alone."""
        self._layout(problem)
        return True

    def receive(self, problem: Problem, handle: Exchange) -> Received:
        """Mask what belongs to other ranks and count what belongs to this one."""
        import torch

        top_k = self._shape.top_k
        ids = handle.metadata[:, :top_k].long()
        local = self._owners[ids] == self._ranks.rank
        first, end = self._shape.owned(self._ranks.size)[self._ranks.rank :][:2]
        return Received(
            tokens=handle.tokens,
            expert_ids=ids.where(local, -1),
            weights=handle.metadata[:, top_k:].contiguous().view(torch.float32).where(local, 0.0),
            expert_counts=torch.bincount(ids[local] - first, minlength=end - first),
        )

    def stage(self, problem: Problem, handle: Exchange, messages: Tensor) -> Tensor:
        """Combine reads the messages where they are."""
        return messages.contiguous()

    def stage_constant(self, problem: Problem, rows: Tensor) -> Tensor:
        """Repeat the one row as often as dispatch can fill rows."""
        return rows[:1].expand(sum(problem.tokens_by_rank), -1).contiguous()

    def constant_planes(self, problem: Problem) -> int:
        """Rows arrive packed, so the bounds of source planes depend on routing."""
        return 1

    def combine(self, problem: Problem, handle: Exchange, staged: Tensor) -> Tensor:
        """Send the messages back and add them."""
        import torch

        back = self._all_to_all(staged[: sum(handle.received)], handle.received, handle.sent)
        total = torch.zeros(problem.tokens, self._shape.hidden, device=back.device)
        return total.index_add_(0, handle.order, back.float()).to(torch.bfloat16)

    def poison(self, problem: Problem) -> bool:
        """Every receive buffer is new: from now on it is filled before the exchange."""
        self._poisoned = True
        return True

    def close(self) -> None:
        """Nothing outlives the process groups."""

    def _layout(self, problem: Problem) -> tuple[Tensor, list[int], list[int]]:
        """Which token each sent row is, in order of destination; rows to and from each rank."""
        import torch

        goes = torch.zeros(problem.tokens, self._ranks.size + 1, dtype=torch.bool, device=problem.x.device)
        goes.scatter_(1, self._owners[problem.expert_ids], True)
        order = goes[:, :-1].t().nonzero()[:, 1]
        counts = goes[:, :-1].sum(0)
        sent, received = torch.stack([counts, self._all_to_all(counts)]).tolist()
        return order, sent, received

    def _all_to_all(
        self, rows: Tensor, sent: list[int] | None = None, received: list[int] | None = None
    ) -> Tensor:
        import torch.distributed as dist

        arrived = rows.new_empty((sum(received) if received is not None else len(rows), *rows.shape[1:]))
        if self._poisoned:
            arrived.fill_(float("nan") if arrived.is_floating_point() else -1)
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=self._ranks.group)
        return arrived
