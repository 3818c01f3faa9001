"""What FlashInfer's refusals become, and what is asked of the CUDA driver."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_ep.backends import flashinfer_setup
from pytest_ep.backends import flashinfer_wires
from pytest_ep.backends.base import BackendUnavailable
from pytest_ep.backends.construction import agree
from pytest_ep.ranks.ballot import Ballot
from pytest_ep.ranks.group import Ranks
from pytest_ep.ranks.identity import Identity
from pytest_ep.ranks.pulse import Pulse

PIDFD = "pidfd_getfd(pidfd=9, fd=8) failed with errno {}: reason. More of it."
REFUSALS = [
    (PIDFD.format(1), "needs-ptrace"),
    (PIDFD.format(3), "needs-one-pid-namespace"),
    ("pidfd_open(17) failed with errno 3: No such process", "needs-one-pid-namespace"),
    (PIDFD.format(38), "needs-pidfd"),
    ("CUDA error code=800(b'CUDA_ERROR_NOT_PERMITTED')", "needs-imex"),
    ("CUDA error code=801(b'CUDA_ERROR_NOT_SUPPORTED')", "no-peer-mapping"),
    (
        "[MnnvlMemory] POSIX fd exchange via SCM_RIGHTS requires all ranks to share the same host, but a, b",
        "needs-fabric",
    ),
    ("[fd_exchange] timed out connecting to x/fd.sock", "needs-shared-tmpdir"),
    ("AF_UNIX path too long", "needs-shared-tmpdir"),
    ("NVLink backends are not supported on EP ranks [1]; see their logs", "links-down"),
    ("NVLinkOneSidedAlltoAll is not supported on this platform.", "links-down"),
    ("JIT compilation is disabled via FLASHINFER_DISABLE_JIT environment variable", "kernels-not-built"),
    ("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist", "no-compiler"),
    ("[Errno 2] No such file or directory: 'ninja'", "no-compiler"),
]
FAULTS = [
    "CUDA error: unspecified launch failure",
    "CUDA error code=2(b'CUDA_ERROR_OUT_OF_MEMORY')",
    "Ninja build failed. Ninja output:\nninja: build stopped: subcommand failed.",
    "Check failed: workspace first dim must equal ep_size",
    "Connection closed by peer",
]


def raising(error: Exception) -> Any:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(("text", "code"), REFUSALS)
@pytest.mark.parametrize("kind", [RuntimeError, OSError])
def test_a_refusal_becomes_a_skip_that_quotes_it(text: str, code: str, kind: type[Exception]) -> None:
    with pytest.raises(BackendUnavailable) as refusal:
        flashinfer_setup.granted(raising(kind(text)))
    assert refusal.value.code == code
    assert f"(flashinfer: {text.partition('. ')[0].rstrip('.')}" in refusal.value.reason.replace(".)", ")")
    assert "\n" not in refusal.value.reason


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_stays_a_fault(text: str) -> None:
    with pytest.raises(RuntimeError, match=text.splitlines()[0].partition("(")[0]) as fault:
        flashinfer_setup.granted(raising(RuntimeError(text)))
    assert str(fault.value) == text


def test_what_is_granted_is_returned() -> None:
    assert flashinfer_setup.granted(lambda: 5) == 5


@pytest.mark.parametrize("kind", [ImportError, ModuleNotFoundError, OSError, RuntimeError])
def test_a_wheel_that_cannot_be_imported_is_a_refusal(kind: type[Exception]) -> None:
    with pytest.raises(BackendUnavailable) as refusal:
        flashinfer_setup.imported(raising(kind("libcudart.so.13: cannot open\nmore")))
    assert refusal.value.code == "flashinfer-import"
    assert refusal.value.reason == "flashinfer cannot be imported: libcudart.so.13: cannot open"


class Driver(types.ModuleType):
    """Stands in for ``cuda.bindings.driver``: memory of one page, and a log of calls."""

    def __init__(self, fails: str = "", forgets: bool = False) -> None:
        super().__init__("cuda.bindings.driver")
        self.calls: list[str] = []
        self._memory = b""
        self._forgets = forgets
        for name, answer in (
            ("cuMemGetAllocationGranularity", 1 << 21),
            ("cuMemCreate", 77),
            ("cuMemAddressReserve", 4096),
            ("cuMemMap", None),
            ("cuMemSetAccess", None),
            ("cuMemcpyHtoD", None),
            ("cuMemcpyDtoH", None),
            ("cuMemUnmap", None),
            ("cuMemAddressFree", None),
            ("cuMemRelease", None),
        ):
            setattr(self, name, self._call(name, answer, name == fails))
        self.CUresult = types.SimpleNamespace(CUDA_SUCCESS=types.SimpleNamespace(name="CUDA_SUCCESS"))
        for name in ("CUmemAllocationProp", "CUmemAccessDesc"):
            setattr(self, name, lambda: types.SimpleNamespace(location=types.SimpleNamespace()))
        for name, value in (
            ("CUmemAllocationType", "CU_MEM_ALLOCATION_TYPE_PINNED"),
            ("CUmemLocationType", "CU_MEM_LOCATION_TYPE_DEVICE"),
            ("CUmemAccess_flags", "CU_MEM_ACCESS_FLAGS_PROT_READWRITE"),
            ("CUmemAllocationGranularity_flags", "CU_MEM_ALLOC_GRANULARITY_MINIMUM"),
        ):
            setattr(self, name, types.SimpleNamespace(**{value: value}))

    def _call(self, name: str, answer: Any, fails: bool) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if fails:
                return (types.SimpleNamespace(name="CUDA_ERROR_NOT_PERMITTED"),)
            if name == "cuMemCreate":
                self.calls.append(f"on {arguments[1].location.id}")
            if name == "cuMemSetAccess":
                self.calls.append(f"for {arguments[2][0].location.id}")
            if name == "cuMemcpyHtoD":
                self._memory = b"" if self._forgets else bytes(arguments[1])
            if name == "cuMemcpyDtoH":
                arguments[0][: len(self._memory)] = self._memory
            return (self.CUresult.CUDA_SUCCESS,) if answer is None else (self.CUresult.CUDA_SUCCESS, answer)

        call.__name__ = name
        return call


def peers(monkeypatch: pytest.MonkeyPatch, driver: Driver, devices: int, ranks: int, local_rank: int) -> None:
    """``check_peers`` of one rank."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    these = object.__new__(Ranks)
    these.device = torch.device("cuda", local_rank % devices)
    these.devices = devices
    these.identity = Identity(rank=local_rank, size=ranks, local_rank=local_rank, local_size=ranks)
    monkeypatch.setattr(these, "synchronize", lambda: None)
    flashinfer_setup.check_peers(these)


def test_a_step_of_construction_is_published_as_it_begins() -> None:
    ballot = Ballot(Identity(), None, Pulse())
    ranks: Any = SimpleNamespace(ballot=ballot, pulse=ballot.pulse, size=1)
    seen = agree(ranks, "mapping", lambda: (ballot.pulse.phase, ballot.pulse.steps))
    assert seen == [("mapping", 1)]


def test_memory_of_every_other_gpu_in_use_is_written_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    peers(monkeypatch, driver, devices=8, ranks=3, local_rank=1)
    assert [call for call in driver.calls if call[:2] in {"on", "fo"}] == ["on 0", "for 1", "on 2", "for 1"]
    for undone in ("cuMemUnmap", "cuMemAddressFree", "cuMemRelease"):
        assert driver.calls.count(undone) == 2


def test_ranks_that_share_one_gpu_have_no_peer_to_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    peers(monkeypatch, driver, devices=1, ranks=8, local_rank=5)
    assert driver.calls == []


def test_a_peer_that_refuses_is_named_and_everything_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(fails="cuMemSetAccess")
    with pytest.raises(BackendUnavailable) as refusal:
        peers(monkeypatch, driver, devices=2, ranks=2, local_rank=0)
    assert refusal.value.code == "no-peer-access"
    assert (
        "GPU 0 cannot write memory of GPU 1 (cuMemSetAccess: CUDA_ERROR_NOT_PERMITTED)"
        in refusal.value.reason
    )
    assert driver.calls[-3:] == ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]


def test_a_failed_allocation_releases_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(fails="cuMemCreate")
    with pytest.raises(BackendUnavailable, match="cuMemCreate: CUDA_ERROR_NOT_PERMITTED"):
        peers(monkeypatch, driver, devices=2, ranks=2, local_rank=0)
    assert driver.calls[-1] == "cuMemCreate"


def test_memory_that_does_not_keep_what_is_written_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailable, match="reads back other bytes"):
        peers(monkeypatch, Driver(forgets=True), devices=2, ranks=2, local_rank=0)


def test_a_communicator_that_the_wheel_finds_partial_is_named_at_construction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = type("CommBackend", (), dict.fromkeys(("Get_rank", "bcast", "reduce_scatter", "alltoall")))
    for name in ("flashinfer", "flashinfer.comm", "flashinfer.comm.mnnvl"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["flashinfer.comm.mnnvl"], "CommBackend", kind, raising=False)

    with pytest.raises(TypeError, match="communicators have alltoall, reduce_scatter, which ours lacks"):
        flashinfer_wires.communicator(None)  # type: ignore[arg-type]
