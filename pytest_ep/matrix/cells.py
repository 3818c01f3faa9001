"""The coordinates of the case matrix."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_ep.matrix.shapes import Shape

MODES = ("normal", "low_latency")
PRECISIONS = ("bf16", "fp8")
PROBE_NAMES = (
    "uniform",
    "rank_powers",
    "slots",
    "columns",
    "every_rank",
    "one_rank",
    "several_experts",
    "repeated_calls",
    "accumulator",
)
"""The probes of each key, in the order in which they run."""
PROBE_TOKENS = 8
"""Tokens per rank of a probe."""


@dataclass(frozen=True, slots=True)
class Skip:
    """Why a cell does not run: a stable code, a sentence for people, and a source."""

    code: str
    reason: str
    link: str = ""


@dataclass(frozen=True, slots=True)
class Key:
    """What one live transport serves."""

    backend: str
    sku: str
    ep_size: int
    mode: str
    precision: str
    model: str

    def __str__(self) -> str:
        return f"{self.sku}-ep{self.ep_size:02d}-{self.mode}-{self.precision}-{self.model}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the matrix; ``tokens`` is per rank, and 0 stands for any in a cell that cannot run."""

    key: Key
    shape: Shape
    routing: str
    tokens: int

    @property
    def id(self) -> str:
        """The parametrisation id: fixed-width or delimited, so that no id is a prefix of another."""
        tokens = f"T{self.tokens:05d}" if self.tokens else "Tany"
        return f"{self.key}-{self.routing}-{tokens}"
