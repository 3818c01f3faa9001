"""What a transport wrote to its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_ep.oracle import dispatch
from pytest_ep.oracle import expected
from pytest_ep.workload import contents
from pytest_ep.workload.problem import Problem


def changed_inputs(problem: Problem) -> str:
    """Which elements of tokens, ids and weights are not what they were built as; "" where all are."""
    first = problem.first_token(problem.rank)
    source = torch.arange(first, first + problem.tokens, device=problem.x.device)
    ids, weights = expected.routing(problem, source)
    changed = {"ids": problem.expert_ids != ids, "weights": problem.weights != weights}
    rows = torch.nonzero(dispatch.payload_differs(problem, problem.x, source)).squeeze(1)
    found = [_say("x", _differs(problem.x[rows], source[rows]), source[rows])] if len(rows) else []
    found += [_say(name, differs, source) for name, differs in changed.items() if bool(differs.any())]
    return "; ".join(found)


def _differs(rows: Tensor, source: Tensor) -> Tensor:
    built = contents.tokens(source, rows.shape[1])
    return rows.contiguous().view(torch.int16) != built.view(torch.int16)


def _say(name: str, differs: Tensor, source: Tensor) -> str:
    row, column = torch.nonzero(differs)[0].tolist()
    count = int(differs.sum())
    return f"{count} element{'s' * (count != 1)} of {name}, first token {int(source[row])} column {column}"
