"""The contract between a transport and the suite."""

from __future__ import annotations

from abc import ABC
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar

from pytest_ep.matrix.cells import Cell
from pytest_ep.matrix.cells import Skip
from pytest_ep.matrix.machine import Machine
from pytest_ep.matrix.shapes import Shape

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_ep.ranks.group import Ranks
    from pytest_ep.workload.problem import Problem


@dataclass(frozen=True, slots=True)
class ModeFacts:
    """What a mode of a transport promises.

    ``layout`` is ``token-rank`` (one row per token and destination rank) or ``token-expert`` (one row per
    token and expert); ``weighting`` is ``unweighted-rank-sum`` or ``weighted-kernel-sum``;
    ``index_dtype`` is ``int32`` or ``int64``, the dtype that ``Problem.expert_ids`` arrives in;
    ``strict_pairs``: each dispatch must be followed by its combine before the next dispatch;
    ``graph_safe``: dispatch and combine can be captured in a CUDA graph;
    ``token_cap``: the largest tokens per rank, or None;
    ``unequal_tokens``: ranks may have different numbers of tokens, some of them none;
    ``masked_ids``: a choice may be masked, id -1 and weight 0: it goes nowhere, and a token whose choices are
    all masked combines to zero.
    """

    layout: str
    weighting: str
    index_dtype: str
    strict_pairs: bool
    graph_safe: bool
    precisions: tuple[str, ...]
    token_cap: int | None = None
    unequal_tokens: bool = True
    masked_ids: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    """What dispatch brought to this rank: N filled rows, in any order.

    ``tokens`` [N, H] BF16; ``expert_ids`` [N, K] int64, global, -1 for experts of other ranks;
    ``weights`` [N, K] FP32, zero where the id is -1, or None where the transport carries none;
    ``expert_counts`` [local experts] int64.
    """

    tokens: Tensor
    expert_ids: Tensor
    weights: Tensor | None
    expert_counts: Tensor


class BackendUnavailable(Exception):
    """What only construction can show: this transport does not run here. A skip, on every rank.

    ``code`` is a stable skip code and ``reason`` says what to grant, install or change.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class EPBackend(ABC):
    """A transport under test. Construction and every method but ``unsupported`` are collective."""

    name: ClassVar[str]
    maturity: ClassVar[str] = "candidate"
    modes: ClassVar[Mapping[str, ModeFacts]]

    reduction: str
    """How combine adds a token's messages: a name from ``oracle/reduction.py``."""
    versions: Mapping[str, str]
    """Versions of the libraries that do the work, by distribution name."""
    facts: Mapping[str, float] = MappingProxyType({})
    """What construction took, where the transport measures it: ``device_memory_bytes`` (of the device, by all
    its ranks); in seconds ``build_s`` of kernels, ``construction_s`` without it, ``first_pair_s`` within."""

    @classmethod
    def unsupported(cls, cell: Cell, machine: Machine) -> Skip | None:
        """What the installed wheel or the shape forbids, decided without torch."""
        return None

    @classmethod
    def ranks_per_device(cls, machine: Machine) -> int | None:
        """How many ranks may share one device; None for any number."""
        return 1 if machine.devices else None

    @abstractmethod
    def __init__(self, ranks: Ranks, shape: Shape, mode: str, precision: str, max_tokens: int) -> None:
        """Allocate for at most ``max_tokens`` tokens per rank, and warm.

        Raises BackendUnavailable where the transport cannot run here.
        """

    @abstractmethod
    def dispatch(self, problem: Problem) -> Any:
        """Send each token once to each rank that owns one of its experts; return this exchange's handle."""

    @abstractmethod
    def receive(self, problem: Problem, handle: Any) -> Received:
        """Read what arrived. Never timed. Legal between dispatch and combine; in a graph-safe mode, whose
        pairs are replayed, also after the last combine until the next dispatch.
        """

    @abstractmethod
    def stage(self, problem: Problem, handle: Any, messages: Tensor) -> Any:
        """Write messages [N, H] BF16, in ``Received``'s row order, where this handle's combine reads."""

    @abstractmethod
    def stage_constant(self, problem: Problem, rows: Tensor) -> Any:
        """Fill the whole receive buffer: plane s with ``rows[s]``, rows [S, H] BF16.

        S is ``constant_planes(problem)``. What is staged stays valid for every later handle of the same
        shape, whatever its routing.
        """

    @abstractmethod
    def constant_planes(self, problem: Problem) -> int:
        """S of ``stage_constant``: ep_size where the layout keeps source planes apart, else 1."""

    @abstractmethod
    def combine(self, problem: Problem, handle: Any, staged: Any) -> Tensor:
        """Return and reduce the staged messages: [T, H] BF16, this rank's tokens in their order."""

    def metadata(self, problem: Problem) -> bool:
        """Do alone what dispatch does first with this step's routing: layout, counts, a host's read of them.

        Timed beside dispatch, which has it inside. Returns whether the transport can tell it apart.
        """
        return False

    def poison(self, problem: Problem) -> bool:
        """Fill what the next exchange will read or overwrite with a pattern that shows: NaN, where it can be.

        Legal between pairs; the caller then aligns the ranks. Returns whether the transport could.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """Release everything, on all ranks together."""
