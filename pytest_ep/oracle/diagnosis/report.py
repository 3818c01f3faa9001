"""The diagnosis of a failed check: a sentence, the lines under it, and the same as data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from typing import Any

from pytest_ep.oracle.diagnosis import combine_text
from pytest_ep.oracle.diagnosis.arrivals import rank_names
from pytest_ep.oracle.diagnosis.evidence import Combined
from pytest_ep.oracle.diagnosis.evidence import Evidence
from pytest_ep.oracle.diagnosis.verdicts import Fault
from pytest_ep.oracle.diagnosis.verdicts import chosen
from pytest_ep.oracle.diagnosis.verdicts import covers
from pytest_ep.oracle.diagnosis.verdicts import faults

SHOWN_FAULTS = 5
ROWS = ("lost", "doubled", "misrouted")
"""Faults that one mistake can cause together."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a person reads, and what a program does (JSON types only)."""

    sentence: str
    lines: tuple[str, ...]
    data: dict[str, Any]

    @property
    def text(self) -> str:
        """The sentence, then the lines."""
        return "\n".join((self.sentence, *(f"  {line}" for line in self.lines)))


def diagnose(evidence: Sequence[Evidence | None], repeat: str) -> Diagnosis | None:
    """Combine the ranks' evidence, None of a rank that passed; the same on every rank.

    ``repeat`` is the command that repeats this case. None where there is no evidence at all.
    """
    found = [one for one in evidence if one is not None]
    if not found:
        return None
    try:
        return _diagnosis(found, len(evidence), repeat)
    except Exception as error:  # must not hide the failure that it is about
        why = f"not diagnosed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return Diagnosis(why, (f"repeat: {repeat}",), {"sentence": why, "repeat": repeat})


def _diagnosis(found: Sequence[Evidence], ranks: int, repeat: str) -> Diagnosis:
    dispatched = faults(found)
    combined = [one.combined for one in found if one.combined is not None and not one.combined.shape]
    sentences = [
        *_stopped(found),
        *_dispatch(dispatched),
        *_shape(found),
        *_combine(found, combined, ranks),
        *_inputs(found),
    ]
    head, rest = (sentences or ["no explanation: the evidence could not be read"])[:1], sentences[1:]
    lines = [
        *rest,
        *(_fault_line(fault) for fault in dispatched[:SHOWN_FAULTS]),
        *(combine_text.lines(combined, brief=bool(rest or dispatched)) if combined else []),
        *(f"rank {one.rank}: {one.note}" for one in found if one.note),
        f"repeat: {repeat}",
    ]
    data = {
        "sentence": head[0],
        "failed_ranks": [one.rank for one in found],
        "stopped": {str(one.rank): one.stopped for one in found if one.stopped},
        "dispatch": [asdict(fault) for fault in dispatched],
        "combine": combine_text.data(combined) if combined else None,
        "shape": {str(one.rank): one.combined.shape for one in found if one.combined and one.combined.shape},
        "inputs": {str(one.rank): one.inputs for one in found if one.inputs},
        "notes": {str(one.rank): one.note for one in found if one.note},
        "repeat": repeat,
    }
    return Diagnosis(head[0], tuple(lines), _plain(data))


def _stopped(found: Sequence[Evidence]) -> list[str]:
    stopped = [one for one in found if one.stopped]
    if not stopped:
        return []
    who = rank_names([one.rank for one in stopped])
    return [f"{who} could not answer what arrived and sent zeros: {stopped[0].stopped}"]


def _dispatch(dispatched: Sequence[Fault]) -> list[str]:
    """The gravest fault; where rows are lost, doubled or misrouted, all of that."""
    if not dispatched:
        return []
    by_name = {one.fault: one for one in dispatched}
    lost, misrouted = by_name.get("lost"), by_name.get("misrouted")
    if lost and misrouted and (lost.tokens, lost.count) == (misrouted.tokens, misrouted.count):
        there, right = rank_names(misrouted.ranks), rank_names(lost.ranks)
        what = f"token {lost.tokens[0]}" if lost.count == 1 else f"{lost.count} tokens"
        return [f"dispatch: {what} misrouted: sent to {there} instead of {right}"]
    named = dispatched[:1]
    if named[0].fault in ROWS:
        named = [one for one in dispatched if one.fault in ROWS]
    return ["dispatch: " + "; ".join(one.says.format(ranks=rank_names(one.ranks)) for one in named)]


def _shape(found: Sequence[Evidence]) -> list[str]:
    wrong = [one for one in found if one.combined is not None and one.combined.shape]
    if not wrong or wrong[0].combined is None:
        return []
    return [f"combine on {rank_names([one.rank for one in wrong])} returned {wrong[0].combined.shape}"]


def _combine(found: Sequence[Evidence], combined: Sequence[Combined], ranks: int) -> list[str]:
    """The best explanation; where dispatch was wrong, whether that accounts for all wrong tokens."""
    if not combined:
        return []
    fits = covers(combined)
    said = combine_text.sentence(combined, fits, ranks)
    if not any(one.findings for one in found):
        return [said]
    wrong = frozenset[int]().union(*(one.tokens for one in combined))
    right = wrong - frozenset[int]().union(*(one.tokens for one in found))
    if right:
        return [f"combine is also wrong for {_count(right)} that dispatch had got right; {said}"]
    known = f"; {said}" if chosen(fits)[0] else ""
    return [f"combine is wrong for {_count(wrong)}, all of which dispatch had got wrong{known}"]


def _count(tokens: frozenset[int]) -> str:
    return f"{len(tokens)} token{'s' * (len(tokens) != 1)}"


def _inputs(found: Sequence[Evidence]) -> list[str]:
    wrote = [one for one in found if one.inputs]
    if not wrote:
        return []
    who = rank_names([one.rank for one in wrote])
    return [f"the transport wrote to its inputs on {who}: {wrote[0].inputs}"]


def _fault_line(fault: Fault) -> str:
    says = fault.says.format(ranks=rank_names(fault.ranks))
    tokens = f"; tokens {', '.join(map(str, fault.tokens))}" if fault.tokens else ""
    return f"dispatch, {fault.fault}: {says}: {fault.count} of {fault.of}{tokens}"


def _plain(value: Any) -> Any:
    """JSON knows neither tuples nor non-finite numbers."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
