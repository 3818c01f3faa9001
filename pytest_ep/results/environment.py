"""What a result file says about the machine and the software: facts, free of jitter.

pytest-benchmark warns at every comparison whose ``machine_info`` differs, so that holds hardware alone,
without names of hosts; what else holds for a run goes into ``commit_info``.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from collections.abc import MutableMapping
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

from pytest_ep import __version__
from pytest_ep.matrix.machine import Machine
from pytest_ep.results import libraries

if TYPE_CHECKING:
    from pytest_ep.results.record import JSON

NO_COMMIT = ("unknown", "unversioned")
"""What pytest-benchmark calls the commit of a folder that has none."""


def hardware(
    machine: Machine,
    link: str,
    link_gbps: float | None,
    ranks_by_host: Sequence[int],
    survey: Mapping[str, JSON],
) -> dict[str, JSON]:
    """Return what ``machine_info`` gains.

    ``link_gbps`` is the link's peak per direction in GB/s; ``ranks_by_host`` the ranks of each host in order;
    ``survey`` is ``topology.survey`` of rank 0's host.
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
        **survey,
    }


def drop_jitter(machine_info: MutableMapping[str, Any]) -> None:
    """Remove what differs between runs on like machines: the host's name and momentary clock rates.

    Where a processor's brand names no rate, pytest-benchmark's source gives the rate of the moment as the
    advertised one; where it does, the brand says it. The host's name joins the software.
    """
    machine_info.pop("node", None)
    processor = machine_info.get("cpu") or {}
    for rate in ("hz_actual", "hz_actual_friendly", "hz_advertised", "hz_advertised_friendly"):
        processor.pop(rate, None)


def admit_unknown(commit_info: MutableMapping[str, Any]) -> None:
    """Take back "not dirty" where pytest-benchmark found no commit that could be."""
    if commit_info.get("id") in NO_COMMIT:
        commit_info["dirty"] = None


def software(
    backends: Mapping[str, Mapping[str, str]], started: Mapping[str, JSON] | None = None
) -> dict[str, JSON]:
    """Return what ``commit_info`` gains; ``backends`` are each transport's ``versions`` by its name.

    torch is asked only where it is loaded, as it is wherever a transport ran; elsewhere, and in a build
    without CUDA or NCCL, the version is null. ``nccl`` is what torch was built with, ``nccl_loaded`` what
    this process runs; ``cuda_driver`` the newest CUDA of the driver. ``started`` says how the run was.
    """
    return {
        "python": platform.python_version(),
        "pytest_ep": __version__,
        **_torch(),
        "nccl_loaded": [*libraries.nccl_loaded()],
        "cuda_driver": libraries.cuda_driver(),
        "backends": {name: dict(versions) for name, versions in sorted(backends.items())},
        "host": platform.node(),
        **(started or {}),
    }


def _torch() -> dict[str, JSON]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {"torch": None, "cuda": None, "hip": None, "nccl": None}
    cuda, hip, nccl = torch.version.cuda, torch.version.hip, None
    if (cuda or hip) and torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    return {"torch": str(torch.__version__), "cuda": cuda, "hip": hip, "nccl": nccl}
