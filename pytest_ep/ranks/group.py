"""The torch.distributed groups of the run."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from datetime import timedelta
from queue import Empty
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from pytest_ep.ranks.ballot import Ballot
from pytest_ep.ranks.identity import Identity
from pytest_ep.ranks.pulse import Pulse
from pytest_ep.ranks.rendezvous import unreachable

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

CONNECT_LIMIT = 60.0
"""Seconds that a rank waits for the host of the rendezvous store to listen, and for an answer later."""
ANSWER_LIMIT = 20.0
"""Seconds in which what listens there must prove to be a store."""


def connect(identity: Identity, *, first: bool = True) -> Store | None:
    """Open a client of the run's rendezvous store; None for a run of one rank.

    Where no agent of torchrun hosts the store, rank 0's ``first`` client does. Raises pytest.UsageError where
    there is none.
    """
    if identity.size == 1:
        return None
    hosts = first and identity.hosts_store
    # torch's client tries a host that refuses several times over, each time for its whole limit.
    why = "" if hosts else unreachable(identity, CONNECT_LIMIT)
    opened = RuntimeError(why) if why else _opened(identity, hosts)
    if isinstance(opened, RuntimeError):
        raise pytest.UsageError(_no_rendezvous(identity, hosts, str(opened).partition("\n")[0]))
    opened.set_timeout(timedelta(seconds=CONNECT_LIMIT))
    return dist.PrefixStore(f"pytest_ep/{identity.run}", opened)  # type: ignore[attr-defined]


def _opened(identity: Identity, hosts: bool) -> Store | RuntimeError:
    """Return the store or torch's error. Where another service listens, torch's client waits for ever."""
    opened: SimpleQueue[Store | RuntimeError] = SimpleQueue()

    def run() -> None:
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                identity.store_host,
                identity.store_port,
                is_master=hosts,
                wait_for_workers=False,
                timeout=timedelta(seconds=ANSWER_LIMIT),
            )
        except RuntimeError as error:
            opened.put(error)
        else:
            opened.put(store)

    Thread(target=run, name="pytest-ep-connect", daemon=True).start()
    try:
        return opened.get(timeout=ANSWER_LIMIT)
    except Empty:
        return RuntimeError("what listens there is no rendezvous store")


def _no_rendezvous(identity: Identity, hosts: bool, why: str) -> str:
    does = "cannot hold the" if hosts else "finds no"
    said = f"rank {identity.rank} {does} rendezvous at {identity.store_host}:{identity.store_port}"
    if identity.agent_hosts_store:
        return f"{said}: torchrun's agent on that host holds it, and has ended or is cut off ({why})"
    said += ": set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port of it"
    return f"{said} ({why})" if hosts else f"{said}, unless rank 0 has ended and says why ({why})"


class Ranks:
    """This rank, its device, and the groups it shares with the others.

    The data group is NCCL where every rank has an accelerator of its own, gloo elsewhere; the control group
    is always gloo; ``ballot`` is the agreement channel, which needs neither; ``say`` prints a line on
    stderr at once, past pytest's capture.
    """

    def __init__(
        self,
        identity: Identity,
        store: Store | None,
        ballot: Ballot,
        *,
        devices: int,
        timeout: float,
        say: Callable[[str], None],
    ) -> None:
        self.identity = identity
        self.rank = identity.rank
        self.size = identity.size
        self.ballot = ballot
        self.devices = devices
        self.say = say
        self._store = store
        self._timeout = timedelta(seconds=timeout)
        self._generation = 0
        self._control: ProcessGroup | None = None
        self._nccl: ProcessGroup | None = None
        self._nccl_live: ProcessGroup | None = None
        self.device = torch.device("cpu")
        if devices:
            self.device = torch.device("cuda", identity.local_rank % devices)
            torch.cuda.set_device(self.device)
        self._build()

    @property
    def pulse(self) -> Pulse:
        """The main thread's sign of life."""
        return self.ballot.pulse

    @property
    def control(self) -> ProcessGroup:
        """The gloo group of all ranks."""
        if self._control is None:
            raise RuntimeError("the process group was given up after a fault")
        return self._control

    @property
    def group(self) -> ProcessGroup:
        """The group that carries a transport's data."""
        return self._nccl or self.control

    @property
    def oversubscribed(self) -> bool:
        """More ranks than accelerators on this host: right results, meaningless times."""
        return bool(self.devices) and self.identity.local_size > self.devices

    def barrier(self) -> None:
        """Wait on the host until every rank is here."""
        dist.barrier(self.control)

    def synchronize(self) -> None:
        """Wait for this rank's device; a fault of earlier work surfaces here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def abandon(self) -> None:
        """Leave the groups in the middle of something, so that peers waiting in them are let go at once.

        A gloo peer sees the connection close once nothing here refers to the group; NCCL kernels end once
        the communicator is aborted.
        """
        self.abort_device()
        self.close()

    def abort_device(self) -> None:
        """End this rank's NCCL kernels, which would wait for a peer that has left. From any thread."""
        nccl, self._nccl_live = self._nccl_live, None
        if nccl is not None:
            nccl._get_backend(self.device).abort()

    def rebuild(self) -> None:
        """Make new groups after a fault, on all ranks together."""
        self.close()
        self._build()

    def close(self) -> None:
        """Leave the groups; a gloo process that exits inside one can abort."""
        self._control = self._nccl = self._nccl_live = None
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()

    def _build(self) -> None:
        self._generation += 1
        store: Store
        if self._store is None:
            store = dist.HashStore()  # type: ignore[attr-defined]
        else:
            store = dist.PrefixStore(f"group/{self._generation}", self._store)  # type: ignore[attr-defined]
        if self.size == 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.size, timeout=self._timeout
        )
        self._control = dist.group.WORLD
        if self.devices and not self.oversubscribed:
            # torch's own watchdog would end the process at an error of NCCL or CUDA, before ours has reported
            # it. torchrun sets the first, so what is found there is nobody's wish.
            os.environ |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
            self._nccl = self._nccl_live = dist.new_group(backend="nccl", timeout=self._timeout)
