"""Construction step by step, each step agreed by all ranks before the next begins."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from typing import TYPE_CHECKING
from typing import Any

from pytest_ep.backends.base import BackendUnavailable

if TYPE_CHECKING:
    from pytest_ep.ranks.group import Ranks


class ConstructionFault(RuntimeError):
    """A step failed: raised on every rank, in the words of the rank where it failed first."""


@dataclass(frozen=True, slots=True)
class _Vote:
    value: Any = None
    refusal: tuple[str, str] | None = None
    fault: str = ""
    place: int = 0

    @property
    def passed(self) -> bool:
        return self.refusal is None and not self.fault


def agree(ranks: Ranks, step: str, work: Callable[[], Any], *, collective: bool = False) -> list[Any]:
    """Do ``work`` on every rank and return what each said, by rank (pickled values).

    Where any rank fails, all raise the same: BackendUnavailable for a refusal, ConstructionFault for a fault.
    In a ``collective`` step a rank that fails first frees the others from the process groups, so what
    they say after it is its doing, and it alone is heard; elsewhere a fault is heard before any refusal.
    """
    ranks.ballot.enter(step)
    vote = _attempt(work)
    if collective and not vote.passed:
        vote = replace(vote, place=ranks.ballot.place(step))
        ranks.abandon()
    votes: list[_Vote] = ranks.ballot.gather(step, vote)
    failed = [rank for rank in range(ranks.size) if not votes[rank].passed]
    if failed:
        first = min(failed, key=lambda rank: (votes[rank].place, not votes[rank].fault, rank))
        if refusal := votes[first].refusal:
            raise BackendUnavailable(*refusal)
        raise ConstructionFault(f"rank {first} failed in {step}:\n{votes[first].fault.rstrip()}")
    return [vote.value for vote in votes]


def _attempt(work: Callable[[], Any]) -> _Vote:
    """The exception ends here, and with it the frames that may hold process groups or device memory."""
    try:
        return _Vote(value=work())
    except BackendUnavailable as refusal:
        return _Vote(refusal=(refusal.code, refusal.reason))
    except Exception:
        return _Vote(fault=traceback.format_exc())
