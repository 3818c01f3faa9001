"""srun's and mpirun's variables, said as torchrun says them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from zlib import crc32

MPI = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Rank, size, local rank and local size: of Open MPI; of MPICH and Intel MPI."""
FIRST_PORT, PORTS = 20_000, 10_000
"""Below the ports that Linux gives to those who ask for any."""


def as_torchrun(env: Mapping[str, str]) -> Mapping[str, str]:
    """Return torchrun's variables where srun or mpirun started several ranks, else ``env`` as it is.

    MASTER_ADDR and MASTER_PORT, where given, stand. Else the host is that of the first task, or this one
    where it has all ranks, and the port is derived from the job. Raises ValueError, one line, where the host
    of rank 0 is not known.
    """
    if "RANK" in env:
        return env
    return _srun(env) or _mpirun(env) or env


def is_launched(env: Mapping[str, str]) -> bool:
    """Whether a launcher has started ranks, of which this process is one."""
    try:
        return "RANK" in as_torchrun(env)
    except ValueError:
        return True


def _srun(env: Mapping[str, str]) -> dict[str, str]:
    # SLURM_NTASKS alone would not do: a batch script has it, too, and is one process.
    size = env.get("SLURM_STEP_NUM_TASKS", "1")
    if size == "1" or "SLURM_PROCID" not in env:
        return {}
    by_host = _expanded(env.get("SLURM_STEP_TASKS_PER_NODE", size))
    host = int(env.get("SLURM_NODEID", "0"))
    job = f"slurm-{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": env.get("SLURM_LOCALID", ""),
        "LOCAL_WORLD_SIZE": by_host[host] if host < len(by_host) else "",
        "MASTER_ADDR": env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", "localhost")),
        "MASTER_PORT": env.get("MASTER_PORT") or _port(job),
        "TORCHELASTIC_RUN_ID": job,
    }


def _mpirun(env: Mapping[str, str]) -> dict[str, str]:
    names = next((names for names in MPI if all(name in env for name in names)), None)
    if names is None or env[names[1]] == "1":
        return {}
    rank, size, local_rank, local_size = (env[name] for name in names)
    here = local_size == size
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    if not here and not (env.get("MASTER_ADDR") and (job or env.get("MASTER_PORT"))):
        raise ValueError(
            "mpirun over several hosts: set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port of it"
        )
    job = f"mpi-{job or (os.getppid() if here else '')}"
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_ADDR": env.get("MASTER_ADDR") or "127.0.0.1",
        "MASTER_PORT": env.get("MASTER_PORT") or _port(job),
        "TORCHELASTIC_RUN_ID": job,
    }


def _expanded(tasks: str) -> list[str]:
    """Tasks of each host: ``4(x2),3`` is 4, 4, 3."""
    counts = (re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in tasks.split(","))
    return [found[1] for found in counts if found for _ in range(int(found[2] or 1))]


def _first_host(hosts: str) -> str:
    """The first host of Slurm's list: ``gpu[07-09,12],cpu1`` begins with gpu07."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else hosts


def _port(job: str) -> str:
    return str(FIRST_PORT + crc32(job.encode()) % PORTS)
