"""The keyed counter that everything about routing is drawn from: no random generator, equal everywhere."""

from __future__ import annotations

import struct
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt


class Counter:
    """``counter(token, slot, attempt, stream)``: BLAKE2b with an 8-byte digest, as a little-endian integer.

    Its key is the seed as eight bytes, its message the four as uint64, all little-endian.
    """

    def __init__(self, seed: int) -> None:
        self._hash = partial(blake2b, digest_size=8, key=(seed % 2**64).to_bytes(8, "little"))

    def at(self, token: int, slot: int, attempt: int, stream: int) -> int:
        """One value, in [0, 2^64)."""
        message = struct.pack("<4Q", token, slot, attempt, stream)
        return int.from_bytes(self._hash(message).digest(), "little")

    def grid(self, first: int, tokens: int, slots: int, stream: int) -> npt.NDArray[np.uint64]:
        """The values [tokens, slots] of attempt 0 for tokens ``first`` to ``first + tokens``."""
        words = np.zeros((tokens, slots, 4), dtype="<u8")
        words[:, :, 0] = np.arange(first, first + tokens, dtype=np.uint64)[:, None]
        words[:, :, 1] = np.arange(slots, dtype=np.uint64)
        words[:, :, 3] = stream
        # One bytes object per message, made by numpy: slicing a buffer in Python costs a quarter more.
        messages: list[Any] = words.reshape(-1, 4).view("V32").ravel().tolist()
        digests = b"".join([self._hash(message).digest() for message in messages])
        return np.frombuffer(digests, "<u8").astype(np.uint64, copy=False).reshape(tokens, slots)
