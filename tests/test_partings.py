"""A rank that ends the session while others go on, or all at once: real ballots of threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from pytest_ep.ranks.ballot import Ballot
from pytest_ep.ranks.ballot import OutOfStep
from pytest_ep.ranks.fate import Fate
from pytest_ep.ranks.identity import Identity
from pytest_ep.ranks.pulse import Pulse

Work = Callable[[Fate], object]


def on_ranks(*works: Work) -> list[Any]:
    """Return what each rank's work returned or raised."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def run(rank: int, work: Work) -> object:
        ballot = Ballot(Identity(rank, len(works), rank, len(works)), store, Pulse())
        try:
            return work(Fate(ballot, print))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(works)) as ranks:
        return list(ranks.map(run, range(len(works)), works))


@pytest.mark.parametrize(
    "stop", [pytest.Session.Interrupted("a plugin's limit"), pytest.Session.Failed("a plugin's limit")]
)
def test_the_others_hear_at_once_of_a_rank_that_a_plugin_stops_alone(stop: BaseException) -> None:
    heard, stopped = on_ranks(
        lambda fate: fate.together("oracle", lambda: None), lambda fate: fate.part(stop)
    )
    assert stopped is None
    assert isinstance(heard, OutOfStep)
    assert str(heard) == "rank 1 leaves the session: a plugin's limit"
    assert heard.returncode == pytest.ExitCode.INTERRUPTED


def test_ranks_that_all_stop_after_the_same_case_agree() -> None:
    stop = pytest.Session.Failed("stopping after 1 failures")
    assert on_ranks(*[lambda fate: fate.part(stop)] * 2) == [None, None]
