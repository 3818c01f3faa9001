"""The worst elements of a combine, each with the messages that it should be the sum of."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pytest_ep.oracle.diagnosis.evidence import Element
from pytest_ep.oracle.diagnosis.scene import Setting
from pytest_ep.oracle.diagnosis.scene import scene

LISTED = 5


class Worst:
    """Collects the largest errors, of different tokens where several are wrong."""

    def __init__(self) -> None:
        self._found: list[tuple[int, float, int, int]] = []

    def add(self, start: int, error: Tensor) -> None:
        """Look at the errors [n, H] of the tokens from ``start`` on, by their index on this rank."""
        values, columns = error.topk(min(LISTED, error.shape[1]), dim=1)
        token = torch.arange(len(error), device=error.device)
        chosen = values[:, 0].topk(min(LISTED, len(error))).indices
        for row in token[chosen].tolist():
            for place, (value, column) in enumerate(
                zip(values[row].tolist(), columns[row].tolist(), strict=True)
            ):
                if value > 0:
                    self._found.append((place, -value, start + row, column))
        self._found = sorted(self._found)[:LISTED]

    def elements(self, setting: Setting, got: Tensor) -> tuple[Element, ...]:
        """What is known of them, the worst first."""
        places = sorted((value, token, column) for _, value, token, column in self._found)
        return tuple(_element(setting, got, token, column, -value) for value, token, column in places)


def _element(setting: Setting, got: Tensor, token: int, column: int, error: float) -> Element:
    one = scene(setting, got, torch.tensor([token], device=got.device))
    values = one.given.rows[:, column].float().tolist()
    have, want = float(one.got[0, column]), float(one.want[0, column])
    total = abs(sum(values))
    magnitude = sum(map(abs, values))
    return Element(
        rank=setting.problem.rank,
        token=int(one.source[0]),
        column=column,
        got=have,
        expected=want,
        error=error,
        result_steps=abs(have - want) / bf16_step(want),
        message_steps=abs(have - want) / bf16_step(max(map(abs, values), default=0.0)),
        messages=tuple(zip(one.given.rank.tolist(), values, strict=True)),
        cancellation=magnitude / total if total else math.inf if magnitude else 1.0,
    )


def bf16_step(value: float) -> float:
    """The distance from ``value`` to the next BF16 number; at zero, as at the oracle's magnitude floor."""
    from pytest_ep.oracle.checks import MAGNITUDE_FLOOR

    _, exponent = math.frexp(value or MAGNITUDE_FLOOR)
    return math.ldexp(1.0, exponent - 8)
