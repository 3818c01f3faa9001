"""What an installed FlashInfer wheel says of itself: read from its metadata and files, never imported."""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.version import InvalidVersion
from packaging.version import Version

from pytest_ep.matrix.cells import Skip
from pytest_ep.matrix.shapes import Shape

PYTHON = "flashinfer-python"
PREBUILT = ("flashinfer-jit-cache", "flashinfer-cubin")
RECORDED = (PYTHON, *PREBUILT, "apache-tvm-ffi", "torch")
"""Distributions that do the work or decide which kernels do."""

FP32_SINCE = Version("0.6.16rc1")
"""Upstream's change of the accumulator: 0.6.15.post1's kernels add in BF16, those of 0.6.16rc3 in FP32."""

PACKED_BELOW = Version("0.7.2")
"""Receive planes lie end to end and are stored in units of the row alone; seen up to 0.7.0."""
PADDED_SINCE = Version("0.7.4")
"""Receive planes begin at multiples of 128 bytes."""

_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """What the compiled kernels take; ``even_experts``: a number of experts that ep_size divides."""

    top_ks: tuple[int, ...]
    max_ranks: int
    even_experts: bool


_OLD_TOP_KS = (1, 2, 4, 6, 8, 10, 16, 22)
_NEW_TOP_KS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)
_TABLE = (
    (Version("0.7.4"), Limits((1, 2, 3, *_NEW_TOP_KS[2:]), 256, even_experts=True)),
    (FP32_SINCE, Limits(_NEW_TOP_KS, 64, even_experts=False)),
    (Version("0"), Limits(_OLD_TOP_KS, 64, even_experts=True)),
)
"""By first version, newest first: for what an installation's own files do not say."""

_KERNELS = "flashinfer/data/csrc/nv_internal/tensorrt_llm/kernels"
_KERNEL_FILES = (
    f"{_KERNELS}/communicationKernels/moeAlltoAllKernels",
    f"{_KERNELS}/moe/communication/moeAlltoAllKernels",
)
_UNEVEN_EXPERTS = (
    (
        "flashinfer/comm/trtllm_moe_alltoall.py",
        "flashinfer/data/csrc/trtllm_moe_alltoall.cu",
        "num_experts must be divisible by ep_size",
    ),
    (
        "flashinfer/moe_ep/__init__.py",
        "flashinfer/moe_ep/core/comm/communication.py",
        "divisible by the EP size",
    ),
)
"""Of the first class that is there: where it would refuse an uneven number of experts, and in which words."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """An installation: its distributions' versions by name, and its limits.

    ``version`` and ``limits`` are None where flashinfer-python's version says nothing.
    """

    versions: Mapping[str, str]
    version: Version | None
    limits: Limits | None


def read(path: Sequence[str] | None = None) -> Wheel | None:
    """The installation on ``path`` (sys.path), or None without flashinfer-python."""
    found = {name: found for name in RECORDED if (found := _distribution(name, path)) is not None}
    if PYTHON not in found:
        return None
    versions = {name: str(distribution.version) for name, distribution in found.items()}
    version = _parse(versions[PYTHON])
    return Wheel(versions, version, _limits(found[PYTHON], version) if version else None)


@functools.cache
def installed() -> Wheel | None:
    """The installation of this process."""
    return read()


def refusal(wheel: Wheel | None, shape: Shape, ep_size: int, tokens: int) -> Skip | None:
    """Why the installation cannot run a case of ``tokens`` tokens per rank, or None."""
    if wheel is None:
        return Skip("flashinfer-missing", f"{PYTHON} is not installed: pip install {PYTHON}")
    name = f"{PYTHON} {wheel.versions[PYTHON]}"
    if wheel.version is None or wheel.limits is None:
        reason = f"{name} has a version that does not say which arithmetic it has: install a release"
        return Skip("flashinfer-version", reason)
    if mixed := _mixed(wheel.versions, wheel.version):
        return Skip("flashinfer-mixed", mixed)
    limits = wheel.limits
    if shape.top_k not in limits.top_ks:
        taken = ", ".join(map(str, limits.top_ks))
        reason = f"top_k {shape.top_k} is not compiled into {name}, which takes {taken}"
        return Skip("top-k-not-compiled", reason)
    if ep_size > limits.max_ranks:
        return Skip("too-many-ranks", f"{name} takes at most {limits.max_ranks} ranks, not {ep_size}")
    if limits.even_experts and shape.experts % ep_size:
        reason = f"{name} needs as many experts on each rank: {shape.experts} on {ep_size} ranks are not"
        return Skip("uneven-experts", reason)
    if misaligned := _misaligned(wheel.version, shape, ep_size * tokens):
        return Skip("row-alignment", f"{misaligned} in {name}")
    return None


def reduction(version: Version) -> str:
    """The reduction of a version's combine: a name from ``oracle/reduction.py``."""
    return "rank-sum-fp32" if version >= FP32_SINCE else "topk-slot-tree"


def is_read(version: Version) -> bool:
    """Whether ``reduction`` rests on published kernels: of a development build it is a guess by order."""
    return not version.is_devrelease


def is_same(text: str, version: Version) -> bool:
    """Whether ``text`` is that version, whatever follows a +."""
    parsed = _parse(text)
    return parsed is not None and parsed.public == version.public


def _distribution(name: str, path: Sequence[str] | None) -> metadata.Distribution | None:
    where = sys.path if path is None else list(path)
    return next(iter(metadata.distributions(name=name, path=where)), None)


def _parse(text: str) -> Version | None:
    """None for what is no version, and for 0.0.0, which a source tree has that does not know its own."""
    try:
        version = Version(text)
    except InvalidVersion:
        return None
    return version if any(version.release) else None


def _mixed(versions: Mapping[str, str], version: Version) -> str:
    """Prebuilt kernels must be of this very version; what follows a + only says for which CUDA."""
    for name in PREBUILT:
        if name in versions and not is_same(versions[name], version):
            return (
                f"{PYTHON} {versions[PYTHON]} beside {name} {versions[name]}: results would be filed "
                f"under one version and come from another; install both alike, or uninstall {name}"
            )
    return ""


def _misaligned(version: Version, shape: Shape, rows: int) -> str:
    """Ids lie where ``rows`` tokens end, which must be a multiple of the unit that ids are stored in.

    Weights, whose rows are as long as those of ids, are then aligned too.
    """
    if version >= PADDED_SINCE:
        return ""
    row = _ID_BYTES * shape.top_k
    unit = math.gcd(row, 16) if version < PACKED_BELOW else _ID_BYTES
    end = rows * 2 * shape.hidden
    if end % unit == 0:
        return ""
    return (
        f"{rows} rows of {2 * shape.hidden} bytes end {end % unit} bytes past a multiple of {unit}, "
        f"and the {row}-byte rows of expert ids behind them would be misaligned stores"
    )


def _limits(distribution: metadata.Distribution, version: Version) -> Limits:
    """What the files say, and the table for the rest."""
    known = next(limits for first, limits in _TABLE if version >= first)
    source = header = ""
    for file in _KERNEL_FILES:
        source = source or _text(distribution, f"{file}.cu")
        header = header or _text(distribution, f"{file}.h")
    switch = re.search(r"#define SWITCH_TOP_K\b(?:.*\\\n)*", source)
    cases = sorted(int(value) for value in re.findall(r"\bcase (\d+):", switch[0] if switch else ""))
    ranks = re.search(r"\bkMaxRanks = (\d+);", header)
    refuser, words = next(
        (
            (_text(distribution, file), words)
            for of, file, words in _UNEVEN_EXPERTS
            if _text(distribution, of)
        ),
        ("", ""),
    )
    return Limits(
        top_ks=tuple(cases) or known.top_ks,
        max_ranks=int(ranks[1]) if ranks else known.max_ranks,
        even_experts=words in refuser if refuser else known.even_experts,
    )


def _text(distribution: metadata.Distribution, file: str) -> str:
    try:
        with open(str(distribution.locate_file(file)), encoding="utf-8", errors="replace") as opened:
            return opened.read()
    except OSError:
        return ""
