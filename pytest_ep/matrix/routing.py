"""Which routing a run asks for, and its name in ids and rows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pytest_ep.matrix.shapes import Shape

KNOWN = "uniform, balanced, local, zipf:S, hot:N, or a .npy or .npz file"
MAX_EXPONENT = 4.0
SUFFIXES = (".npy", ".npz")


@dataclass(frozen=True, slots=True)
class Recording:
    """What the plan must know of recorded routing: its tokens, its content, and what is masked in it.

    ``digest`` is hex, of the ids; ``masked``: some choice is -1; ``first_choice``: the first token that has
    a choice which is not.
    """

    tokens: int
    digest: str
    masked: bool
    first_choice: int


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose experts: a ``kind`` of KNOWN, or "file".

    ``name`` is what ids and rows call it, an identifier. ``parameter`` is S of zipf and N of hot. Of a file
    only: ``path`` and ``recording``.
    """

    kind: str = "uniform"
    name: str = "uniform"
    parameter: float = 0.0
    path: str = ""
    recording: Recording | None = None

    def check(self, shapes: Iterable[Shape]) -> None:
        """Raise ValueError where a model of those shapes cannot be routed so."""
        for shape in shapes:
            if self.kind == "hot" and self.parameter >= shape.experts:
                raise ValueError(f"{shape.name} has {shape.experts} experts: N is less than that")

    def refusal(self, ep_size: int, tokens: int) -> str:
        """Why a case of ``tokens`` per rank cannot be routed so, or "": a file may be too short."""
        if self.recording is None:
            return ""
        needed, has = ep_size * tokens, self.recording.tokens
        case = f"T={tokens} on {ep_size} rank{'' if ep_size == 1 else 's'}"
        if needed > has:
            most = has // ep_size
            advice = f"give --ep-tokens up to {most}" if most else f"record at least {ep_size}"
            return f"it has {has} tokens, {case} needs {needed}: {advice}"
        if needed <= self.recording.first_choice:
            return f"none of its first {needed} tokens has a choice, so {case} would send nothing"
        return ""


UNIFORM = Routing()


def parse_routing(text: str) -> Routing:
    """The routing that ``text`` asks for; of a file its name alone, unread.

    Raises ValueError with one line that says what is wrong.
    """
    kind, colon, value = text.partition(":")
    if kind in {"uniform", "balanced", "local"} and not colon:
        return Routing(kind, kind)
    if kind == "zipf" and colon:
        if not re.fullmatch(r"\d+(\.\d{1,3})?", value, re.ASCII) or not 0 < float(value) <= MAX_EXPONENT:
            raise ValueError(
                f"S is a number above 0 and up to {MAX_EXPONENT:g}, with at most 3 decimals, as zipf:1.2"
            )
        return Routing(kind, f"zipf{float(value):g}".replace(".", "_"), float(value))
    if kind == "hot" and colon:
        if not re.fullmatch(r"\d+", value, re.ASCII) or not 1 <= int(value) < 2**31:
            raise ValueError("N is a whole number of experts, at least 1, as hot:4")
        return Routing(kind, f"hot{int(value)}", int(value))
    if Path(text).suffix in SUFFIXES:
        return Routing("file", file_name(text), path=text)
    raise ValueError(f"known are {KNOWN}")


def file_name(path: str) -> str:
    """What ids call a file: ``file_`` and its stem, as an identifier."""
    return "file_" + re.sub(r"[^A-Za-z0-9_]", "_", Path(path).stem)
