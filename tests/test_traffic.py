from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_ep.matrix.shapes import Shape
from pytest_ep.timing.traffic import Leaving
from pytest_ep.timing.traffic import Traffic
from pytest_ep.timing.traffic import rows_between
from pytest_ep.timing.traffic import traffic

GOLDEN = Path(__file__).parent / "data" / "routing_golden.json"

# Three ranks of two experts each, two tokens a rank; by destination:
#   rank 0: token 0 -> {0, 1}, token 1 -> {2}
#   rank 1: token 2 -> {0, 2}, token 3 -> {0}
#   rank 2: token 4 -> {0, 1}, token 5 -> {0, 1}
IDS = np.array([[0, 2], [4, 5], [1, 4], [0, 1], [0, 3], [2, 1]])
OWNED = (0, 2, 4, 6)


def test_a_row_goes_once_to_each_rank_that_owns_an_expert_of_the_token() -> None:
    assert rows_between(IDS, OWNED, (2, 2, 2)).tolist() == [[1, 1, 1], [2, 0, 1], [2, 2, 0]]


NOTHING = Leaving(0, 0, 0)


def moved(ids: Any, owned: Sequence[int], tokens_by_rank: Sequence[int], **changes: int) -> Traffic:
    facts = {"hidden": 10, "index_bytes": 8, "domain": 8, **changes}
    return traffic(np.array(ids), owned, tokens_by_rank, **facts)


def test_bytes_are_those_of_the_most_loaded_rank_without_what_stays() -> None:
    # Sent to others: 2, 3, 4; returned to others: 4, 3, 2; both: 6, 6, 6, which is not 4 + 4.
    leaving = Leaving(dispatch=4 * 10 * 2, combine=4 * 10 * 2, roundtrip=6 * 10 * 2)
    assert moved(IDS, OWNED, (2, 2, 2)) == Traffic(
        tokens=6,
        copies=10,
        total=leaving,
        scale_up=leaving,
        scale_out=NOTHING,
        metadata_bytes=4 * 2 * (8 + 4),
    )


def test_a_scale_up_domain_is_consecutive_ranks_and_the_rest_is_scale_out() -> None:
    # Domains {0, 1} and {2}. Within: 0 to 1 one row, 1 to 0 two. Across: 0 to 2 one, 1 to 2 one, and
    # 2 to both two.
    split = moved(IDS, OWNED, (2, 2, 2), domain=2)
    assert split.scale_up == Leaving(dispatch=2 * 20, combine=2 * 20, roundtrip=3 * 20)
    assert split.scale_out == Leaving(dispatch=4 * 20, combine=2 * 20, roundtrip=6 * 20)
    assert split.total == moved(IDS, OWNED, (2, 2, 2)).total
    alone = moved(IDS, OWNED, (2, 2, 2), domain=1)
    assert (alone.scale_up, alone.scale_out) == (NOTHING, alone.total)


def test_a_narrower_index_moves_less_metadata_and_the_same_rows() -> None:
    wide, narrow = (moved(IDS, OWNED, (2, 2, 2), index_bytes=size) for size in (8, 4))
    assert (wide.metadata_bytes, narrow.metadata_bytes) == (96, 64)
    assert narrow.total == wide.total


def test_each_component_has_its_own_bytes() -> None:
    counted = Leaving(2, 3, 4)
    assert [counted.of(component) for component in ("dispatch", "combine", "roundtrip")] == [2, 3, 4]


def test_masked_choices_move_nothing() -> None:
    ids = np.array([[-1, 3], [-1, -1]])
    assert rows_between(ids, (0, 2, 4), (1, 1)).tolist() == [[0, 1], [0, 0]]


def test_a_rank_may_have_no_tokens() -> None:
    ids = np.array([[0, 2], [1, 0]])
    assert rows_between(ids, (0, 2, 4), (0, 2)).tolist() == [[0, 0], [2, 1]]


def test_one_rank_alone_sends_nothing_to_others() -> None:
    assert moved([[0, 1]], (0, 2), (1,)) == Traffic(1, 1, NOTHING, NOTHING, NOTHING, 0)


def test_uneven_blocks_of_experts_follow_their_bounds() -> None:
    owned = Shape("odd", 8, 5, 1).owned(2)
    assert rows_between(np.array([[2], [3]]), owned, (1, 1)).tolist() == [[1, 0], [0, 1]]


def test_routing_that_does_not_fit_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        rows_between(IDS, OWNED, (2, 2))
    with pytest.raises(ValueError, match="expert 6 is routed to, but only 6 experts exist"):
        rows_between(np.array([[6]]), OWNED, (1, 0, 0))


@pytest.mark.parametrize("ep_size", [2, 4, 8, 16])
def test_copies_and_received_rows_equal_the_published_ones(ep_size: int) -> None:
    golden = json.loads(GOLDEN.read_text())
    first = [entry["experts"] for entry in golden["tokens"] if entry["token"] < 16]
    owned = Shape("deepseek_v3", 7168, golden["experts"], golden["top_k"]).owned(ep_size)
    compared = 0
    for tokens, published in golden["received"][str(ep_size)].items():
        total = ep_size * int(tokens)
        if total > len(first):
            continue
        rows = rows_between(np.array(first[:total]), owned, (int(tokens),) * ep_size)
        assert rows.sum() == published["copies"]
        assert rows.sum(axis=0).tolist() == published["per_rank_received"]
        compared += 1
    assert compared >= 1
