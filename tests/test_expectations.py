"""Files of expectations: what they may say, and one line for what they may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_ep.results.expectations import LIMITS
from pytest_ep.results.expectations import SELECTORS
from pytest_ep.results.expectations import load
from pytest_ep.results.sides import ResultError

CELL = '[[cell]]\nclock = "graph"\n'


def put(folder: Path, text: str) -> Path:
    file = folder / "rack.toml"
    file.write_text(text)
    return file


def test_entries_of_each_add_to_their_cell_and_may_override_it(tmp_path: Path) -> None:
    text = CELL + 'backend = "x"\nmax_us = 9\neach = [{ tokens = 1 }, { tokens = "2..4", max_us = 5.5 }]\n'
    first, second, third = load(put(tmp_path, f"{text}{CELL}min_gbps = 300\n"))
    assert (first.where, dict(first.limits)) == ("[[cell]] 1, each 1", {"max_us": 9.0})
    assert dict(first.selects) == {"backend": ("x",), "tokens": (1,)}
    assert dict(second.limits) == {"max_us": 5.5}
    assert (third.where, dict(third.selects)) == ("[[cell]] 2", {})
    assert str(second) == "[[cell]] 1, each 2 backend=x tokens=2..4"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "rack.toml: the file has no [[cell]]"),
        ("cells = 1", "the file unknown field cells, known: cell"),
        ("cell = 1", "the file cell must be a list of tables, not 1"),
        ("[[cell]]\nmax_us = 1", "[[cell]] 1 lacks clock"),
        ('[[cell]]\nclock = "auto"\nmax_us = 1', "clock has no 'auto', known: host, event, graph, kernel"),
        (CELL, "[[cell]] 1 has no limit, known: max_us, min_gbps, max_spread_us, max_launch_spread_percent"),
        (CELL + "max_ms = 1", "[[cell]] 1 unknown field max_ms, known: backend, sku, ep_size, mode"),
        (CELL + "max_us = 0", "max_us must be a positive number, not 0"),
        (CELL + 'max_us = "9"', "max_us must be a positive number, not '9'"),
        (CELL + 'max_us = 1\nmode = "normla"', "mode has no 'normla', known: normal, low_latency"),
        (CELL + 'max_us = 1\ncomponent = ["stage"]', "component has no 'stage', known: dispatch, combine"),
        (CELL + 'max_us = 1\nprecision = "fp16"', "precision has no 'fp16', known: bf16, fp8"),
        (CELL + "max_us = 1\nsku = 200", "sku must be text or a list of texts, not 200"),
        (CELL + 'max_us = 1\nep_size = "2"', "ep_size must be a positive whole number, or a list of such"),
        (
            CELL + "max_us = 1\ntokens = true",
            'tokens must be a positive whole number, or a range as "1..512"',
        ),
        (CELL + 'max_us = 1\ntokens = "9..1"', "or a list of such, not '9..1'"),
        (CELL + 'max_us = 1\ntokens = "0..9"', "or a list of such, not '0..9'"),
        (CELL + "max_us = 1\ntokens = []", "tokens is an empty list, which selects nothing"),
        (CELL + "max_us = 1\neach = [{ tokens = 1 }, { token = 2 }]", "[[cell]] 1, each 2 unknown field"),
        (CELL + "max_us = 1\neach = 5", "[[cell]] 1 each must be a list of tables, not 5"),
        (CELL + "max_us = 1\neach = []", "[[cell]] 1 each must be a list of tables, not []"),
        ("[[cell]\n", "rack.toml: not TOML: "),
    ],
)
def test_a_mistake_is_one_line_that_says_where_and_what_is_known(
    tmp_path: Path, text: str, error: str
) -> None:
    with pytest.raises(ResultError) as raised:
        load(put(tmp_path, text))
    assert error in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path / "rack.toml"))
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"none\.toml: cannot be read, No such file"):
        load(tmp_path / "none.toml")


def test_every_selector_and_limit_is_taken(tmp_path: Path) -> None:
    known = {"mode": "normal", "precision": "bf16", "component": "combine"}
    lines = [f'{name} = "{known.get(name, "x")}"' for name in SELECTORS if name not in ("ep_size", "tokens")]
    lines += ["ep_size = [2, 4]", 'tokens = [1, "64..128"]', *(f"{limit.name} = 1" for limit in LIMITS)]
    (expectation,) = load(put(tmp_path, CELL + "\n".join(lines)))
    assert set(expectation.selects) == set(SELECTORS)
    assert set(expectation.limits) == {limit.name for limit in LIMITS}
    assert expectation.selects["tokens"] == (1, range(64, 129))
