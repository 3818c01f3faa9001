"""The command that repeats a case: what was given for the case, and nothing that concerns the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pytest_ep.command import FLAGS
from pytest_ep.command import NOT_REPEATED
from pytest_ep.command import repeating
from pytest_ep.matrix.cells import Cell
from pytest_ep.matrix.cells import Key
from pytest_ep.matrix.shapes import SHAPES
from pytest_ep.options import add_options
from pytest_ep.ranks.identity import Identity

SHAPE = SHAPES["deepseek_v3"]


def cell(tokens: int) -> Cell:
    return Cell(Key("x", "cpu", 4, "normal", "bf16", SHAPE.name), SHAPE, "uniform", tokens)


def command(*arguments: str, there: str = "", ranks: int = 4, local: int = 4, largest: int = 8) -> str:
    config: Any = SimpleNamespace(
        rootpath=Path("/root"), invocation_params=SimpleNamespace(args=arguments, dir=Path("/root") / there)
    )
    identity = Identity(rank=0, size=ranks, local_rank=0, local_size=local)
    case = cell(8)
    nodeid = f"cases/test_x.py::TestX::test_case[{case.id}]"
    return repeating(config, identity, case, nodeid, cell(largest))


CASE = "cpu-ep04-normal-bf16-deepseek_v3-uniform-T00008"


def test_options_of_ours_are_kept_with_their_values_and_others_are_not() -> None:
    given = command("cases", "-q", "--ep-tokens", "1..64", "-k", "x", "--ep-exact", "--benchmark-json=r.json")
    assert given == (
        f"torchrun --nproc-per-node=4 -m pytest cases/test_x.py::TestX -k {CASE} --ep-tokens 1..64 --ep-exact"
    )


def test_what_concerns_the_whole_run_is_left_out() -> None:
    given = command("--ep-require=x", "--ep-resume", "r.json", "--ep-session-budget", "9m", "--ep-size=4")
    assert given.endswith(f"-k {CASE} --ep-size=4")


def test_one_rank_needs_no_launcher_and_several_nodes_say_how_many() -> None:
    assert command(ranks=1, local=1).startswith("python -m pytest ")
    assert command(ranks=16, local=8).startswith("torchrun --nnodes=2 --nproc-per-node=8 -m pytest ")


def test_the_path_is_as_seen_from_where_pytest_was_started() -> None:
    assert " test_x.py::TestX " in command(there="cases")


def test_a_transport_that_was_sized_for_more_is_sized_so_again() -> None:
    assert f"-k '{CASE} or {CASE[:-5]}08192'" in command(largest=8192)


def test_every_option_of_ours_is_known_to_take_a_value_or_none() -> None:
    options: dict[str, str] = {}

    def note(name: str, **settings: Any) -> None:
        options[name] = settings.get("action", "store")

    parser: Any = SimpleNamespace(getgroup=lambda *named: SimpleNamespace(addoption=note))
    add_options(parser)
    assert {name for name, action in options.items() if action == "store_true"} == set(FLAGS)
    assert set(NOT_REPEATED) <= set(options)
