"""How the GPUs of this host hang together, and its RDMA devices: from nvidia-smi and sysfs, without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_ep.matrix.machine import Command
from pytest_ep.matrix.machine import run_command
from pytest_ep.matrix.machine import visible
from pytest_ep.results.natural import natural

if TYPE_CHECKING:
    from pytest_ep.results.record import JSON

_QUERY = "--query-gpu=index,uuid,memory.total,pci.bus_id"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
"""The header's underline, which nvidia-smi also writes into a pipe."""


@dataclass(frozen=True, slots=True)
class _Gpu:
    index: str
    uuid: str
    memory_mib: str
    bus: str


def survey(
    environ: Mapping[str, str], root: Path = Path("/"), command: Command = run_command
) -> dict[str, JSON]:
    """Return memory, NUMA nodes and links of the visible GPUs, in their order, and the RDMA devices.

    ``memory_mib`` is the first GPU's; ``gpu_links`` has one line a GPU and ``nic_links`` one a NIC, of the
    link types that ``nvidia-smi topo -m`` names (NV18, PIX, SYS and so on). What does not answer is null or
    empty; only NVIDIA's GPUs are asked. Bus ids and serials are left out: they differ between like hosts.
    ``root`` and ``command`` stand in for the file system and the way to run a command.
    """
    gpus = visible(_gpus(command), environ.get("CUDA_VISIBLE_DEVICES"))
    table = _table(command(["nvidia-smi", "topo", "-m"]) or "") if gpus else {}
    names = [f"GPU{gpu.index}" for gpu in gpus]
    rows = [table.get(name, {}) for name in names]
    nics = [name for name in table if not re.fullmatch(r"GPU\d+", name)]
    return {
        "memory_mib": int(gpus[0].memory_mib) if gpus and gpus[0].memory_mib.isdecimal() else None,
        "numa_nodes": [_numa_node(root, gpu.bus) for gpu in gpus],
        "gpu_links": [" ".join(row.get(name, "?") for name in names) for row in rows if row],
        "nic_links": {nic: " ".join(row.get(nic, "?") for row in rows) for nic in nics},
        "rdma": rdma(root),
    }


def rdma(root: Path = Path("/")) -> dict[str, JSON]:
    """Return each RDMA device's ports, as ``InfiniBand 400 Gb/sec (4X NDR)``, by its name."""
    devices = sorted(root.glob("sys/class/infiniband/*"), key=lambda path: natural(path.name))
    return {device.name: [_port(port) for port in sorted(device.glob("ports/*"))] for device in devices}


def _port(port: Path) -> str:
    return f"{_text(port / 'link_layer')} {_text(port / 'rate')}".strip()


def _gpus(command: Command) -> list[_Gpu]:
    out = command(["nvidia-smi", _QUERY, "--format=csv,noheader,nounits"])
    rows = [[field.strip() for field in line.split(",")] for line in (out or "").splitlines()]
    return [_Gpu(*row) for row in rows if len(row) == 4]


def _table(text: str) -> dict[str, dict[str, str]]:
    """Return each device's links by its peers' names; a NIC's name is its own, where the legend has it."""
    lines = [line.split("\t") for line in _ESCAPES.sub("", text).splitlines()]
    header = next((cells for cells in lines if len(cells) > 1 and not cells[0].strip()), [])
    legend = dict(re.findall(r"^\s*(NIC\d+): (\S+)", text, re.MULTILINE))
    columns = [legend.get(cell.strip(), cell.strip()) for cell in header]
    found = {}
    for cells in lines:
        name = legend.get(cells[0].strip(), cells[0].strip())
        if name and name in columns:
            found[name] = dict(zip(columns, map(str.strip, cells), strict=False))
    return found


def _numa_node(root: Path, bus: str) -> int | None:
    # nvidia-smi writes the domain with eight digits, sysfs with four.
    node = _text(root / "sys/bus/pci/devices" / bus.lower()[-12:] / "numa_node")
    return int(node) if node.isdecimal() else None  # -1 where the firmware tells none


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
