"""Versions that only the loaded libraries know: what a process uses is not always what it was built with."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path

_NCCL = re.compile(r"\S*/lib[nr]ccl\.so[.\d]*$", re.MULTILINE)
"""NCCL, or AMD's RCCL, but not what extends them (libnccl-net.so, libnccl_ep.so)."""

Ask = Callable[[str, str], "int | None"]
"""Returns the number that a function of a library at a path stores; None where it does not answer."""


def nccl_loaded(maps: Path = Path("/proc/self/maps"), ask: Ask | None = None) -> list[str]:
    """Return the version of each NCCL that is mapped into this process, one a file.

    More than one entry means that two copies run side by side; none that NCCL is not loaded, or is linked
    into torch itself. ``maps`` and ``ask`` stand in for this process's mappings and for asking a library.
    """
    try:
        files = sorted(set(_NCCL.findall(maps.read_text())))
    except OSError:  # no Linux
        return []
    numbers = [(ask or _stored)(file, "ncclGetVersion") for file in files]
    return [_dotted(number) for number in numbers if number]


def cuda_driver(ask: Ask | None = None) -> str | None:
    """Return the newest CUDA that the driver's library speaks, as ``13.0``; None without a driver."""
    number = (ask or _loaded_and_stored)("libcuda.so.1", "cuDriverGetVersion")
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _dotted(number: int) -> str:
    """Undo NCCL_VERSION of nccl.h: X*1000 + Y*100 + Z up to 2.8, X*10000 + Y*100 + Z from 2.9."""
    major, rest = divmod(number, 10000 if number >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _stored(library: str, function: str, mode: int = os.RTLD_NOLOAD | os.RTLD_LAZY) -> int | None:
    """Ask a library that is loaded already: a second copy would be asked in vain."""
    number = ctypes.c_int(0)
    try:
        failed = getattr(ctypes.CDLL(library, mode=mode), function)(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else number.value


def _loaded_and_stored(library: str, function: str) -> int | None:
    return _stored(library, function, ctypes.DEFAULT_MODE)
