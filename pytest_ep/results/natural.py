"""Names in the order in which people count."""

from __future__ import annotations

import re


def natural(text: str) -> list[tuple[int, str]]:
    """Return what to sort a name by, so that mlx5_2 comes before mlx5_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]
