"""The coordinates of the case matrix."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_ep.matrix.shapes import Shape
from pytest_ep.matrix.skew import NO_SKEW
from pytest_ep.matrix.skew import TokenSkew

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

    @property
    def told(self) -> str:
        """The reason with its source."""
        return f"{self.reason} ({self.link})" if self.link else self.reason


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
    """One point of the matrix; ``tokens`` is per rank, and 0 stands for any in a cell that cannot run.

    ``routing`` is a Routing's name. With a ``skew`` ranks have ``tokens`` on average.
    """

    key: Key
    shape: Shape
    routing: str
    tokens: int
    skew: TokenSkew = NO_SKEW

    @property
    def id(self) -> str:
        """The parametrisation id: fixed-width or delimited, so that no id is a prefix of another."""
        tokens = f"T{self.tokens:05d}" if self.tokens else "Tany"
        skew = "" if self.skew == NO_SKEW else f"-skew_{self.skew.name}"
        return f"{self.key}-{self.routing}-{tokens}{skew}"

    @property
    def tokens_by_rank(self) -> tuple[int, ...]:
        """The tokens of each rank."""
        return self.skew.split(self.tokens, self.key.ep_size)

    @property
    def max_tokens(self) -> int:
        """The most tokens of any rank: what a transport is sized for."""
        return max(self.tokens_by_rank)
