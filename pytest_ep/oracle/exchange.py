"""One checked pair of dispatch and combine, which is closed whatever goes wrong in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_ep.backends.base import EPBackend
from pytest_ep.backends.base import Received
from pytest_ep.oracle import dispatch
from pytest_ep.oracle.expected import constant_rows
from pytest_ep.workload import contents
from pytest_ep.workload.problem import Problem

Answer = Callable[[Received, Tensor], Tensor]
"""Makes this rank's messages [N, H] BF16 of what it received and the rows' decoded source ids [N]."""


def exchange(backend: EPBackend, problem: Problem, answer: Answer, failures: dict[str, str]) -> Tensor | None:
    """Dispatch, check what arrived, answer, combine; return the combined [T, H], or None without messages.

    What the dispatch checks find, and an exception between dispatch and combine on this rank (check
    "receive"), goes into ``failures``: the pair is then closed with zeros, so that no other rank waits for
    it. Exceptions of dispatch and combine are raised. Collective.
    """
    handle = backend.dispatch(problem)
    staged: Any = None
    try:
        received = backend.receive(problem, handle)
        messages = _answered(problem, received, answer, failures)
        if messages is not None:
            staged = backend.stage(problem, handle, messages)
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        failures["receive"] = f"{type(error).__name__}: {text}"
        messages = None
    if messages is None:
        planes = backend.constant_planes(problem)
        staged = backend.stage_constant(problem, torch.zeros_like(constant_rows(problem, planes)))
        backend.combine(problem, handle, staged)
        return None
    del received, messages
    return backend.combine(problem, handle, staged)


def inspect(backend: EPBackend, problem: Problem, handle: Any) -> str:
    """Return what is wrong with a dispatch whose combine has yet to come, or "". For this rank alone."""
    try:
        received = backend.receive(problem, handle)
        failures = dispatch.misshapen(problem, received)
        if not failures.keys() & {"payload", "metadata"}:
            failures |= dispatch.failures(problem, received, contents.decode_source_ids(received.tokens))
    except Exception as error:
        return f"receive: {type(error).__name__}: {error}"
    return "; ".join(f"{check}: {text}" for check, text in failures.items())


def _answered(
    problem: Problem, received: Received, answer: Answer, failures: dict[str, str]
) -> Tensor | None:
    """Add what the dispatch checks find to ``failures``; the messages, or None where rows are misshapen."""
    misshapen = dispatch.misshapen(problem, received)
    if misshapen.keys() & {"payload", "metadata"}:
        failures.update(misshapen)
        return None
    source = contents.decode_source_ids(received.tokens)
    failures.update(dispatch.failures(problem, received, source))
    return answer(received, source)
