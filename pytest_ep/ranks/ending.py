"""What is said of a run that ended early."""

from __future__ import annotations

from pytest_ep.ranks.watchdog import Ending


def early_report(ending: Ending) -> str:
    """Name the ranks that are gone or stopped, where each was, its stack and its last lines."""
    gone = [rank for rank, words in enumerate(ending.words) if words is None]
    lines = [ending.cause]
    if gone:
        who = ", ".join(map(str, gone))
        lines[0] = f"rank {who} is gone (killed, crashed or exited): {ending.cause}"
    for rank, words in enumerate(ending.words):
        status = words.status if words is not None else ending.seen[rank]
        if status is None:
            lines.append(f"rank {rank} was never heard of")
            continue
        where = f" of {status.case}" if status.case else ""
        last = "last seen" if words is None else "was"
        lines.append(f"rank {rank} {last} in {status.phase!r}{where}, {status.age:.1f} s after its last step")
        stack = words.stack if words is not None else ending.dumps[rank]
        lines += [f"    {line}" for line in stack.splitlines()]
        if words is not None and words.printed:
            lines += [f"  rank {rank} printed:", *(f"    {line}" for line in words.printed.splitlines())]
    return "\n".join(lines)
