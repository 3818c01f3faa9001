"""How ranks and hosts differ: each one's median of each timed case."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING
from typing import Any

from pytest_ep.results.record import CaseResult

if TYPE_CHECKING:
    from pytest_ep.results.record import JSON


def ranks_by_host(local_sizes: Sequence[int]) -> list[int]:
    """Return the ranks of each host, in order of rank; the host of rank r has ``local_sizes[r]``."""
    counts: list[int] = []
    while sum(counts) < len(local_sizes):
        counts.append(max(1, local_sizes[sum(counts)]))
    return counts


def scattered(hosts: Sequence[str]) -> str:
    """Say which rank is on a host that ranks before it have left, or ""; rank r is on ``hosts[r]``."""
    for rank, host in enumerate(hosts):
        if rank and host != hosts[rank - 1] and host in hosts[:rank]:
            return (
                f"rank {rank} is on {host} again, after rank {rank - 1} on {hosts[rank - 1]}: place "
                "the ranks of a host one after another, as srun --distribution=block, mpirun --map-by slot"
            )
    return ""


def medians(results: Iterable[CaseResult], by_host: Sequence[int]) -> list[dict[str, JSON]]:
    """Return the medians of each rank, and of the ranks of each host, in us, by timed case and component.

    A host's is the median of its ranks' medians; hosts have ``by_host`` ranks each, in order of rank.
    """
    ends = list(accumulate(by_host))
    said: list[dict[str, JSON]] = []
    for result in results:
        for component, row in result.rows.items():
            ranks: Any = row["rank_p50_us"]
            hosts = [median(ranks[end - held : end]) for end, held in zip(ends, by_host, strict=True)]
            said.append(
                {
                    "case": result.nodeid,
                    "component": component,
                    "rank_p50_us": ranks,
                    "host_p50_us": list(hosts),
                }
            )
    return said
