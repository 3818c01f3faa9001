"""How many tokens each rank has, where that differs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pytest_ep.matrix.routing import file_name

MAX_WEIGHT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TokenSkew:
    """Tokens per rank in proportion to weights, T on average: ``none``, ``linear`` or a file's.

    ``name`` is an identifier for ids and rows; ``weights`` are a file's, one for each rank.
    """

    name: str = "none"
    weights: tuple[int, ...] | None = None

    def split(self, tokens: int, ranks: int) -> tuple[int, ...]:
        """The tokens of each rank, ``ranks * tokens`` together.

        Rank r has ranks * tokens * w[r] / sum(w), rounded down; what is left over goes, one each, to the
        ranks with the largest remainders, the lower rank first. So weight 0 is no token. ``linear`` has
        w[r] = r: 2 * tokens * r / (ranks - 1). Raises ValueError for a file of other than ``ranks`` weights.
        """
        weights = self._weights(ranks)
        shares = [divmod(ranks * tokens * weight, sum(weights)) for weight in weights]
        left = ranks * tokens - sum(whole for whole, _ in shares)
        first = set(sorted(range(ranks), key=lambda rank: -shares[rank][1])[:left])
        return tuple(whole + (rank in first) for rank, (whole, _) in enumerate(shares))

    def uneven(self, ranks: int) -> bool:
        """Whether ranks have different weights."""
        return len(set(self._weights(ranks))) > 1

    def _weights(self, ranks: int) -> tuple[int, ...]:
        if self.weights is not None:
            if len(self.weights) != ranks:
                have = f"{len(self.weights)} weight{'' if len(self.weights) == 1 else 's'}"
                raise ValueError(f"{have} for {ranks} rank{'' if ranks == 1 else 's'}, it takes one for each")
            return self.weights
        return tuple(range(ranks)) if self.name == "linear" and ranks > 1 else (1,) * ranks


NO_SKEW = TokenSkew()


def parse_skew(text: str) -> TokenSkew:
    """The skew that ``text`` asks for: ``none``, ``linear``, or a file of weights, text or .npy.

    Raises ValueError with one line that says what is wrong.
    """
    if text == "none":
        return NO_SKEW
    if text == "linear":
        return TokenSkew("linear")
    if not Path(text).is_file():
        raise ValueError("known are none, linear, or a file of one whole number for each rank; no such file")
    weights = _array(text) if text.endswith(".npy") else _numbers(text)
    if not any(weights):
        raise ValueError("every weight is 0, so no rank would have a token")
    return TokenSkew(file_name(text), weights)


def _numbers(path: str) -> tuple[int, ...]:
    """Whole numbers between blanks, lines or commas."""
    try:
        words = Path(path).read_text().replace(",", " ").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"no text: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    for place, word in enumerate(words):
        if not re.fullmatch(r"\d+", word, re.ASCII) or int(word) > MAX_WEIGHT:
            raise ValueError(
                f"the weight of rank {place} is {word!r}, not a whole number from 0 to {MAX_WEIGHT}"
            )
    return tuple(int(word) for word in words)


def _array(path: str) -> tuple[int, ...]:
    import numpy as np

    try:
        weights = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        raise ValueError("not a .npy file of plain numbers") from None
    if weights.ndim != 1 or weights.dtype.kind not in "iu":
        raise ValueError(f"{weights.dtype} {list(weights.shape)}, not one whole number for each rank")
    for rank in np.flatnonzero((weights < 0) | (weights > MAX_WEIGHT)).tolist():
        raise ValueError(f"the weight of rank {rank} is {weights[rank]}, not from 0 to {MAX_WEIGHT}")
    return tuple(weights.tolist())
