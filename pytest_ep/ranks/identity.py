"""Which rank this process is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_ep.ranks.launchers import as_torchrun

LARGEST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class Identity:
    """This process among the ranks of the run, as its launcher says."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    store_host: str = ""
    store_port: int = 0
    agent_hosts_store: bool = False
    run: str = ""

    @property
    def hosts_store(self) -> bool:
        """Whether this process is the rendezvous store's host, as no agent of torchrun is."""
        return self.rank == 0 and not self.agent_hosts_store


def read_identity(env: Mapping[str, str] = os.environ) -> Identity:
    """Read torchrun's variables, or srun's or mpirun's; alone without them.

    Raises ValueError, one line, where a variable is no number or cannot be, or no rendezvous is named.
    """
    env = as_torchrun(env)
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return Identity()
    numbers = {}
    for name, default in (
        ("RANK", None),
        ("WORLD_SIZE", None),
        ("LOCAL_RANK", env["RANK"]),
        ("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]),
        ("MASTER_PORT", "0"),
    ):
        text = env.get(name, default) or ""
        if not text.isdecimal():
            raise ValueError(f"{name}={text!r} in the environment is no number: launch with torchrun")
        numbers[name] = int(text)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        said = f"RANK={numbers['RANK']} in the environment is not below WORLD_SIZE={numbers['WORLD_SIZE']}"
        raise ValueError(f"{said}: launch with torchrun")
    if numbers["LOCAL_WORLD_SIZE"] < 1:
        raise ValueError("LOCAL_WORLD_SIZE=0 in the environment is below 1: launch with torchrun")
    if numbers["WORLD_SIZE"] > 1 and not (env.get("MASTER_ADDR") and numbers["MASTER_PORT"]):
        raise ValueError("WORLD_SIZE is set but MASTER_ADDR or MASTER_PORT is not: launch with torchrun")
    if numbers["MASTER_PORT"] > LARGEST_PORT:
        raise ValueError(f"MASTER_PORT={numbers['MASTER_PORT']} in the environment is above {LARGEST_PORT}")
    return Identity(
        rank=numbers["RANK"],
        size=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        local_size=numbers["LOCAL_WORLD_SIZE"],
        store_host=env.get("MASTER_ADDR", ""),
        store_port=numbers["MASTER_PORT"],
        agent_hosts_store=env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true",
        run=f"{env.get('TORCHELASTIC_RUN_ID', 'run')}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )
