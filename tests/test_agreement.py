"""The agreement on what was collected: who is told, who falls silent, and what other versions may say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ep.collection import Agreement
from pytest_ep.collection import Collected
from pytest_ep.ranks.ballot import OutOfStep
from pytest_ep.ranks.identity import Identity
from pytest_ep.results import artifact


@pytest.fixture
def silenced(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Whose files were given up."""
    configs: list[object] = []
    monkeypatch.setattr(artifact, "silence", configs.append)
    monkeypatch.setattr(artifact, "silence_benchmark", lambda config: None)
    return configs


def run_of(rank: int, gather: Callable[[str, object], object] = lambda topic, said: said) -> Any:
    ballot = SimpleNamespace(gather=gather)
    return SimpleNamespace(
        active=True,
        config=SimpleNamespace(getoption=lambda *_: None, getini=lambda _: None),
        fate=SimpleNamespace(ballot=ballot, part=lambda error: None),
        identity=Identity(rank, 2, rank, 2),
        refusal="",
        reporter=rank == 0,
        host_facts={},
        ranks_by_host=[],
    )


@pytest.mark.parametrize(("rank", "topic"), [(1, "collection"), (1, "selection"), (0, "selection")])
def test_a_rank_that_hears_of_another_s_end_writes_no_file_over_rank_0_s(
    silenced: list[object], rank: int, topic: str
) -> None:
    def gather(at: str, said: object) -> object:
        if at == topic:
            raise OutOfStep(["fails in the session: x", at])
        return [said, said]

    run = run_of(rank, gather)
    hook: Any = Agreement(run, lambda run: None).pytest_collection_modifyitems([])
    next(hook)
    with pytest.raises(OutOfStep):
        hook.send(None)
    assert silenced == ([run.config] if rank else [])


def said_by(host: str, **facts: str) -> dict[str, Any]:
    return asdict(Collected("digest", {}, "", facts, host, 2))


def test_another_version_of_this_plugin_is_named_whatever_else_it_says(silenced: list[object]) -> None:
    other = {"facts": {"pytest-ep": "9.9"}, "host": "b", "of a later version": 1}
    with pytest.raises(
        pytest.UsageError, match=r"rank 1 on b and rank 0 on a differ: pytest-ep 9\.9 against 0\.1"
    ):
        Agreement(run_of(0), lambda run: None)._alike([said_by("a", **{"pytest-ep": "0.1"}), other])
    bare: dict[str, Any] = {}
    with pytest.raises(pytest.UsageError, match="rank 1 on None and rank 0 on a differ"):
        Agreement(run_of(0), lambda run: None)._alike([said_by("a", Python="3"), bare])


def test_ranks_whose_hosts_take_turns_are_refused_on_every_rank(silenced: list[object]) -> None:
    said = [said_by(host) for host in ("a", "b", "a", "b")]
    with pytest.raises(pytest.UsageError, match="rank 2 is on a again, after rank 1 on b"):
        Agreement(run_of(0), lambda run: None)._alike(said)
    with pytest.raises(pytest.exit.Exception, match="rank 2 is on a again"):
        Agreement(run_of(1), lambda run: None)._alike(said)
    run = run_of(0)
    Agreement(run, lambda run: None)._alike(said[:1] * 2 + said[1:2] * 2)
    assert run.ranks_by_host == [2, 2]


@pytest.mark.parametrize(
    ("failing", "stops"),
    [
        ([["m"], ["m"]], ""),
        ([[], ["m"]], "rank 1 failed to collect what others did:\nof m"),
        ([["m"], ["m", "n"]], "rank 1 failed to collect what others did:\nof m\nof n"),
        ([["m", "n"], ["m"]], "rank 0 failed to collect what others did:\nof m\nof n"),
    ],
)
def test_what_fails_to_be_collected_on_some_ranks_only_is_told(
    silenced: list[object], failing: list[list[str]], stops: str
) -> None:
    said = [asdict(Collected("d", {name: f"of {name}" for name in one}, "", {}, "a", 2)) for one in failing]
    agreement = Agreement(run_of(0, lambda *_: said), lambda run: None)
    if not stops:
        agreement._compare([])
        return
    with pytest.raises(pytest.UsageError, match=f"^{stops}$"):
        agreement._compare([])


@pytest.mark.parametrize(
    ("others", "by_cache", "sound"), [("abc", True, True), ("abc", False, False), ("a", True, False)]
)
def test_ranks_may_have_more_than_rank_0_where_lf_left_files_out(
    silenced: list[object], others: str, by_cache: bool, sound: bool
) -> None:
    run = run_of(0)
    run.config = SimpleNamespace(getoption=lambda name, default: by_cache)
    agreement = Agreement(run, lambda run: None)
    if sound:
        agreement._compare_ids([["a", "b"], list(others)])
        return
    with pytest.raises(
        pytest.UsageError, match="collected different cases.*" + ("drop --lf" if by_cache else "")
    ):
        agreement._compare_ids([["a", "b"], list(others)])
