"""Communicators: the interface, and the bridge from torch.distributed."""

from __future__ import annotations

from abc import ABC
from abc import abstractmethod
from typing import Any
from typing import Protocol

import torch.distributed as dist

from .._facts import FACTS


class _AbstractBackend(ABC):
    """Before 0.6.16 an incomplete communicator cannot be constructed."""

    @abstractmethod
    def Get_rank(self) -> int: ...

    @abstractmethod
    def Get_size(self) -> int: ...

    @abstractmethod
    def allgather(self, data: Any) -> Any: ...

    @abstractmethod
    def bcast(self, data: Any, root: int) -> Any: ...

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def Split(self, color: int, key: int) -> Any: ...


class _ProtocolBackend(Protocol):
    """From 0.6.16 on what is missing silently does nothing."""

    def Get_rank(self) -> int: ...

    def Get_size(self) -> int: ...

    def allgather(self, data: Any) -> Any: ...

    def bcast(self, data: Any, root: int) -> Any: ...

    def barrier(self) -> None: ...

    def Split(self, color: int, key: int) -> Any: ...


CommBackend: Any = _AbstractBackend if FACTS.handles == "pidfd" else _ProtocolBackend


class TorchDistBackend(CommBackend):  # type: ignore[misc]  # the base depends on the release
    """Object collectives of a torch process group; Split makes a new one."""

    def __init__(self, group: Any | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialized. "
                "Please call torch.distributed.init_process_group() first."
            )
        self._group = group

    def Get_rank(self) -> int:
        return dist.get_rank(self._group)

    def Get_size(self) -> int:
        return dist.get_world_size(self._group)

    def allgather(self, data: Any) -> Any:
        gathered: list[Any] = [None] * self.Get_size()
        dist.all_gather_object(gathered, data, group=self._group)
        return gathered if FACTS.handles == "pidfd" else tuple(gathered)

    def bcast(self, data: Any, root: int) -> Any:
        # 0.6.8 hands a group-local root over as a global rank
        local = self._group is not None and FACTS.name != "0.6.8"
        objects = [data]
        source = dist.get_global_rank(self._group, root) if local and self._group is not None else root
        dist.broadcast_object_list(objects, src=source, group=self._group)
        return objects[0]

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def Split(self, color: int, key: int) -> Any:
        everyone = self.allgather((color, key, self.Get_rank()))
        members = [rank for theirs, _, rank in sorted(everyone, key=lambda item: item[1]) if theirs == color]
        return TorchDistBackend(dist.new_group(ranks=members))
