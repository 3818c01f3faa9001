"""A guess at what happened, and how it fits what was got."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pytest_ep.oracle.diagnosis.scene import Scene


@dataclass(frozen=True, slots=True)
class Fit:
    """bool [n, H]: the wrong elements that a guess explains, and the right ones nearby that it denies."""

    explained: Tensor
    denied: Tensor


@dataclass(frozen=True, slots=True)
class Guess:
    """One variant of an explanation: ``which`` rank, model or factor; ``fit`` computes."""

    which: str
    fit: Callable[[], Fit]


def exactly(scene: Scene, which: str, values: Callable[[], Tensor]) -> Guess:
    """Every element near a wrong one would be ``values()`` [n, H], bit for bit."""

    def fit() -> Fit:
        would = values()
        return Fit(scene.wrong & (would == scene.got), scene.right_nearby & (would != scene.want))

    return Guess(which, fit)


def nearly(scene: Scene, which: str, values: Callable[[], tuple[Tensor, Tensor]]) -> Guess:
    """As ``exactly``, but for roundings: ``values()`` are the values and by how much they may differ.

    Where what was expected mostly differs by no more, it explains only the elements that differ by more.
    """

    def fit() -> Fit:
        would, within = values()
        other = (would - scene.want).abs() > within
        fits = (would - scene.got).abs() <= within
        telling = 2 * (scene.wrong & other).sum() > scene.wrong.sum()
        return Fit(scene.wrong & fits & (other | telling), scene.right_nearby & other)

    return Guess(which, fit)


def locally(scene: Scene, which: str, matches: Callable[[], Tensor]) -> Guess:
    """Single elements were hit, those where ``matches()`` [n, H]; that says nothing of their neighbours."""

    def fit() -> Fit:
        return Fit(scene.wrong & matches(), scene.wrong & False)

    return Guess(which, fit)
