"""What is said of a run that ended early."""

from __future__ import annotations

from pytest_ep.ranks.watchdog import Ending
from pytest_ep.ranks.watchdog import LastWords

SILENCE = 3.0
"""Seconds without a step after which a rank counts as silent in a report; waiting for a ballot is a step."""
WAITS = ("torch/distributed/", "torch/cuda/")
"""Where a rank's stack ends while it waits for others, in a collective or for its device."""


def early_report(ending: Ending) -> str:
    """Name the ranks that are gone or stopped, where each was, its stack and its last lines."""
    lines = [_cause(ending)]
    gone_first = sorted(enumerate(ending.words), key=lambda one: one[1] is not None)
    for rank, words in gone_first:
        status = words.status if words is not None else ending.seen[rank]
        if status is None:
            lines.append(f"rank {rank} was never heard of")
            continue
        where = f" of {status.case}" if status.case else ""
        printed = words.printed if words is not None else ending.printed[rank]
        if words is None:
            lines.append(f"rank {rank} last seen in {status.phase!r}{where}")
        else:
            lines.append(
                f"rank {rank} was in {status.phase!r}{where}, {status.age:.1f} s after its last step"
            )
        stack = words.stack if words is not None else ""
        lines += [f"    {line}" for line in stack.splitlines()]
        if printed:
            lines += [f"  rank {rank} printed:", *(f"    {line}" for line in printed.splitlines())]
    return "\n".join(lines)


def _cause(ending: Ending) -> str:
    """Blame those that are gone; else, of the silent ones, those that do not merely wait for others."""
    if ending.alone:
        return f"{ending.cause}; without it no rank hears of one on another host"
    gone = [rank for rank, words in enumerate(ending.words) if words is None]
    if gone:
        are = "is" if len(gone) == 1 else "are"
        lost = "gone (killed, crashed, exited, or stuck holding the interpreter)"
        return f"{_named(gone)} {are} {lost}: {ending.cause}"
    silent = {rank: words for rank, words in enumerate(ending.words) if words and _is_silent(words)}
    stopped = [rank for rank, words in silent.items() if not _waits(words)]
    if stopped and len(stopped) < len(ending.words):
        phase = silent[stopped[0]].status.phase
        them = "it" if len(stopped) == 1 else "them"
        return f"{_named(stopped)} stopped in {phase!r}, others wait for {them}: {ending.cause}"
    return ending.cause


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _is_silent(words: LastWords) -> bool:
    return words.status.age > SILENCE


def _waits(words: LastWords) -> bool:
    last = [line for line in words.stack.splitlines() if line.lstrip().startswith("File ")][-1:]
    return bool(last) and any(place in last[0] for place in WAITS)
