"""What a failing check keeps for the diagnosis: nothing of it costs a check that passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any

import torch
from torch import Tensor

from pytest_ep.backends.base import Received
from pytest_ep.oracle import dispatch
from pytest_ep.oracle.reduction import Reduction
from pytest_ep.workload.problem import Problem

if TYPE_CHECKING:
    from pytest_ep.oracle.diagnosis.evidence import Evidence


class Clues:
    """Collects one rank's evidence while what it is about is still at hand.

    ``failures`` are the checks that failed so far, with what they say; ``planes`` as ``Setting``'s. What
    goes wrong in here is a note: a diagnosis must not change a verdict, or leave others in a collective.
    """

    def __init__(
        self, problem: Problem, reduction: Reduction, failures: dict[str, str], planes: int | None = None
    ) -> None:
        self._problem = problem
        self._reduction = reduction
        self._failures = failures
        self._planes = planes
        self._found: dict[str, Any] = {}

    def of_dispatch(self, received: Received, source: Tensor) -> None:
        """Look at what was received, with the decoded source ids [N] of its rows."""
        from pytest_ep.oracle.diagnosis import collect

        def look() -> None:
            findings, tokens = collect.of_dispatch(self._problem, received, source)
            self._found.update(findings=findings, tokens=tokens)

        self._guarded(look)

    def of_combine(self, got: Tensor) -> None:
        """Look at what combine returned."""
        from pytest_ep.oracle.diagnosis import collect
        from pytest_ep.oracle.diagnosis.evidence import Combined
        from pytest_ep.oracle.diagnosis.scene import Setting

        shape = (self._problem.tokens, self._problem.shape.hidden)
        setting = Setting(self._problem, self._reduction, self._planes)

        def look() -> None:
            if tuple(got.shape) == shape and got.dtype == torch.bfloat16:
                self._found.update(combined=collect.of_combine(setting, got))
            else:
                kinds = dispatch.kind(got.shape, got.dtype), dispatch.kind(shape, torch.bfloat16)
                text = f"{kinds[0]} in place of {kinds[1]}"
                self._found.update(combined=Combined(self._problem.rank, self._reduction.name, text))

        self._guarded(look)

    def evidence(self) -> Evidence:
        """What was found."""
        from pytest_ep.oracle.diagnosis.evidence import Evidence

        stopped = ""
        if "receive" in self._failures or not self._found:
            failures = self._failures if "receive" not in self._failures else ["receive"]
            stopped = "; ".join(f"{check}: {self._failures[check]}" for check in failures)
        return Evidence(rank=self._problem.rank, stopped=stopped, **self._found)

    def _guarded(self, look: Callable[[], None]) -> None:
        try:
            look()
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            self._found["note"] = f"not diagnosed: {type(error).__name__}: {text}"
