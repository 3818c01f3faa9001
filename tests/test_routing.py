"""Routing and gates equal the published ones, cached or not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_ep.matrix.shapes import Shape
from pytest_ep.workload import routing
from pytest_ep.workload.routing import Trace
from pytest_ep.workload.routing import load_trace

SHAPE = Shape("deepseek_v3", hidden=7168, experts=256, top_k=8)
GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "routing_golden.json").read_text())


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace(SHAPE, GOLDEN["seed"], 65536, None, write=False)


def received(trace: Trace, ep_size: int, tokens_per_rank: int) -> list[int]:
    owner = trace.expert_ids[: ep_size * tokens_per_rank] // (SHAPE.experts // ep_size)
    return [int((owner == rank).any(axis=1).sum()) for rank in range(ep_size)]


@pytest.mark.parametrize("golden", GOLDEN["tokens"], ids=lambda golden: f"token{golden['token']}")
def test_experts_and_gates_are_bit_equal_to_the_golden_ones(trace: Trace, golden: dict[str, Any]) -> None:
    assert trace.expert_ids[golden["token"]].tolist() == golden["experts"]
    weights = [float(weight).hex() for weight in trace.weights[golden["token"]]]
    assert weights == [float.fromhex(weight).hex() for weight in golden["weights_hex"]]


@pytest.mark.parametrize("ep_size", [int(size) for size in GOLDEN["received"]])
def test_received_tokens_equal_the_published_counts(trace: Trace, ep_size: int) -> None:
    checked = 0
    for tokens, golden in GOLDEN["received"][str(ep_size)].items():
        if ep_size * int(tokens) <= len(trace.expert_ids):
            counts = received(trace, ep_size, int(tokens))
            assert counts == golden["per_rank_received"], f"T={tokens}"
            assert sum(counts) == golden["copies"], f"T={tokens}"
            checked += 1
    assert checked >= 9


def test_copies_at_ep8_are_those_of_the_seed_document(trace: Trace) -> None:
    published = {1: 45, 16: 681, 32: 1338, 512: 21640, 8192: 346930}
    assert {tokens: sum(received(trace, 8, tokens)) for tokens in published} == published


def test_a_token_has_distinct_experts_and_weights_that_sum_to_one() -> None:
    trace = load_trace(Shape("crowded", hidden=64, experts=8, top_k=8), 67, 200, None, write=False)
    assert (np.sort(trace.expert_ids, axis=1) == np.arange(8)).all()
    np.testing.assert_allclose(trace.weights.sum(axis=1), 1.0, atol=1e-6)
    assert (trace.weights > 0).all()


def test_another_seed_routes_otherwise() -> None:
    one = load_trace(SHAPE, 67, 16, None, write=False)
    other = load_trace(SHAPE, 68, 16, None, write=False)
    assert one.digest != other.digest
    assert (one.expert_ids != other.expert_ids).any()


def test_more_choices_than_experts_is_an_error_that_names_both() -> None:
    with pytest.raises(ValueError, match="top_k 9 needs 1 to 8 distinct experts"):
        load_trace(Shape("impossible", hidden=64, experts=8, top_k=9), 67, 1, None, write=False)


def test_a_trace_of_no_tokens_is_empty() -> None:
    assert load_trace(SHAPE, 67, 0, None, write=False).expert_ids.shape == (0, 8)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "BLOCK_TOKENS", 64)


@pytest.mark.usefixtures("small_blocks")
def test_a_cached_trace_is_the_generated_one_at_every_length(tmp_path: Path) -> None:
    whole = load_trace(SHAPE, 67, 200, None, write=False)
    for tokens in (1, 63, 64, 65, 200):
        for write in (True, False):
            cached = load_trace(SHAPE, 67, tokens, tmp_path, write)
            assert cached.expert_ids.tolist() == whole.expert_ids[:tokens].tolist()
            assert cached.weights.tolist() == whole.weights[:tokens].tolist()
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.usefixtures("small_blocks")
def test_only_the_writer_leaves_files_and_leaves_no_unfinished_one(tmp_path: Path) -> None:
    cache = tmp_path / "routing"
    load_trace(SHAPE, 67, 10, cache, write=False)
    assert not cache.exists()
    load_trace(SHAPE, 67, 10, cache, write=True)
    assert [file.name for file in cache.iterdir()] == ["uniform-s67-e256-k8-b00000.bin"]


@pytest.mark.usefixtures("small_blocks")
def test_a_cached_block_is_read_and_not_generated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_trace(SHAPE, 67, 100, tmp_path, write=True)

    def generate(*_: object) -> None:
        raise AssertionError("generated although cached")

    monkeypatch.setattr(routing, "_generate", generate)
    assert len(load_trace(SHAPE, 67, 100, tmp_path, write=False).weights) == 100


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "of another seed"])
def test_a_damaged_block_is_generated_again_and_replaced(tmp_path: Path, damage: str) -> None:
    digest = load_trace(SHAPE, 67, 64, tmp_path, write=True).digest
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    if damage == "of another seed":
        load_trace(SHAPE, 68, 64, tmp_path, write=True)
        (other,) = set(tmp_path.iterdir()) - {file}
        other.replace(file)
    else:
        middle = len(good) // 2
        flipped = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
        file.write_bytes({"truncated": good[:-1], "flipped": flipped, "empty": b""}[damage])
    assert load_trace(SHAPE, 67, 64, tmp_path, write=False).digest == digest
    assert load_trace(SHAPE, 67, 64, tmp_path, write=True).digest == digest
    assert file.read_bytes() == good


@pytest.mark.usefixtures("small_blocks")
def test_a_cache_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    assert len(load_trace(SHAPE, 67, 5, occupied / "cache", write=True).weights) == 5


def test_131072_tokens_take_three_seconds_cold_and_a_fifth_of_one_warm(tmp_path: Path) -> None:
    # Time of this process, which a busy machine does not stretch.
    start = time.process_time()
    load_trace(SHAPE, 67, 131072, tmp_path, write=True)
    assert time.process_time() - start <= 3.0
    seconds = []
    for _ in range(3):
        start = time.process_time()
        load_trace(SHAPE, 67, 131072, tmp_path, write=False)
        seconds.append(time.process_time() - start)
    assert min(seconds) <= 0.2
