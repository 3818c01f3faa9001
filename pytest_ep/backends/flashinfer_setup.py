"""What FlashInfer needs of a machine before its workspace can be mapped, and how it says no."""

from __future__ import annotations

import importlib
import re
import socket
import time
from collections.abc import Callable
from concurrent import futures
from typing import TYPE_CHECKING
from typing import Any
from typing import TypeVar

from pytest_ep.backends.base import BackendUnavailable

if TYPE_CHECKING:
    from pytest_ep.ranks.group import Ranks

BUILD_LIMIT = 900.0
"""Seconds that building the kernels may take; upstream's slowest needs three minutes on one core."""
PROGRESS_EVERY = 15.0
"""Seconds between lines that say that a build goes on."""

REFUSALS = (
    (
        r"pidfd_(open|getfd)\(.*errno 1\b",
        "needs-ptrace",
        "ranks may not take one another's memory handles (pidfd_getfd): add --cap-add=SYS_PTRACE to docker "
        "run, or set kernel.yama.ptrace_scope=0; flashinfer-python 0.6.16 and later do without",
    ),
    (
        r"pidfd_(open|getfd)\(.*errno 3\b",
        "needs-one-pid-namespace",
        "ranks do not see one another's processes: run them in one container, or with docker run --pid=host",
    ),
    (
        r"pidfd_(open|getfd)\(",
        "needs-pidfd",
        "ranks hand over memory handles by pidfd_getfd, which this kernel lacks: use Linux 5.6 or later",
    ),
    (
        r"NOT_PERMITTED|code=800\b|IMEX",
        "needs-imex",
        "GPU memory cannot be shared through fabric handles: give the container IMEX channel 0 "
        "(--device /dev/nvidia-caps-imex-channels/channel0) and run nvidia-imex on every node",
    ),
    (
        r"requires all ranks to share the same host|needs FABRIC handles",
        "needs-fabric",
        "the ranks are on hosts whose GPUs share no NVLink fabric: use the GPUs of one host or of one domain",
    ),
    (
        r"not supported on EP ranks|is not supported on this platform",
        "links-down",
        "the wheel finds a GPU without NVLink, or with one that is down: see nvidia-smi nvlink --status",
    ),
    (
        r"\[fd_exchange\]|AF_UNIX path too long",
        "needs-shared-tmpdir",
        "ranks hand over memory handles through sockets in $TMPDIR: give those of a host one short TMPDIR",
    ),
    (
        r"NOT_SUPPORTED|code=801\b",
        "no-peer-mapping",
        "the driver cannot map memory of one GPU on another here: see nvidia-smi topo -p2p rw",
    ),
    (
        r"JIT compilation is disabled",
        "kernels-not-built",
        "FLASHINFER_DISABLE_JIT is set and no kernels are prebuilt: install flashinfer-jit-cache of the same "
        "version, or unset it",
    ),
    (
        r"Could not find nvcc|No such file or directory: 'ninja'",
        "no-compiler",
        "the kernels are not built: install nvcc and ninja, or flashinfer-jit-cache of the same version",
    ),
)
"""What upstream's exception matches (the first one counts), a skip code, and what to grant or change."""

T = TypeVar("T")


def granted(work: Callable[[], T]) -> T:
    """Do ``work``. Raises BackendUnavailable for what machine or owner refuse; a fault passes through."""
    try:
        return work()
    except (RuntimeError, OSError) as error:
        for pattern, code, advice in REFUSALS:
            if re.search(pattern, str(error)):
                raise BackendUnavailable(code, f"{advice} (flashinfer: {_first_words(error)})") from None
        raise


def imported(work: Callable[[], T]) -> T:
    """Do ``work``, which imports. Raises BackendUnavailable where a library or writable cache is missing."""
    try:
        return work()
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendUnavailable(
            "flashinfer-import", f"flashinfer cannot be imported: {_first_words(error)}"
        ) from None


def check_peers(ranks: Ranks) -> None:
    """Map a few bytes of every other GPU that this host's ranks use, write them from here and read them back.

    This is how the transport reaches its peers. Raises BackendUnavailable for the first pair that refuses.
    """
    if ranks.device.type != "cuda":
        return
    ranks.synchronize()  # makes this device's context the current one
    own = ranks.device.index
    for other in sorted({rank % ranks.devices for rank in range(ranks.identity.local_size)} - {own}):
        if refused := _touch(own, other):
            reason = f"GPU {own} cannot write memory of GPU {other} ({refused}): see nvidia-smi topo -p2p rw"
            raise BackendUnavailable("no-peer-access", reason)


def _touch(own: int, other: int) -> str:
    """Write and read memory of device ``other`` from ``own``; return what refuses, or ""."""
    try:
        cuda: Any = importlib.import_module("cuda.bindings.driver")
    except ModuleNotFoundError:  # before cuda-python 12.9
        cuda = importlib.import_module("cuda.cuda")

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        status, *values = function(*arguments)
        if status != cuda.CUresult.CUDA_SUCCESS:
            raise _Refused(f"{function.__name__}: {status.name}")
        return values[0] if values else None

    memory = cuda.CUmemAllocationProp()
    memory.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    memory.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    memory.location.id = other
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = own
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    undo: list[tuple[Any, ...]] = []
    try:
        size = call(cuda.cuMemGetAllocationGranularity, memory, least)
        handle = call(cuda.cuMemCreate, size, memory, 0)
        undo.append((cuda.cuMemRelease, handle))
        address = call(cuda.cuMemAddressReserve, size, 0, 0, 0)
        undo.append((cuda.cuMemAddressFree, address, size))
        call(cuda.cuMemMap, address, size, 0, handle, 0)
        undo.append((cuda.cuMemUnmap, address, size))
        call(cuda.cuMemSetAccess, address, size, [access], 1)
        written = bytearray(b"\x5a" * 16)
        call(cuda.cuMemcpyHtoD, address, bytes(written), len(written))
        read = bytearray(len(written))
        call(cuda.cuMemcpyDtoH, read, address, len(read))
    except _Refused as refused:
        return str(refused)
    finally:
        for function, *arguments in reversed(undo):
            function(*arguments)
    return "" if read == written else "it reads back other bytes than were written"


class _Refused(Exception):
    """A call of the CUDA driver failed."""


def build_kernels(ranks: Ranks, kernels: str, version: str) -> float:
    """On one rank of each host build what ``flashinfer.jit.comm.<kernels>()`` specifies; return the seconds.

    Prebuilt or cached kernels are only loaded. The build runs in a thread of its own and this one says how
    long it has taken.
    """
    if ranks.identity.local_rank != 0:
        return 0.0
    spec = granted(getattr(importlib.import_module("flashinfer.jit.comm"), kernels))
    what = f"the FlashInfer {version} kernels ({spec.name}) on {socket.gethostname()}"
    began = time.perf_counter()
    if not spec.is_compiled:
        ranks.say(f"building {what}: the first use of a version takes up to minutes")
    with futures.ThreadPoolExecutor(1) as pool:
        build = pool.submit(spec.build_and_load)
        while not futures.wait([build], timeout=PROGRESS_EVERY).done:
            ranks.say(f"still building {what}, for {time.perf_counter() - began:.0f} s")
    granted(build.result)
    return time.perf_counter() - began


def _first_words(error: Exception) -> str:
    return re.split(r"[.:]?\s*\n|\. ", str(error).strip())[0][:200] or type(error).__name__
