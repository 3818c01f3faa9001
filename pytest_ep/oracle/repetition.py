"""What repeated and poisoned exchanges need beside the oracle."""

from __future__ import annotations

from typing import Any
from typing import cast

import torch
from torch import Tensor

from pytest_ep.backends.base import EPBackend
from pytest_ep.workload.problem import Problem


class Overheard:
    """A transport that remembers its last combined output, and whether it is the first one, bit for bit."""

    def __init__(self, backend: EPBackend) -> None:
        self._backend = backend
        self._first: Tensor | None = None
        self.identical = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def combine(self, problem: Problem, handle: Any, staged: Any) -> Tensor:
        """Combine, and compare with the first time."""
        output = self._backend.combine(problem, handle, staged)
        if self._first is None:
            self._first = output.clone()
        # As integers: -0.0 and 0.0 are different bits, and NaN equals itself.
        self.identical = torch.equal(output.view(torch.int16), self._first.view(torch.int16))
        return output

    @property
    def backend(self) -> EPBackend:
        """This, as what it stands in for."""
        return cast(EPBackend, self)


def poison(backend: EPBackend, problem: Problem) -> bool:
    """Poison the transport's buffers, and the memory that the next output is likely to be given.

    Returns whether the transport could. The caller aligns the ranks before the next exchange.
    """
    # The allocator hands freed memory of a size to the next one that asks for as much.
    output = torch.full((problem.tokens, problem.shape.hidden), float("nan"), device=problem.x.device)
    output = output.to(torch.bfloat16)
    del output
    return backend.poison(problem)
