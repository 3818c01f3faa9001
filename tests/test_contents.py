"""Tokens and messages: exact, distinct, and dependent on all that dispatch transports."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from pytest_ep.matrix.shapes import Shape
from pytest_ep.workload import contents
from pytest_ep.workload.contents import UNIT
from pytest_ep.workload.contents import Senders
from pytest_ep.workload.problem import build_problem
from pytest_ep.workload.routing import load_trace

HIDDEN = 1024


def senders(count: int, contributors: int = 8, top_k: int = 8) -> Senders:
    """``count`` tokens, all with the same contributors; each row is the contributor at position row mod n."""
    row = torch.arange(count)
    local = torch.full((count, top_k), -1, dtype=torch.int64)
    local[:, 2] = row * 7 % 256
    local[:, 5] = (row * 7 + 1) % 256
    return Senders(
        source=row // contributors,
        rank=row % contributors,
        position=row % contributors,
        count=torch.full((count,), contributors),
        expert_ids=local,
        weights=torch.where(local >= 0, 0.125 + local / 1024, 0.0).float(),
    )


def test_a_token_body_is_exact_and_of_small_magnitude() -> None:
    body = contents.tokens(torch.arange(256), HIDDEN).float()[:, contents.SOURCE_COLUMNS :] * 64
    assert torch.equal(body, body.round())
    assert body.abs().max() <= 128
    assert torch.unique(body).numel() == 256


def test_no_two_tokens_and_no_two_columns_are_alike() -> None:
    body = contents.tokens(torch.arange(1024), HIDDEN)[:, contents.SOURCE_COLUMNS :]
    assert len(torch.unique(body, dim=0)) == body.shape[0]
    assert torch.unique(body, dim=1).shape[1] == body.shape[1]
    # Nor nearly alike: two rows or columns agree by chance only.
    assert ((body[1:] == body[:-1]).float().mean(dim=1) < 0.1).all()
    assert ((body[:, 1:] == body[:, :-1]).float().mean(dim=0) < 0.1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_source_ids_are_recovered(dtype: torch.dtype) -> None:
    source = torch.tensor([0, 1, 2, 131071, 2**31, 2**32 - 1])
    assert contents.decode_source_ids(contents.tokens(source, 64).to(dtype)).tolist() == source.tolist()


def test_source_ids_are_recovered_from_scaled_fp8_blocks() -> None:
    rows = contents.tokens(torch.arange(2000, 2512), 128).float()
    scale = rows.abs().amax(dim=1, keepdim=True) / 448
    back = (rows / scale).to(torch.float8_e4m3fn).float() * scale
    assert contents.decode_source_ids(back.to(torch.bfloat16)).tolist() == list(range(2000, 2512))


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, 0.25, -4.0])
def test_a_damaged_source_column_is_not_decodable(value: float) -> None:
    rows = contents.tokens(torch.arange(5, 8), 64)
    rows[1, 17] = value
    assert contents.decode_source_ids(rows).tolist() == [5, -1, 7]


def test_a_row_too_short_for_its_source_id_is_an_error() -> None:
    with pytest.raises(ValueError, match="hidden 31"):
        contents.tokens(torch.arange(1), 31)


def test_messages_are_small_multiples_of_the_unit() -> None:
    rows = contents.messages(senders(512), HIDDEN, most=8).float() / UNIT
    assert torch.equal(rows, rows.round())
    assert rows.abs().max() == 256
    ordinary = contents.messages(senders(512, contributors=2), HIDDEN, most=8).float() / UNIT
    assert ordinary.min() == -64
    assert ordinary.max() == 63


def changed(one: Senders, other: Senders) -> Tensor:
    """The share of columns in which each row differs."""
    before, after = (contents.messages(each, HIDDEN, most=8) for each in (one, other))
    return (before != after).float().mean(dim=1)


def test_messages_depend_on_source_rank_expert_and_each_weight_bit() -> None:
    base = senders(64, contributors=2)
    ids, weights = base.expert_ids.clone(), base.weights.clone()
    ids[:, 2] += 1
    weights[:, 2] = torch.nextafter(weights[:, 2], torch.ones(64))
    moved = base.weights.clone()
    moved[:, 2], moved[:, 5] = base.weights[:, 5], base.weights[:, 2]
    for other in (
        dataclasses.replace(base, source=base.source + 1),
        dataclasses.replace(base, rank=base.rank + 1),
        dataclasses.replace(base, expert_ids=ids),
        dataclasses.replace(base, weights=weights),
        dataclasses.replace(base, weights=moved),
        dataclasses.replace(base, expert_ids=torch.full_like(ids, -1)),
    ):
        assert (changed(base, other) > 0.9).all()


def test_the_order_of_a_rows_experts_does_not_matter() -> None:
    base = senders(64)
    flipped = dataclasses.replace(base, expert_ids=base.expert_ids.flip(1), weights=base.weights.flip(1))
    assert not changed(base, flipped).any()


@pytest.mark.parametrize("contributors", [3, 4, 5, 8])
def test_canary_columns_hold_every_triple(contributors: int) -> None:
    rows = contents.messages(senders(contributors, contributors), HIDDEN, most=8).float() / UNIT
    seen = set()
    for column in rows.T:
        roles = {float(column[place]): place for place in range(contributors) if column[place]}
        if sorted(roles) == [-256, 1, 256] and column.count_nonzero() == 3:
            seen.add((frozenset((roles[256], roles[1])), roles[-256]))
    assert len(seen) == 3 * math.comb(contributors, 3)


def test_canary_columns_are_spread_over_the_row() -> None:
    rows = contents.messages(senders(8), 7168, most=8).float() / UNIT
    columns = torch.nonzero(rows.abs().amax(dim=0) == 256).squeeze(1)
    assert len(columns) == contents.canary_width(7168, 8) == 168
    assert columns.diff().max() <= 43
    assert columns[-1] >= 7168 - 43


def test_the_canary_window_moves_with_the_token_where_a_row_is_short() -> None:
    hidden = 64
    assert contents.canary_width(hidden, 8) == 32
    rows = contents.messages(senders(8 * 21), hidden, most=8).float().view(21, 8, hidden) / UNIT
    patterns = {tuple(column.tolist()) for token in rows for column in token.T if column.abs().max() == 256}
    assert len(patterns) == 168


@pytest.mark.parametrize("contributors", [1, 2])
def test_two_contributors_have_no_canaries(contributors: int) -> None:
    rows = contents.messages(senders(64, contributors), HIDDEN, most=8)
    assert rows.abs().max() <= 64 * UNIT


def test_damaged_claims_still_get_messages() -> None:
    odd = dataclasses.replace(
        senders(8),
        position=torch.tensor([8, -1, 9, 0, 1, 2, 3, 4]),
        count=torch.tensor([8, 8, 0, 200, 3, 3, 1, 4]),
        weights=torch.full((8, 8), math.nan),
    )
    assert contents.messages(odd, HIDDEN, most=8).isfinite().all()


def test_constant_rows_differ_by_rank_and_plane() -> None:
    rank, plane = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    rows = contents.constant_messages(rank.flatten(), plane.flatten(), HIDDEN, ep_size=8)
    assert len(torch.unique(rows, dim=0)) == 64
    multiples = rows.float() / UNIT
    assert torch.equal(multiples, multiples.round())
    assert multiples.abs().max() == 256


def test_rows_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = contents.tokens(torch.arange(50), HIDDEN)
    monkeypatch.setattr(contents, "chunk_rows", lambda device, elements: 7)
    assert torch.equal(contents.tokens(torch.arange(50), HIDDEN), whole)


def test_a_problem_holds_this_ranks_tokens_in_the_index_dtype() -> None:
    shape = Shape("small", hidden=64, experts=16, top_k=4)
    trace = load_trace(shape, 67, 7, None, write=False)
    problem = build_problem(shape, trace, 2, (3, 0, 4), "cpu", "int32")
    assert contents.decode_source_ids(problem.x).tolist() == [3, 4, 5, 6]
    assert problem.expert_ids.dtype == torch.int32
    assert problem.expert_ids.tolist() == trace.expert_ids[3:].tolist()
    assert problem.weights.tolist() == trace.weights[3:].tolist()
    problem.weights.zero_()
    assert trace.weights.all()
    assert build_problem(shape, trace, 1, (3, 0, 4), "cpu", "int64").x.shape == (0, 64)


def test_a_problem_refuses_a_trace_of_another_length_and_an_unknown_dtype() -> None:
    shape = Shape("small", hidden=64, experts=16, top_k=4)
    trace = load_trace(shape, 67, 7, None, write=False)
    with pytest.raises(ValueError, match="trace of 7 tokens for 8"):
        build_problem(shape, trace, 0, (4, 4), "cpu", "int64")
    with pytest.raises(ValueError, match="unknown index dtype 'int8'"):
        build_problem(shape, trace, 0, (3, 4), "cpu", "int8")
