"""The words of a comparison, and when a row is called slower, faster, or the same."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_ep.timing.ratios import Ratio

SAME, SLOWER, FASTER, UNCLEAR = "same", "slower", "faster", "unclear"
NEWLY_WRONG, FIXED, NEWLY_SKIPPED, MISSING, NEW = "newly wrong", "fixed", "newly skipped", "missing", "new"
ROW_WORDS = (SLOWER, FASTER, SAME, UNCLEAR)
CASE_WORDS = (NEWLY_WRONG, FIXED, NEWLY_SKIPPED, MISSING, NEW)
LAUNCH = "launch"
"""What --fail-on calls a launch cost that is higher; no row has this word."""
NONE = "none"
"""What --fail-on calls no word at all."""
KNOWN = (*ROW_WORDS, *CASE_WORDS, LAUNCH)
FAILING = (SLOWER, NEWLY_WRONG, MISSING)
"""What fails a comparison unless --fail-on says otherwise."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The largest change that does not matter: less than ``percent`` of the base, or less than ``us``."""

    percent: float = 1.0
    us: float = 0.1

    def of(self, base_us: float) -> float:
        """Return it as a share of a base: a change must exceed both."""
        return max(self.percent / 100, self.us / base_us)

    def __str__(self) -> str:
        return f"{self.percent:g}%,{self.us:g}us"


def parse_floor(text: str) -> Floor:
    """Return the floor that ``3%``, ``0.5us``, or both with a comma, ask for; the other keeps its default.

    Raises ValueError with one line that says what is wrong.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        told = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|us)\s*", part, re.ASCII)
        if not told:
            raise ValueError(
                f"{part.strip()!r} is no floor: write a percentage, microseconds or both, as {Floor()}"
            )
        name = "percent" if told[2] == "%" else "us"
        if name in found:
            raise ValueError(f"{text!r} has two floors in {told[2]}: write one, as {Floor()}")
        found[name] = float(told[1])
    return Floor(**found)


def parse_words(text: str) -> tuple[str, ...]:
    """Return the words of --fail-on, ``newly-wrong`` as ``newly wrong``. Raises ValueError for others.

    ``none`` stands for no word.
    """
    if text.strip() == NONE:
        return ()
    words = [part.strip().replace("-", " ").replace("_", " ") for part in text.split(",")]
    for word in words:
        if word not in KNOWN:
            raise ValueError(f"{word!r} is no word of a comparison, known: {', '.join(KNOWN)}, or {NONE}")
    return tuple(dict.fromkeys(words))


def judge(ratio: Ratio, floor: float) -> str:
    """Return the word for a row whose times are ``ratio`` of the base's; ``floor`` is a share.

    Slower or faster: the interval excludes 1 and the ratio is beyond the floor. Same: the whole interval is
    within the floor. Everything else is unclear, a change of about the floor's size included.
    """
    if ratio.low > 1 and ratio.value > 1 + floor:
        return SLOWER
    if ratio.high < 1 and ratio.value < 1 - floor:
        return FASTER
    return SAME if 1 - floor <= ratio.low and ratio.high <= 1 + floor else UNCLEAR


def geometric_mean(ratios: Collection[float]) -> float:
    """Return the geometric mean of one ratio or more."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
