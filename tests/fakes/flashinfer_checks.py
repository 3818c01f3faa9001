"""What the stand-in must do, release by release."""

from __future__ import annotations

import inspect
import sys

import torch

from tests.fakes import flashinfer_fault_checks  # noqa: F401  # registers its checks
from tests.fakes.flashinfer_rig import ALLTOALL
from tests.fakes.flashinfer_rig import EIGHT
from tests.fakes.flashinfer_rig import EVERY
from tests.fakes.flashinfer_rig import EXPERTS
from tests.fakes.flashinfer_rig import HIDDEN
from tests.fakes.flashinfer_rig import LAST
from tests.fakes.flashinfer_rig import OLD
from tests.fakes.flashinfer_rig import SEVEN
from tests.fakes.flashinfer_rig import SIXTEEN
from tests.fakes.flashinfer_rig import TOKENS
from tests.fakes.flashinfer_rig import TOP_K
from tests.fakes.flashinfer_rig import check
from tests.fakes.flashinfer_rig import combine
from tests.fakes.flashinfer_rig import dispatch
from tests.fakes.flashinfer_rig import echo
from tests.fakes.flashinfer_rig import fresh
from tests.fakes.flashinfer_rig import inputs
from tests.fakes.flashinfer_rig import load
from tests.fakes.flashinfer_rig import main
from tests.fakes.flashinfer_rig import make
from tests.fakes.flashinfer_rig import raised
from tests.fakes.flashinfer_rig import region
from tests.fakes.flashinfer_rig import release


@check
def each_token_arrives_once_per_rank_in_an_order_of_its_own(rank: int) -> None:
    for version in EVERY:
        fresh(version)
        transport = make(rank)
        token, ids, weights = inputs(rank)
        planes, their_ids, their_weights = dispatch(transport, token, ids, weights, TOKENS)
        shuffled = False
        for source in range(2):
            sent, sent_ids, _ = inputs(source)
            mine = (sent_ids // 4 == rank).any(dim=1)
            filled = int(mine.sum())
            assert sorted(planes[source, :filled, 0].tolist()) == sent[mine, 0].tolist(), version
            shuffled |= planes[source, :filled, 0].tolist() != sent[mine, 0].tolist()
            slot_of = (planes[source, :filled, 0] - 1 - 100 * source).to(torch.int64)
            assert torch.equal(their_ids[source, :filled], sent_ids[slot_of]), version
            assert planes[source, filled:].isnan().all(), version
            assert their_weights[source, filled:].isnan().all(), version
            assert (their_ids[source, filled:] == -1).all(), version
        assert shuffled, version
        combine(transport, region(transport, TOKENS).fill_(0), TOKENS)
        release(transport)


@check
def padding_ids_pass_for_experts_unless_sanitised(rank: int) -> None:
    fresh(SIXTEEN)
    transport = make(rank)
    token, ids, weights = inputs(rank)
    received = transport.dispatch(ids, [token, ids, weights], TOKENS)
    assert bool(((received[1] >= 0) & (received[1] < EXPERTS)).all())
    assert bool(received[0].isnan().any())
    release(transport)


@check
def combine_sums_what_each_rank_staged(rank: int) -> None:
    for version in EVERY:
        fresh(version)
        transport = make(rank)
        for tokens in (TOKENS, 3 if rank else 0):
            got, expected = echo(transport, rank, TOKENS if tokens == TOKENS else 3, tokens)
            assert torch.equal(got, expected), version
        release(transport)


@check
def what_is_staged_stays_valid_for_the_next_dispatch(rank: int) -> None:
    for version in EVERY:
        fresh(version)
        transport = make(rank)
        token, ids, weights = inputs(rank)
        dispatch(transport, token, ids, weights, TOKENS)
        place = region(transport, TOKENS).fill_(rank + 1)
        first = combine(transport, place, TOKENS)
        dispatch(transport, token, ids.flip(0), weights, TOKENS)
        second = combine(transport, region(transport, TOKENS), TOKENS)
        assert torch.equal(first.flip(0), second), version
        release(transport)


@check
def each_generation_adds_in_its_own_precision(rank: int) -> None:
    for version, expected in ((OLD, 1.0078125), (EIGHT, 1.0078125), (SIXTEEN, 1.015625), (LAST, 1.015625)):
        fresh(version)
        terms = torch.full((8, 1, 1), 2.0**-9, dtype=torch.bfloat16)
        terms[0] = 1.0
        kernels, facts = load("comm._kernels"), load("_facts").FACTS
        assert kernels.reduce(terms, facts.accumulate).item() == expected, version


@check
def release_candidates_fall_on_the_side_that_the_wheels_show(rank: int) -> None:
    fresh(SIXTEEN)
    facts_of = load("_facts").facts_of
    assert [facts_of(v).accumulate for v in ("0.6.15", EIGHT, "0.6.16rc3")] == ["payload"] * 2 + ["float32"]
    assert [facts_of(v).max_payloads for v in ("0.6.13", "0.6.14", SEVEN, LAST)] == [4, 6, 6, 4]
    assert facts_of("not-a-version").moe_alltoall


@check
def signatures_differ_as_in_the_wheels(rank: int) -> None:
    extra = {
        OLD: (7, 5, 3),
        EIGHT: (7, 5, 7),
        SIXTEEN: (9, 7, 10),
        SEVEN: (10, 7, 10),
    }
    for version, expected in extra.items():
        fresh(version)
        cls = load("comm.trtllm_moe_alltoall").MoeAlltoAll
        methods = (cls.__init__, cls.dispatch, cls.combine)
        assert tuple(len(inspect.signature(m).parameters) - 1 for m in methods) == expected, version
        assert ("mapping" in inspect.signature(cls).parameters) == (version != SEVEN)
    fresh(LAST)
    assert "No module named" in raised(load, "comm.trtllm_moe_alltoall")
    parameters = inspect.signature(load("moe_ep").NVLinkOneSidedAlltoAll.dispatch).parameters
    assert "runtime_max_tokens_per_rank" in parameters
    fresh(SEVEN)
    parameters = inspect.signature(load("moe_ep").NVLinkOneSidedAlltoAll.dispatch).parameters
    assert "max_tokens_per_rank" in parameters
    fresh(OLD)
    assert "No module named" in raised(load, "moe_ep")


@check
def the_workspace_is_as_large_as_the_wheel_says(rank: int) -> None:
    for version in ALLTOALL:
        fresh(version)
        size = load("comm.trtllm_moe_alltoall").moe_a2a_get_workspace_size_per_rank
        assert size(2, 8192, 7168 * 2 + 64, 7168 * 2) == 472252800
        assert size(8, 64, 7168 * 2 + 64, 7168 * 2) == 14724480


@check
def pairs_are_strict(rank: int) -> None:
    for version in EVERY:
        fresh(version)
        transport = make(rank)
        assert "before" in raised(region, transport, TOKENS), version
        assert "before" in raised(combine, transport, torch.zeros(2, TOKENS, HIDDEN), TOKENS)
        dispatch(transport, *inputs(rank), TOKENS)
        assert "dispatch called twice" in raised(dispatch, transport, *inputs(rank), TOKENS)
        combine(transport, region(transport, TOKENS).fill_(0), TOKENS)
        got, expected = echo(transport, rank)
        assert torch.equal(got, expected), version
        release(transport)


@check
def limits_are_those_of_the_release(rank: int) -> None:
    for version in ALLTOALL:
        fresh(version)
        token, ids, _ = inputs(rank)
        new = version in {SIXTEEN, SEVEN}
        for top_k, refused in ((3, True), (12, not new), (22, False)):
            transport = make(rank, top_k=top_k, tokens=2, experts=32)
            text = raised(transport.dispatch, torch.zeros(2, top_k, dtype=torch.int32), [token[:2]], 2)
            assert ("Unsupported top_k" in text) == refused, (version, top_k, text)
            release(transport)
        transport = make(rank, experts=9)
        text = raised(transport.dispatch, ids, [token], TOKENS)
        assert ("divisible" in text) == (not new), (version, text)
        release(transport)
        transport = make(rank)
        limit = load("_facts").FACTS.max_payloads
        assert "Too many payloads" in raised(transport.dispatch, ids, [token] * (limit + 1), 6)
        assert "runtimeMaxTokensPerRank > 0" in raised(transport.dispatch, ids, [token], 0)
        assert "exceeds max" in raised(transport.dispatch, ids, [token], TOKENS + 1)
        assert "Inconsistency" in raised(transport.dispatch, ids.long(), [token], TOKENS)
        assert "contiguous" in raised(transport.dispatch, ids, [token.T.contiguous().T], TOKENS)
        ops = load("comm._ops")
        wide = ops.Geometry(TOKENS, 0, 65, TOP_K, 130)
        assert "epSize" in raised(ops.check_inputs, ids, [token], wide)
        release(transport)


@check
def the_last_release_refuses_before_it_builds(rank: int) -> None:
    fresh(LAST)
    assert "divisible by the EP size" in raised(make, rank, experts=9)
    assert "supports top_k in" in raised(make, rank, top_k=5)
    transport = make(rank)
    token, ids, weights = inputs(rank)
    assert "must be in (0, 6]" in raised(dispatch, transport, token, ids, weights, 0)
    assert "exceeds the runtime capacity" in raised(dispatch, transport, token, ids, weights, 3)
    release(transport)
    assert "has been destroyed" in raised(dispatch, transport, token, ids, weights, TOKENS)


@check
def a_row_that_does_not_fit_its_plane_is_a_misaligned_store(rank: int) -> None:
    for version, lost in ((EIGHT, True), (SEVEN, False)):
        fresh(version)
        transport = make(rank)
        token, ids, _ = inputs(rank)
        narrow = token[:1, :1].contiguous()
        text = raised(transport.dispatch, ids[:1], [narrow, ids[:1]], 1)
        assert ("misaligned address" in text) == lost, (version, text)
        release(transport)


@check
def workspaces_are_cached_counted_and_freed(rank: int) -> None:
    for version in EVERY:
        fresh(version)
        counts = load("fake").counts
        first, second = make(rank), make(rank)
        assert counts.live == 1, version
        assert first._state is not second._state or version == LAST
        larger = make(rank, tokens=2 * TOKENS)
        assert counts.live == 2, version
        stale = None
        if version != LAST:
            stale = load("comm.mnnvl").MnnvlMemory.allocated_map[first.mnnvl_mem.ptr].own
        release(larger)
        release(first)
        if version == LAST:
            second.destroy()
        del first, second, larger
        assert counts.live == 0, version
        assert stale is None or bool((stale == 0xFF).all())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
