"""One rank's share of one case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_ep.matrix.shapes import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pytest_ep.workload.routing import Trace


@dataclass(frozen=True, slots=True)
class Problem:
    """One rank's share of one case, on its device.

    ``x`` [T, H] BF16; ``expert_ids`` [T, K] in the transport's index dtype; ``weights`` [T, K] FP32.
    ``trace`` holds every rank's ids and weights (numpy, [sum of tokens_by_rank, K]), which only the oracle
    and the byte counts read. ``tokens_by_rank`` has ep_size entries.
    """

    shape: Shape
    rank: int
    tokens_by_rank: tuple[int, ...]
    trace: Trace
    x: Tensor
    expert_ids: Tensor
    weights: Tensor

    @property
    def ep_size(self) -> int:
        """Ranks of the EP group."""
        return len(self.tokens_by_rank)

    @property
    def tokens(self) -> int:
        """Tokens of this rank."""
        return self.tokens_by_rank[self.rank]

    @property
    def max_tokens(self) -> int:
        """The most tokens of any rank."""
        return max(self.tokens_by_rank)

    def first_token(self, rank: int) -> int:
        """Global index of a rank's first token."""
        return sum(self.tokens_by_rank[:rank])


def build_problem(  # noqa: PLR0917 - the parts of a Problem, in its order
    shape: Shape,
    trace: Trace,
    rank: int,
    tokens_by_rank: tuple[int, ...],
    device: torch.device | str,
    index_dtype: str,
) -> Problem:
    """This rank's share of the case that ``trace`` routes, on ``device``, ids as ``int32`` or ``int64``.

    Raises ValueError where the trace is not as long as all ranks' tokens together, or no such index dtype is.
    """
    import torch

    from pytest_ep.workload import contents

    if len(trace.expert_ids) != sum(tokens_by_rank):
        raise ValueError(f"trace of {len(trace.expert_ids)} tokens for {sum(tokens_by_rank)} of all ranks")
    dtypes = {"int32": torch.int32, "int64": torch.int64}
    if index_dtype not in dtypes:
        raise ValueError(f"unknown index dtype {index_dtype!r}: known are {', '.join(dtypes)}")
    first = sum(tokens_by_rank[:rank])
    own = slice(first, first + tokens_by_rank[rank])
    # Copies: a transport that writes to its inputs must not reach the trace that the oracle reads.
    return Problem(
        shape=shape,
        rank=rank,
        tokens_by_rank=tokens_by_rank,
        trace=trace,
        x=contents.tokens(torch.arange(own.start, own.stop, device=device), shape.hidden),
        expert_ids=torch.tensor(trace.expert_ids[own], dtype=dtypes[index_dtype], device=device),
        weights=torch.tensor(trace.weights[own], device=device),
    )
