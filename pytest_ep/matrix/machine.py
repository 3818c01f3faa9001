"""What this machine is, found without torch."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Protocol
from typing import TypeVar

if TYPE_CHECKING:
    from pytest_ep.matrix.platforms import Platforms

COMMAND_TIMEOUT = 10.0
"""Seconds; nvidia-smi takes several on a host without the persistence daemon."""

Command = Callable[[Sequence[str]], "str | None"]
"""Runs a command; returns its standard output, or None where it is missing, fails or takes too long."""

_AMD_VENDOR = "0x1002"
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_VENDOR_WORDS = re.compile(r"^(nvidia|amd|instinct|\s)+\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Machine:
    """The node at hand. ``devices`` counts visible accelerators; a machine without one is a ``cpu``."""

    sku: str
    devices: int
    product: str
    driver: str = ""


class HasUuid(Protocol):
    """A device as its driver lists it."""

    @property
    def uuid(self) -> str:
        """``GPU-...``, empty where the driver names none."""
        ...


Listed = TypeVar("Listed", bound=HasUuid)


@dataclass(frozen=True, slots=True)
class _Device:
    product: str
    uuid: str
    driver: str


def detect(
    platforms: Platforms,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    command: Command | None = None,
) -> Machine:
    """The machine at hand: the sku that its first visible accelerator matches.

    NVIDIA devices come from nvidia-smi or, without it, from /proc; AMD's from sysfs. An accelerator that no
    sku lists gets a sku named after it. ``environ``, ``root`` and ``command`` stand in for this process's
    environment, the file system and the way to run a command.
    """
    environ = os.environ if environ is None else environ
    nvidia = _from_nvidia_smi(command or run_command) or _from_proc(root)
    devices = visible(nvidia, environ.get("CUDA_VISIBLE_DEVICES"))
    if not nvidia:
        chosen = next((environ[name] for name in VISIBLE if name in environ), None)
        devices = visible(_from_sysfs(root), chosen)
    if not devices:
        return Machine("cpu", 0, "cpu")
    first = devices[0]
    sku = platforms.match(first.product) or sku_name(first.product)
    return Machine(sku, len(devices), first.product, first.driver)


def sku_name(product: str) -> str:
    """An identifier for a product that no sku lists: ``NVIDIA A100-SXM4-80GB`` becomes ``a100_sxm4_80gb``."""
    name = re.sub(r"[^a-z0-9]+", "_", _VENDOR_WORDS.sub("", product).lower()).strip("_")
    return name if name[:1].isalpha() else f"gpu_{name}".rstrip("_")


def run_command(argv: Sequence[str]) -> str | None:
    """Standard output of a command, or None where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_TIMEOUT, check=False)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None


def visible(devices: list[Listed], chosen: str | None) -> list[Listed]:
    """The devices that a ``*_VISIBLE_DEVICES`` value leaves: as the drivers do, up to its first bad entry."""
    if chosen is None:
        return devices
    left: list[Listed] = []
    for entry in (part.strip() for part in chosen.split(",")):
        if entry.isascii() and entry.isdigit():
            found = devices[int(entry) : int(entry) + 1]
        elif entry.startswith("MIG-"):
            found = devices[:1]
        else:
            found = [device for device in devices if entry and device.uuid.startswith(entry)][:1]
        if not found:
            break
        left += found
    return left


def _from_nvidia_smi(command: Command) -> list[_Device]:
    out = command(["nvidia-smi", "--query-gpu=name,uuid,driver_version", "--format=csv,noheader"])
    rows = [[field.strip() for field in line.split(",")] for line in (out or "").splitlines()]
    return [_Device(*row) for row in rows if len(row) == 3]


def _from_proc(root: Path) -> list[_Device]:
    # A container that was granted no device can still see the host's /proc.
    if not (root / "dev/nvidiactl").exists():
        return []
    version = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _text(root / "proc/driver/nvidia/version"))
    driver = version.group(1) if version else ""
    devices = []
    for file in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        fields = dict(line.partition(":")[::2] for line in _text(file).splitlines())
        uuid = fields.get("GPU UUID", "").strip()
        devices.append(_Device(fields.get("Model", "").strip() or "NVIDIA GPU", uuid, driver))
    return devices


def _from_sysfs(root: Path) -> list[_Device]:
    # Only accelerators name their product; a laptop's integrated GPU has a KFD node but no name.
    cards = (file.parent for file in sorted(root.glob("sys/class/drm/card*/device/product_name")))
    amd = (card for card in cards if _text(card / "vendor").strip() == _AMD_VENDOR)
    products = [name for card in amd if (name := _text(card / "product_name").strip())]
    if not products or not (root / "dev/kfd").exists():
        return []
    nodes = root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")
    computing = [node for node in nodes if re.search(r"^simd_count [1-9]", _text(node), re.MULTILINE)]
    driver = _text(root / "sys/module/amdgpu/version").strip()
    # A partitioned device shows one node per partition, and each of them is a device to a program.
    return [_Device(products[0], "", driver)] * (len(computing) or len(products))


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
