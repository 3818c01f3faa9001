"""How a run was started: its arguments, the launcher, the environment variables that change behaviour."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pytest_ep.ranks.identity import Identity
from pytest_ep.ranks.launch import EXIT_FILE

if TYPE_CHECKING:
    from pytest_ep.results.record import JSON

CHANGE_BEHAVIOUR = {
    "CUDA_": "which GPUs and in what order, hardware queues, blocking launches, when kernels load",
    "DEEPEP_": "DeepEP",
    "DEEP_EP_": "DeepEP",
    "EP_": "DeepEP V2: GIN, whose communicator, checks that are off",
    "FI_": "libfabric under NVSHMEM and the NCCL plugins of EFA",
    "FLASHINFER_": "for which GPUs kernels are built, and how",
    "GLOO_": "the interface of the CPU transport",
    "GPU_MAX_HW_QUEUES": "how many queues of HIP run side by side",
    "HIP_": "which AMD GPUs",
    "HSA_": "AMD's runtime: fine-grained memory, copies without the copy engines",
    "LD_": "libraries that replace others",
    "MORI_": "MoRI",
    "NCCL_": "NCCL's algorithms, networks and memory; its EP library's and GIN's settings",
    "NVSHMEM_": "NVSHMEM's transports, heap and NICs",
    "OMP_": "threads of the CPU transport",
    "PYTEST_ADDOPTS": "arguments beside those of the command",
    "PYTORCH_": "torch's allocator, through which buffers are registered",
    "RCCL_": "RCCL, as NCCL",
    "ROCR_": "which AMD GPUs",
    "ROCSHMEM_": "rocSHMEM, as NVSHMEM",
    "TLLM_": "TensorRT-LLM's kernels within FlashInfer",
    "TORCH_": "torch's NCCL groups, its symmetric memory, its checks",
    "TRTLLM_": "TensorRT-LLM's kernels within FlashInfer: workspace, timeouts",
    "UCCL_": "UCCL: proxies, queues, batching",
    "UCX_": "UCX under NVSHMEM and MPI",
}
"""Starts of names, and what they change here."""

_LABELS = ("CUDA_VERSION", "NCCL_VERSION")
"""What NVIDIA's images say of themselves: nothing reads it, and another version may be loaded."""
_WHERE_KERNELS_ARE_KEPT = ("FLASHINFER_WORKSPACE_BASE",)
"""A folder of one machine: what is built there is the same anywhere."""
_ANEW_EACH_RUN = ("NCCL_COMM_ID", "NVSHMEM_BOOTSTRAP_UID_SESSION_ID")
_SECRET = re.compile(r"(^|_)(CREDENTIALS?|KEY|PASSWORD|SECRET|TOKEN)$")
_RESULT = "--benchmark-json"


def started(
    given: Iterable[str | os.PathLike[str]], identity: Identity, environ: Mapping[str, str]
) -> dict[str, JSON]:
    """Return what ``commit_info`` says of how this run was started with ``given`` as pytest's arguments."""
    return {
        "argv": [*arguments(given)],
        "launch": launch_line(given, identity, environ),
        "environment": {**variables(environ)},
    }


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what changes behaviour, by name; no labels, secrets, caches; nothing made anew each run."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(tuple(CHANGE_BEHAVIOUR))
        and name not in (*_LABELS, *_WHERE_KERNELS_ARE_KEPT, *_ANEW_EACH_RUN)
        and not _SECRET.search(name)
    }


def arguments(given: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return pytest's arguments without the result file, which is another one each time."""
    kept: list[str] = []
    takes_value = False
    for argument in map(str, given):
        if takes_value:
            takes_value = False
        elif argument == _RESULT:
            takes_value = True
        elif not argument.startswith(f"{_RESULT}="):
            kept.append(argument)
    return kept


def launch_line(
    given: Iterable[str | os.PathLike[str]], identity: Identity, environ: Mapping[str, str]
) -> str:
    """Return the command, rebuilt from what the launcher left in the environment.

    A rendezvous, which each launch has anew, is not in it.
    """
    words = [*_launcher(identity, environ), "-m", "pytest", *arguments(given)]
    if EXIT_FILE in environ and not any(word.startswith("--ep-nproc") for word in words):
        # It comes from a configuration file, from PYTEST_ADDOPTS or from a file of arguments.
        words.append(f"--ep-nproc={identity.size}")
    return shlex.join(words)


def _launcher(identity: Identity, environ: Mapping[str, str]) -> list[str]:
    """How the ranks were started, as the words before ``-m pytest``."""
    if EXIT_FILE in environ:
        return ["python"]
    nodes = -(-identity.size // identity.local_size)
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")  # 1 in an interactive step
    if "TORCHELASTIC_RUN_ID" in environ:
        several = [f"--nnodes={nodes}"] if nodes > 1 else []
        srun = ["srun", f"--nodes={nodes}", "--ntasks-per-node=1"] if tasks != "1" else []
        return [*srun, "torchrun", *several, f"--nproc-per-node={identity.local_size}"]
    if identity.size == 1:
        return ["python"]
    if {"OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"} & set(environ):  # srun sets PMI_SIZE, too
        return ["mpirun", "-n", str(identity.size), "python"]
    if tasks != "1":
        return ["srun", f"--nodes={nodes}", f"--ntasks-per-node={identity.local_size}", "python"]
    return [f"WORLD_SIZE={identity.size}", "python"]
