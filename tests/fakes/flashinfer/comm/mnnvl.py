"""Symmetric memory: here each rank's own slice in host memory, and a folder that says who has mapped it."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any
from typing import ClassVar

import torch
from torch import Tensor

from .. import _device
from .. import _faults
from .._facts import FACTS
from ..fake import counts
from .comm_backend import CommBackend
from .mapping import Mapping

__all__ = ["CommBackend", "MnnvlConfig", "MnnvlMemory", "Record"]
if _faults.active("partial-communicator") is None:
    from .comm_backend import TorchDistBackend

    __all__ += ["TorchDistBackend"]

IMEX_HINT = (
    "FABRIC handles need IMEX channel 0 (/dev/nvidia-caps-imex-channels/channel0; pass it into containers "
    "with --device or NVIDIA_IMEX_CHANNELS=0) and, across hosts, the nvidia-imex service on every node of "
    "the NVLink domain."
)
NOT_PERMITTED = "CUDA error code=800(b'CUDA_ERROR_NOT_PERMITTED')"


@dataclass
class MnnvlConfig:
    """How memory is shared: over which communicator."""

    comm_backend: Any = None
    allocation_granularity: int = 0
    fabric_page_size: int = 1 << 29


@dataclass
class Record:
    """One allocation: this rank's bytes, and what the kernels keep in them between dispatch and combine.

    ``targets`` and ``slots`` [T, K]: destination rank and slot of each choice, -1 where the choice sends
    nothing; ``received``: filled slots of each plane.
    """

    comm: Any
    comm_rank: int
    comm_size: int
    own: Tensor
    folder: Path
    keeper: Any = None
    peers_mapped: bool = False
    rounds: int = 0
    targets: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    received: list[int] = field(default_factory=list)
    mapped: bool = True

    def mark_mapped(self) -> None:
        """Tell the peers that this rank's slice may be written."""
        slow = _faults.active("slow-map")
        if slow is not None:
            time.sleep(slow.number)
        (self.folder / f"mapped.{self.comm_rank}").touch()

    def check_peers(self) -> None:
        """Writing into a slice that its owner has not initialised is a launch failure."""
        if not self.peers_mapped:
            missing = [r for r in range(self.comm_size) if not (self.folder / f"mapped.{r}").exists()]
            if missing:
                _device.lose(_device.LAUNCH_FAILURE)
            self.peers_mapped = True


class MnnvlMemory:
    """An allocation of ``size`` bytes on each rank, visible to all; freed with the last reference."""

    initialized: ClassVar[bool] = False
    comm: ClassVar[Any] = None
    config: ClassVar[MnnvlConfig | None] = None
    allocated_map: ClassVar[dict[int, Record]] = {}

    def __init__(self, mapping: Mapping, size: int) -> None:
        comm = MnnvlMemory.get_comm(mapping)
        sizes = comm.allgather(size)
        assert all(other == size for other in sizes), "Not all rank allocating same size."
        keeper = tempfile.TemporaryDirectory(prefix="fake-flashinfer-") if comm.Get_rank() == 0 else None
        folder = comm.allgather(keeper.name if keeper else "")[0]
        _share_handles(comm)
        # all ones is NaN in every floating dtype: what nobody wrote must not look like data
        own = torch.full((size,), 0xFF, dtype=torch.uint8)
        self.ptr = own.data_ptr()
        self.segment_size = size
        record = Record(comm, comm.Get_rank(), comm.Get_size(), own, Path(folder), keeper)
        MnnvlMemory.allocated_map[self.ptr] = record
        counts.opened += 1

    def __del__(self) -> None:
        if not sys.is_finalizing() and hasattr(self, "ptr"):
            MnnvlMemory.close_mnnvl_memory(self.ptr)

    @property
    def mapped(self) -> bool:
        """Whether the allocation has its memory."""
        return MnnvlMemory.allocated_map[self.ptr].mapped

    def as_torch_strided_tensor(self, dtype: torch.dtype) -> Tensor:
        """[ranks, size]; every row is this rank's slice, as peers are reached by exchange."""
        record = MnnvlMemory.allocated_map[self.ptr]
        rows = record.comm_size + (_faults.active("wrong-group-size") is not None)
        workspace = record.own.view(dtype).unsqueeze(0).expand(rows, -1)
        if FACTS.name == "0.7.4":
            workspace.owner = self  # type: ignore[attr-defined]
        return workspace

    @staticmethod
    def initialize() -> None:
        """Make the device context."""
        _device.check()
        MnnvlMemory.initialized = True

    @staticmethod
    def set_comm_from_config(mapping: Mapping, config: MnnvlConfig) -> None:
        """Split the configured communicator; collective."""
        MnnvlMemory.config = config
        MnnvlMemory.comm = config.comm_backend.Split(0, mapping.tp_rank)

    @staticmethod
    def get_comm(mapping: Mapping) -> Any:
        """The communicator, by default MPI's, which nobody has."""
        if MnnvlMemory.comm is None:
            raise ImportError("mpi4py is not installed")
        return MnnvlMemory.comm

    @staticmethod
    def close_mnnvl_memory(ptr: int) -> None:
        """Unmap: what still looks at the memory reads garbage."""
        record = MnnvlMemory.allocated_map.pop(ptr)
        record.own.fill_(0xFF)
        if record.keeper is not None:
            record.keeper.cleanup()
        counts.closed += 1

    @staticmethod
    def supports_mnnvl() -> bool:
        """Whether every NVLink of this device is up."""
        return _faults.active("links-down") is None


def _share_handles(comm: Any) -> None:
    """Exchange what peers need for mapping; where a release fails alone, its peers wait, as here."""
    refused = _faults.active("imex-refused") is not None
    if FACTS.handles == "agreed":
        _share_agreed(comm, refused)
        return
    if refused:
        raise RuntimeError(NOT_PERMITTED)
    comm.allgather(socket.gethostname())
    if FACTS.handles == "pidfd":
        comm.allgather(os.getpid())
        if _faults.active("pidfd-refused") is not None:
            raise RuntimeError(
                "pidfd_getfd(pidfd=9, fd=8) failed with errno 1: Operation not permitted. Permission denied. "
                "If running in a container, try adding --cap-add=SYS_PTRACE to your docker run command."
            )
        if FACTS.name != "0.6.8":
            comm.barrier()
    else:
        _offer_descriptor()


def _offer_descriptor() -> None:
    late = _faults.active("fd-timeout")
    if late is not None:
        time.sleep(late.number)
        raise RuntimeError("[fd_exchange] timed out connecting to cuda_fd_xchg_1_0_x/fd.sock")


def _share_agreed(comm: Any, refused: bool) -> None:
    error = "the driver does not support FABRIC handles" if refused else None
    errors = comm.allgather((socket.gethostname(), error))
    if any(text for _, text in errors):
        lines = [f"rank {rank} on {host}: {text}" for rank, (host, text) in enumerate(errors) if text]
        raise RuntimeError(
            "[MNNVL] memory shared across hosts needs FABRIC handles within one NVLink domain:\n  "
            + "\n  ".join(lines)
            + "\n"
            + IMEX_HINT
        )
    _offer_descriptor()
