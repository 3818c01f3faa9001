"""srun's and mpirun's variables, said as torchrun says them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
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
MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_KVSNAME")
"""What names a job alike on all its hosts, where the launcher says it at all."""
PROXY = "hydra_pmi_proxy"
"""The process of MPICH and Intel MPI that starts the ranks of one host."""
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
    # Ranks that mpirun starts through srun have Slurm's variables, too: of the step that holds its daemons.
    names = next((names for names in MPI if all(name in env for name in names)), None)
    return (_mpirun(env, names) if names else _srun(env)) or env


def is_launched(env: Mapping[str, str]) -> bool:
    """Whether a launcher has started ranks, of which this process is one."""
    try:
        return "RANK" in as_torchrun(env)
    except ValueError:
        return True


def _srun(env: Mapping[str, str]) -> dict[str, str]:
    # SLURM_NTASKS alone would not do: a batch script has it, too, and is one process.
    size = env.get("SLURM_STEP_NUM_TASKS", "1")
    if size == "1" or "SLURM_PROCID" not in env or _is_shell(env):
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


def _is_shell(env: Mapping[str, str]) -> bool:
    """Whether this is below ``srun --pty bash``, whose other tasks have ended: no ranks of one job.

    What srun starts from that shell inherits the variable, but not the terminal.
    """
    if "SLURM_PTY_PORT" not in env:
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _mpirun(env: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    if env[names[1]] == "1":
        return {}
    rank, size, local_rank, local_size = (env[name] for name in names)
    here = local_size == size
    job = next((env[name] for name in MPI_JOB if env.get(name)), "")
    if not here and not (env.get("MASTER_ADDR") and (job or env.get("MASTER_PORT"))):
        raise ValueError(
            "mpirun over several hosts: set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port of it"
        )
    job = job or env.get("MASTER_PORT") or env.get("PMI_PORT") or _proxy()
    if not job:
        raise ValueError("mpirun names no job that all its ranks know: set MASTER_PORT to a free port")
    job = f"mpi-{job}"
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_ADDR": env.get("MASTER_ADDR") or "127.0.0.1",
        "MASTER_PORT": env.get("MASTER_PORT") or _port(job),
        "TORCHELASTIC_RUN_ID": job,
    }


def _proxy() -> str:
    """The id of the nearest ancestor that starts ranks, or "": a script around each rank lies below it."""
    pid = os.getpid()
    while pid > 1:
        try:
            before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        except OSError:
            return ""
        if before.partition("(")[2] == PROXY:
            return str(pid)
        pid = int(after.split()[1])
    return ""


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
