"""How many rows and bytes a routing moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ROW_VALUE_BYTES = 2
"""A token and a message travel as BF16."""
WEIGHT_BYTES = 4
"""A gate weight travels as FP32."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Leaving:
    """Bytes that leave one rank, the most loaded, for others.

    ``dispatch`` and ``combine`` are each of the rank where that direction is largest, ``roundtrip`` both
    directions of the rank where their sum is largest, which need not be the sum of the other two.
    """

    dispatch: int
    combine: int
    roundtrip: int

    def of(self, component: str) -> int:
        """Bytes of ``dispatch``, ``combine`` or ``roundtrip``."""
        return {"dispatch": self.dispatch, "combine": self.combine, "roundtrip": self.roundtrip}[component]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one pair moves.

    ``tokens`` of the whole group; ``copies``: distinct (token, destination rank) pairs, self included.
    ``total`` leaves for any other rank, ``scale_up`` for ranks of the same scale-up domain, ``scale_out``
    for ranks of others; the three may be largest on different ranks. ``metadata_bytes``: the expert ids and
    weights beside dispatch's rows, counted apart.
    """

    tokens: int
    copies: int
    total: Leaving
    scale_up: Leaving
    scale_out: Leaving
    metadata_bytes: int


def rows_between(
    expert_ids: npt.NDArray[np.int64], owned: Sequence[int], tokens_by_rank: Sequence[int]
) -> Rows:
    """Count the rows that dispatch sends: [R, R], from source rank to destination rank, self included.

    ``expert_ids`` [N, K] are global, -1 for none, in the order of ranks' tokens; ``owned`` are the R + 1
    bounds of ``Shape.owned``. Raises ValueError where the three do not belong together.
    """
    ranks = len(tokens_by_rank)
    if len(owned) != ranks + 1 or len(expert_ids) != sum(tokens_by_rank):
        raise ValueError(
            f"{len(expert_ids)} routed tokens and {len(owned)} bounds do not fit {ranks} ranks"
            f" of {sum(tokens_by_rank)} tokens"
        )
    destinations = np.searchsorted(np.asarray(owned), expert_ids, side="right") - 1
    if destinations.size and destinations.max() >= ranks:
        raise ValueError(f"expert {expert_ids.max()} is routed to, but only {owned[-1]} experts exist")
    # A masked choice has destination -1, which lands in the spare last column.
    reached = np.zeros((len(expert_ids), ranks + 1), dtype=bool)
    reached[np.arange(len(expert_ids))[:, None], destinations] = True
    ends = np.cumsum(tokens_by_rank)
    return np.stack(
        [
            reached[end - tokens : end, :ranks].sum(axis=0)
            for end, tokens in zip(ends, tokens_by_rank, strict=True)
        ]
    )


def traffic(
    expert_ids: npt.NDArray[np.int64],
    owned: Sequence[int],
    tokens_by_rank: Sequence[int],
    *,
    hidden: int,
    index_bytes: int,
    domain: int,
) -> Traffic:
    """Count one pair's traffic: a row of ``hidden`` BF16 values per token and destination rank, each way.

    Arguments as in ``rows_between``; ``index_bytes`` is the size of an expert id on the wire, 4 or 8;
    ``domain`` consecutive ranks share a scale-up link.
    """
    rows = rows_between(expert_ids, owned, tokens_by_rank)
    copies = int(rows.sum())
    np.fill_diagonal(rows, 0)
    island = np.arange(len(rows)) // domain
    near = island[:, None] == island
    row_bytes = hidden * ROW_VALUE_BYTES
    return Traffic(
        tokens=sum(tokens_by_rank),
        copies=copies,
        total=_leaving(rows, row_bytes),
        scale_up=_leaving(rows * near, row_bytes),
        scale_out=_leaving(rows * ~near, row_bytes),
        metadata_bytes=int(rows.sum(axis=1).max()) * expert_ids.shape[1] * (index_bytes + WEIGHT_BYTES),
    )


def _leaving(rows: Rows, row_bytes: int) -> Leaving:
    """Count what leaves for others: ``rows`` [R, R] go out in dispatch and come back in combine."""
    sent, returned = rows.sum(axis=1), rows.sum(axis=0)
    return Leaving(
        dispatch=int(sent.max()) * row_bytes,
        combine=int(returned.max()) * row_bytes,
        roundtrip=int((sent + returned).max()) * row_bytes,
    )
