"""Routing that was recorded in service: a file of expert ids [tokens, top_k], -1 where a choice is masked."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_ep.matrix.routing import Recording
from pytest_ep.matrix.shapes import Shape

KEYS = ("topk_ids", "expert_ids")
"""The arrays of a .npz file that are taken before its first one."""


def read(path: str) -> npt.NDArray[np.int64]:
    """The ids [tokens, top_k] of a .npy or .npz file.

    Raises ValueError with one line where it holds no such ids for any model.
    """
    ids = _loaded(path)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"its ids are {ids.dtype}, not integers")
    if ids.ndim != 2 or not ids.size:
        raise ValueError(f"its ids are {list(ids.shape)}, not [tokens, top_k]")
    if ids.dtype == np.uint64:  # what does not fit would turn negative
        ids = np.minimum(ids, np.iinfo(np.int64).max)
    return ids.astype(np.int64)


def describe(path: str, shapes: Iterable[Shape]) -> Recording:
    """What the plan must know of a file, which every model of ``shapes`` takes.

    Raises ValueError with one line that names the first row that is wrong.
    """
    ids = read(path)
    for shape in shapes:
        _check(ids, shape)
    chosen = (ids >= 0).any(axis=1)
    if not chosen.any():
        raise ValueError("every choice in it is -1: nothing would be sent")
    return Recording(len(ids), digest(ids), bool((ids < 0).any()), int(chosen.argmax()))


def digest(ids: npt.NDArray[np.int64]) -> str:
    """Hex digest of what a file holds, whatever its format."""
    content = repr(ids.shape).encode() + ids.astype("<i8", copy=False).tobytes()
    return blake2b(content, digest_size=8).hexdigest()


def _loaded(path: str) -> npt.NDArray[Any]:
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with found:
            key = next((key for key in (*KEYS, *found.files) if key in found.files), None)
            if key is None:
                raise ValueError("it holds no array")
            array: npt.NDArray[Any] = found[key]
            return array
    except FileNotFoundError:
        raise ValueError("no such file") from None
    except Exception as error:  # numpy, zipfile and the system each have their own
        text = str(error).partition("\n")[0]
        raise ValueError(f"no .npy or .npz file of plain numbers: {text}") from None


def _check(ids: npt.NDArray[np.int64], shape: Shape) -> None:
    if ids.shape[1] != shape.top_k:
        raise ValueError(f"it has {ids.shape[1]} choices a token, {shape.name} has top_k {shape.top_k}")
    row, column = _first((ids < -1) | (ids >= shape.experts))
    if row >= 0:
        known = f"{shape.name} has 0 to {shape.experts - 1}, and -1 is a masked choice"
        raise ValueError(f"row {row} has expert {ids[row, column]}, {known}")
    in_order = np.sort(ids, axis=1)
    row, column = _first((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0))
    if row >= 0:
        raise ValueError(f"row {row} has expert {in_order[row, column]} twice")


def _first(wrong: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Row and column of the first True, or -1 and -1."""
    places = np.argwhere(wrong)
    return (int(places[0, 0]), int(places[0, 1])) if len(places) else (-1, -1)
