"""How fast the device was allowed to run: its SM clock, and what holds it back."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from pytest_ep.matrix.machine import Command
from pytest_ep.matrix.machine import run_command

SM_CLOCK = 1
"""NVML_CLOCK_SM."""
THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Of NVML's reasons those that slow a busy device down; the others are idleness and chosen clocks."""


@dataclass(frozen=True, slots=True)
class Speed:
    """A device's SM clock, MHz, and the reasons for which it is held back."""

    sm_clock_mhz: int
    throttles: tuple[str, ...]


def speed(device: torch.device) -> Speed | None:
    """Read a device's speed: through NVML where its Python module is there, else nvidia-smi; None without."""
    return _reader(device)()


@cache
def _reader(device: torch.device) -> Callable[[], Speed | None]:
    uuid = f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', '')}"
    return by_nvml(uuid, _module("pynvml")) or by_nvidia_smi(uuid)


def by_nvml(uuid: str, nvml: Any) -> Callable[[], Speed | None] | None:
    """Return a reader that asks NVML, or None where it does not know the device."""
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        newer = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        reasons = newer or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
    except Exception:  # without the module, or an NVMLError: whose class is the module's
        return None

    def read() -> Speed | None:
        try:
            return Speed(int(nvml.nvmlDeviceGetClockInfo(handle, SM_CLOCK)), named(int(reasons(handle))))
        except Exception:
            return None

    return read


def by_nvidia_smi(uuid: str, command: Command = run_command) -> Callable[[], Speed | None]:
    """Return a reader that asks nvidia-smi; drivers name the reasons by one of two names."""

    def read() -> Speed | None:
        for reasons in ("clocks_event_reasons", "clocks_throttle_reasons"):
            query = f"--query-gpu=clocks.sm,{reasons}.active"
            said = command(["nvidia-smi", f"--id={uuid}", query, "--format=csv,noheader,nounits"])
            clock, _, mask = (said or "").partition(",")
            try:
                return Speed(int(clock), named(int(mask, 16)))
            except ValueError:  # not there, or "[N/A]"
                continue
        return None

    return read


def named(mask: int) -> tuple[str, ...]:
    """Return the throttles of a mask of NVML."""
    return tuple(name for bit, name in THROTTLES.items() if mask & bit)


def figures(before: Sequence[Speed | None], after: Sequence[Speed | None]) -> dict[str, Any]:
    """Return what the rows say of the ranks' devices before and after timing; nothing where none answered."""
    rounds = [[speed for speed in ranks if speed is not None] for ranks in (before, after)]
    if not all(rounds):
        return {}
    reasons = dict.fromkeys(name for speeds in rounds for speed in speeds for name in speed.throttles)
    return {
        "throttled": bool(reasons),
        "throttle_reasons": list(reasons),
        "sm_clock_mhz": [min(speed.sm_clock_mhz for speed in speeds) for speeds in rounds],
    }


def _module(name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one distribution of this name warns of the other
            return importlib.import_module(name)
    except ImportError:
        return None
