"""What reports say alike, without numpy."""

from __future__ import annotations


def launches(count: int) -> str:
    """Return ``1 launch`` or ``3 launches``."""
    return f"{count} launch{'es' * (count != 1)}"


def among(some: int, count: int) -> str:
    """Return ``in 2 of 3 launches: ``, the beginning of a reason; empty where there is one launch."""
    return f"in {some} of {launches(count)}: " if count > 1 else ""


def escaped(text: str) -> str:
    """Return text that Markdown shows as it is: names hold underscores, reasons anything."""
    for mark in ("\\", "|", "*", "_", "`", "<", "[", "~"):
        text = text.replace(mark, f"\\{mark}")
    return text
