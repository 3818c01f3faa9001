"""Which experts each token goes to, and with which gate weights: the same on every machine.

Routing "uniform" is a keyed counter (``workload/counter.py``), no random generator. The expert of a slot is
the counter of stream 0 modulo the number of experts, at the first attempt that no earlier slot of the token
used; the raw gate is 1 + (counter of stream 1 mod 65535), and a token's weights are its raw gates over their
sum. Received counts therefore equal those published for the same seed. Other kinds (``workload/choices.py``)
and recorded ids have the same weights, slot by slot.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_ep.matrix.routing import UNIFORM
from pytest_ep.matrix.routing import Routing
from pytest_ep.matrix.shapes import Shape
from pytest_ep.workload import choices
from pytest_ep.workload.counter import Counter

BLOCK_TOKENS = 65536
"""Tokens of one cached block."""

SEED = 67
"""The seed of every published count."""

_GATE_STREAM = 1
_GATE_RANGE = 65535
_CHECKSUM_BYTES = 16

Block = npt.NDArray[Any]
"""[2, n, K] unsigned: the expert ids and the raw gates of n tokens."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The routing of N tokens: ``expert_ids`` int64 [N, K], distinct in a row; ``weights`` float32 [N, K].

    A masked choice is id -1 with weight 0: it has no destination and nothing comes back for it.
    """

    expert_ids: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]

    @cached_property
    def digest(self) -> str:
        """Hex digest of ids and weights, equal on two ranks exactly where their traces are."""
        hasher = blake2b(digest_size=_CHECKSUM_BYTES)
        hasher.update(repr(self.expert_ids.shape).encode())
        hasher.update(self.expert_ids.astype("<i8", copy=False).tobytes())
        hasher.update(self.weights.astype("<f4", copy=False).tobytes())
        return hasher.hexdigest()


def load_trace(
    shape: Shape, seed: int, tokens: int, cache: Path | None, write: bool, *, routing: Routing = UNIFORM
) -> Trace:
    """The routing of the first ``tokens`` tokens, grown in blocks of 65,536; of a kind that needs no ranks.

    Blocks are read from the folder ``cache``. With ``write`` a missing or damaged block is generated whole
    and left there for the next run; without it only the tokens asked for are generated.
    Raises ValueError where a token cannot have ``top_k`` distinct experts.
    """
    if not 0 < shape.top_k <= shape.experts:
        raise ValueError(
            f"shape {shape.name}: top_k {shape.top_k} needs 1 to {shape.experts} distinct experts"
        )
    blocks = []
    for first in range(0, tokens, BLOCK_TOKENS):
        needed = min(BLOCK_TOKENS, tokens - first)
        blocks.append(_block(shape, seed, routing, first, needed, cache=cache, write=write)[:, :needed])
    if not blocks:
        blocks.append(_generate(shape, seed, routing, 0, 0))
    ids, raw = np.concatenate(blocks, axis=1)
    total = raw.sum(axis=1, keepdims=True, dtype=np.float64)
    return Trace(ids.astype(np.int64), (raw / total).astype(np.float32))


def _block(
    shape: Shape, seed: int, routing: Routing, first: int, needed: int, *, cache: Path | None, write: bool
) -> Block:
    """At least the first ``needed`` tokens of the block that starts at token ``first``."""
    if cache is None:
        return _generate(shape, seed, routing, first, needed)
    number = first // BLOCK_TOKENS
    file = cache / f"{routing.name}-s{seed}-e{shape.experts}-k{shape.top_k}-b{number:05d}.bin"
    block = _read(file, shape)
    if block is None and write:
        block = _generate(shape, seed, routing, first, BLOCK_TOKENS)
        # A cache that cannot be written costs time in the next run, never this one.
        with contextlib.suppress(OSError):
            _write(file, block)
    return _generate(shape, seed, routing, first, needed) if block is None else block


def _stored_dtype(shape: Shape) -> str:
    return "<u2" if shape.experts <= 2**16 else "<u4"


def _checksum(file: Path, payload: bytes) -> bytes:
    # The name is part of it: a renamed file is another block's.
    return blake2b(file.name.encode() + b"\0" + payload, digest_size=_CHECKSUM_BYTES).digest()


def _read(file: Path, shape: Shape) -> Block | None:
    """The block in a file, or None where there is none that can be trusted."""
    try:
        stored = file.read_bytes()
    except OSError:
        return None
    checksum, payload = stored[:_CHECKSUM_BYTES], stored[_CHECKSUM_BYTES:]
    dtype = np.dtype(_stored_dtype(shape))
    expected_bytes = 2 * BLOCK_TOKENS * shape.top_k * dtype.itemsize
    if len(payload) != expected_bytes or checksum != _checksum(file, payload):
        return None
    return np.frombuffer(payload, dtype).reshape(2, BLOCK_TOKENS, shape.top_k)


def _write(file: Path, block: Block) -> None:
    """Write under a name of this process's own, then rename: a reader sees a whole file or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    payload = block.tobytes()
    try:
        unfinished.write_bytes(_checksum(file, payload) + payload)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def _generate(shape: Shape, seed: int, routing: Routing, first: int, tokens: int) -> Block:
    """Ids and raw gates of tokens ``first`` to ``first + tokens``, from the counter."""
    counter = Counter(seed)
    block = np.empty((2, tokens, shape.top_k), dtype=_stored_dtype(shape))
    block[0] = choices.generate(routing, counter, shape, first, tokens)
    block[1] = counter.grid(first, tokens, shape.top_k, _GATE_STREAM) % np.uint64(_GATE_RANGE) + np.uint64(1)
    return block
