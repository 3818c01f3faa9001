"""What a rank whose verdict is a failure saw: plain values, small enough to travel with the verdict."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Element:
    """A combined element of rank ``rank`` that is wrong; ``token`` is its global index.

    ``error`` is relative, as the oracle's. ``result_steps`` and ``message_steps`` are the distance in BF16
    steps at the expected result and at the largest message. ``messages`` are (contributing rank, value);
    ``cancellation`` is the sum of their magnitudes over that of their sum, inf where they cancel.
    """

    rank: int
    token: int
    column: int
    got: float
    expected: float
    error: float
    result_steps: float
    message_steps: float
    messages: tuple[tuple[int, float], ...]
    cancellation: float


@dataclass(frozen=True, slots=True)
class Spread:
    """How one rank's wrong elements spread over its ``tokens`` [tokens, hidden].

    ``over`` of them are beyond the tolerance. ``whole`` tokens have nine of ten elements wrong. ``listed``
    are the first wrong tokens, global. ``by_block`` counts wrong elements in each 128 columns. ``by_rank``
    and ``by_choice`` are (wrong, all) elements of the tokens to which each rank contributes, and of those
    which have a message at each choice.
    """

    tokens: int
    hidden: int
    wrong: int
    over: int
    wrong_tokens: int
    whole: int
    listed: tuple[int, ...]
    by_block: tuple[int, ...]
    by_rank: tuple[tuple[int, int], ...]
    by_choice: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Tried:
    """An explanation's variant: of ``tried`` wrong elements it gives ``explained`` bit for bit.

    ``denied`` elements beside them are right although it would make them wrong.
    """

    name: str
    which: str
    explained: int
    denied: int
    tried: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Combined:
    """What rank ``rank``'s combine returned: ``shape`` is what is wrong with that, else the rest is filled.

    ``tokens`` are the wrong ones, global. ``tried`` holds the explanations that fit at least one element,
    ``ruled_out`` the names of the others.
    """

    rank: int
    declared: str
    shape: str = ""
    tokens: frozenset[int] = frozenset()
    spread: Spread | None = None
    worst: tuple[Element, ...] = ()
    tried: tuple[Tried, ...] = ()
    ruled_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of dispatch: ``says`` has {ranks} for the receiving ranks; ``count`` of ``of`` things have it.

    ``tokens`` are the first of the tokens that it befell, global.
    """

    fault: str
    says: str
    count: int
    of: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One rank's. ``findings`` are dispatch's, the gravest first; ``tokens`` those that it got wrong, global.

    ``stopped`` says why this rank could answer with zeros only; ``inputs`` what the transport wrote to its
    inputs; ``note`` why something could not be diagnosed.
    """

    rank: int
    findings: tuple[Finding, ...] = ()
    tokens: frozenset[int] = frozenset()
    combined: Combined | None = None
    stopped: str = ""
    inputs: str = ""
    note: str = ""
