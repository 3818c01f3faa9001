"""What a result file says about the machine and the software: facts, free of jitter.

pytest-benchmark warns at every comparison whose ``machine_info`` differs, so that holds hardware alone and
versions go into ``commit_info``.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from collections.abc import MutableMapping
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING
from typing import Any

from pytest_ep.matrix.machine import Machine

if TYPE_CHECKING:
    from pytest_ep.results.record import JSON


def hardware(
    machine: Machine, link: str, link_gbps: float | None, ranks_by_host: Sequence[int]
) -> dict[str, JSON]:
    """Return what ``machine_info`` gains.

    ``link_gbps`` is the link's peak per direction in GB/s; ``ranks_by_host`` the ranks of each host in order.
    """
    return {
        "sku": machine.sku,
        "product": machine.product,
        "devices": machine.devices,
        "driver": machine.driver,
        "link": link,
        "link_gbps": link_gbps,
        "ranks": sum(ranks_by_host),
        "ranks_by_host": list(ranks_by_host),
    }


def drop_jitter(machine_info: MutableMapping[str, Any]) -> None:
    """Remove the momentary clock rates that pytest-benchmark puts among the facts of the processor."""
    processor = machine_info.get("cpu") or {}
    for momentary in ("hz_actual", "hz_actual_friendly"):
        processor.pop(momentary, None)


def software(backends: Mapping[str, Mapping[str, str]]) -> dict[str, JSON]:
    """Return what ``commit_info`` gains; ``backends`` are each transport's ``versions`` by its name.

    torch is asked only where it is loaded, as it is wherever a transport ran; elsewhere, and in a build
    without CUDA or NCCL, the version is null.
    """
    return {
        "python": platform.python_version(),
        "pytest_ep": _installed("pytest-ep"),
        **_torch(),
        "backends": {name: dict(versions) for name, versions in sorted(backends.items())},
    }


def _torch() -> dict[str, JSON]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {"torch": None, "cuda": None, "nccl": None}
    nccl = None
    if torch.version.cuda and torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    return {"torch": str(torch.__version__), "cuda": torch.version.cuda, "nccl": nccl}


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
