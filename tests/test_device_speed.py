"""The device's clock and what holds it back, as NVML and nvidia-smi say it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_ep.timing.device import Speed
from pytest_ep.timing.device import by_nvidia_smi
from pytest_ep.timing.device import by_nvml
from pytest_ep.timing.device import figures
from pytest_ep.timing.device import named

UUID = "GPU-1"
FAST = Speed(1980, ())


def refusing(*_: object) -> int:
    raise RuntimeError("NVMLError_NotSupported")


def nvml(**changes: Any) -> Any:
    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": {UUID: "handle"}.__getitem__,
        "nvmlDeviceGetClockInfo": lambda handle, clock: {("handle", 1): 1980}[handle, clock],
        "nvmlDeviceGetCurrentClocksThrottleReasons": {"handle": 0x4 | 0x1}.__getitem__,
    }
    return SimpleNamespace(**answers | changes)


def read(reader: Callable[[], Speed | None] | None) -> Speed | None:
    assert reader is not None
    return reader()


def test_nvml_gives_the_clock_and_the_reasons() -> None:
    assert read(by_nvml(UUID, nvml())) == Speed(1980, ("power cap",))


def test_nvml_is_asked_by_the_newer_name_where_it_has_it() -> None:
    newer = nvml(nvmlDeviceGetCurrentClocksEventReasons={"handle": 0x40}.__getitem__)
    assert read(by_nvml(UUID, newer)) == Speed(1980, ("hardware thermal slowdown",))


def test_nvml_that_is_not_there_or_does_not_know_the_device_is_no_reader() -> None:
    assert by_nvml(UUID, None) is None
    assert by_nvml("GPU-2", nvml()) is None
    assert by_nvml(UUID, nvml(nvmlInit=refusing)) is None


def test_nvml_that_ceases_to_answer_says_nothing() -> None:
    assert read(by_nvml(UUID, nvml(nvmlDeviceGetClockInfo=refusing))) is None


class Smi:
    """Knows one name of the reasons; keeps what it was asked."""

    def __init__(self, reasons: str, answer: str) -> None:
        self.reasons = reasons
        self.answer = answer
        self.asked: list[Sequence[str]] = []

    def __call__(self, argv: Sequence[str]) -> str | None:
        self.asked.append(argv)
        return self.answer if f"{self.reasons}.active" in argv[2] else None


@pytest.mark.parametrize("reasons", ["clocks_event_reasons", "clocks_throttle_reasons"])
def test_nvidia_smi_gives_the_same_by_either_name(reasons: str) -> None:
    smi = Smi(reasons, "1755, 0x0000000000000028\n")
    assert by_nvidia_smi(UUID, smi)() == Speed(1755, ("hardware slowdown", "software thermal slowdown"))
    assert smi.asked[-1][:2] == ["nvidia-smi", f"--id={UUID}"]


@pytest.mark.parametrize("answer", ["", "[N/A], [N/A]\n", "1980\n", "1980, [N/A]\n"])
def test_nvidia_smi_that_does_not_know_says_nothing(answer: str) -> None:
    assert by_nvidia_smi(UUID, Smi("clocks_event_reasons", answer))() is None


def test_idleness_and_chosen_clocks_are_no_throttling() -> None:
    assert named(0x1 | 0x2 | 0x10 | 0x100) == ()
    assert len(named(0x4 | 0x8 | 0x20 | 0x40 | 0x80)) == 5


def test_the_lowest_clock_and_every_reason_of_all_ranks_are_said() -> None:
    slow = Speed(1200, ("power cap",))
    assert figures([FAST, FAST], [FAST, slow]) == {
        "throttled": True,
        "throttle_reasons": ["power cap"],
        "sm_clock_mhz": [1980, 1200],
    }
    assert figures([FAST, None], [FAST, None])["throttled"] is False


def test_nothing_is_said_of_devices_that_are_not_there_or_do_not_answer() -> None:
    assert figures([], []) == {}
    assert figures([None], [FAST]) == {}
