"""Which reduction an installed kernel follows, measured.

The canary columns of the oracle's contents make every two reductions that differ on a token's pattern differ
visibly on it; at 8 ranks the classic sum of 1 and seven times 2^-9 says it in one number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pytest_ep.backends.base import EPBackend
from pytest_ep.backends.base import Received
from pytest_ep.oracle import expected
from pytest_ep.oracle.exchange import exchange
from pytest_ep.oracle.reduction import named
from pytest_ep.workload.problem import Problem
from pytest_ep.workload.problem import build_problem
from pytest_ep.workload.routing import Trace

NEEDED = 3
"""Ranks below which no two reductions differ before the last narrowing."""
CLASSIC_RANKS = 8
MODELS = ("rank-sum-fp32", "two-level", "topk-slot-tree")


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rank saw: the models that give its output bit for bit, and the classic sum where there is one.

    ``failures`` are dispatch checks that failed on the way. ``nearest`` is the model with the most elements
    in common, of ``share`` (0 to 1).
    """

    follows: tuple[str, ...]
    nearest: str
    share: float
    classic: float | None
    failures: tuple[str, ...]


def observe(backend: EPBackend, problem: Problem, domain: int) -> Finding:
    """Compare one exchange of the oracle's contents with every model. Collective."""
    failures: dict[str, str] = {}

    def answer(received: Received, source: Tensor) -> Tensor:
        return expected.reply(problem, source, received.expert_ids, received.weights)

    got = exchange(backend, problem, answer, failures)
    shares = dict.fromkeys(MODELS, 0.0) if got is None else _shares(problem, got, domain)
    nearest = max(shares, key=lambda name: shares[name])
    follows = tuple(name for name, share in shares.items() if share == 1.0)
    holds_it = min(problem.ep_size, problem.shape.top_k) >= CLASSIC_RANKS
    classic = _classic(backend, problem) if holds_it else None
    return Finding(follows, nearest, shares[nearest], classic, tuple(failures.values()))


def judge(findings: list[Finding], declared: str) -> tuple[bool, str]:
    """Combine the ranks' findings; return whether ``declared`` holds, and the sentence."""
    failures = [text for finding in findings for text in finding.failures]
    if failures:
        return False, failures[0]
    follows = [name for name in MODELS if all(name in finding.follows for finding in findings)]
    classic = findings[0].classic
    also = f"; 1 + 7 x 2^-9 gives {classic!r}" if classic is not None else ""
    if declared in follows:
        others = [name for name in follows if name != declared]
        alike = f" (here the same function as {', '.join(others)})" if others else ""
        return True, f"combine follows {declared}{alike}{also}"
    if follows:
        return False, f"combine follows {follows[0]}, but the adapter's table says {declared}{also}"
    worst = min(findings, key=lambda finding: finding.share)
    near = f"nearest is {worst.nearest} with {worst.share:.1%} of the elements"
    return False, f"combine follows no known reduction ({near}); the adapter's table says {declared}{also}"


def _shares(problem: Problem, got: Tensor, domain: int) -> dict[str, float]:
    shares = {}
    for name in MODELS:
        same = 0
        for start, want in expected.combined(problem, named(name, domain)):
            same += int((got[start : start + len(want)].float() == want).sum())
        shares[name] = same / max(got.numel(), 1)
    return shares


def _classic(backend: EPBackend, standard: Problem) -> float:
    """The sum of 1 from the rank of each token's first choice and 2^-9 from seven others."""
    shape, ranks = standard.shape, standard.ep_size
    bounds = shape.owned(ranks)
    row = [bounds[rank] for rank in range(CLASSIC_RANKS)]
    row += [bounds[0] + 1 + extra for extra in range(shape.top_k - CLASSIC_RANKS)]
    tokens = sum(standard.tokens_by_rank)
    weights = np.full((tokens, shape.top_k), 1 / shape.top_k, dtype=np.float32)
    problem = build_problem(
        shape,
        Trace(np.tile(np.array(row, dtype=np.int64), (tokens, 1)), weights),
        standard.rank,
        standard.tokens_by_rank,
        standard.x.device,
        str(standard.expert_ids.dtype).removeprefix("torch."),
    )

    def answer(received: Received, source: Tensor) -> Tensor:
        value = 1.0 if problem.rank == 0 else 2.0**-9
        return torch.full_like(received.tokens, value)

    got = exchange(backend, problem, answer, {})
    return float("nan") if got is None or not len(got) else float(got[0, 0])
