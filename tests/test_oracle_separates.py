"""The proof: the contents tell reductions apart wherever they are different functions of a token's pattern.

Whether two reductions differ for a token is decided by evaluating both on many random messages in the token's
own pattern (its contributing ranks and their choices). Where they do, the oracle's own messages must set them
apart by at least four times the tolerance, whichever of the two is the expected one.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from pytest_ep.matrix.shapes import Shape
from pytest_ep.oracle import expected
from pytest_ep.oracle.checks import COMBINE_REL_TOL
from pytest_ep.oracle.checks import MAGNITUDE_FLOOR
from pytest_ep.oracle.reduction import Contributions
from pytest_ep.oracle.reduction import Reduction
from pytest_ep.oracle.reduction import named
from pytest_ep.workload.problem import Problem
from pytest_ep.workload.problem import build_problem
from pytest_ep.workload.routing import Trace
from pytest_ep.workload.routing import load_trace

SHAPES = {
    "deepseek_v3": Shape("deepseek_v3", hidden=512, experts=256, top_k=8),
    "deepseek_v4_pro": Shape("deepseek_v4_pro", hidden=512, experts=384, top_k=6),
    "gpt_oss_120b": Shape("gpt_oss_120b", hidden=512, experts=128, top_k=4),
}
EP_SIZES = (2, 4, 8, 16, 64)
LADDER = (1, 2, 8, 64, 512)
DRAWS = 2048
MOST_TOKENS = 512


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    tokens = max(EP_SIZES) * max(LADDER)
    return {name: load_trace(SHAPES[name], 67, tokens, None, write=False) for name in SHAPES}


def reductions(ep_size: int) -> list[Reduction]:
    domains = sorted({domain for domain in (ep_size // 2, 8) if domain < ep_size})
    return [named("rank-sum-fp32", 1), named("topk-slot-tree", 1), *(named("two-level", d) for d in domains)]


def problems(shape: Shape, trace: Trace, ep_size: int, tokens: int) -> list[Problem]:
    """Each rank's problem, or evenly spaced ranks where all have more tokens than are worth the time."""
    end = ep_size * tokens
    share = Trace(trace.expert_ids[:end], trace.weights[:end])
    ranks = max(1, min(ep_size, MOST_TOKENS // tokens))
    return [
        build_problem(shape, share, rank * ep_size // ranks, (tokens,) * ep_size, "cpu", "int64")
        for rank in range(ranks)
    ]


def combined(problem: Problem, reduction: Reduction) -> Tensor:
    return torch.cat([rows for _, rows in expected.combined(problem, reduction)])


def combined_constant(problem: Problem, reduction: Reduction) -> Tensor:
    chunks = expected.combined_constant(problem, reduction, problem.ep_size)
    return torch.cat([rows for _, rows in chunks])


def error(got: Tensor, want: Tensor) -> Tensor:
    """The oracle's error of each token, by its formula."""
    return ((got - want).abs() / want.abs().clamp(min=MAGNITUDE_FLOOR)).amax(dim=1)


def are_different_functions(problem: Problem, one: Reduction, other: Reduction) -> Tensor:
    """Whether two reductions differ on random BF16 messages in each token's pattern: bool [T]."""
    first = problem.first_token(problem.rank)
    ids = torch.from_numpy(problem.trace.expert_ids[first : first + problem.tokens])
    pairs = expected.contributors(ids, expected.expert_bounds(problem))
    # What two reductions do to a pattern does not depend on the token: evaluate each pattern once.
    placed = torch.full((len(ids), ids.shape[1]), -1)
    placed[pairs.token, pairs.choice] = pairs.rank
    _, pattern = np.unique(placed.numpy(), axis=0, return_inverse=True)
    pattern = pattern.reshape(-1)
    differ = torch.zeros(len(ids), dtype=torch.bool)
    generator = torch.Generator().manual_seed(1)
    _, representatives = np.unique(pattern, return_index=True)
    for start in range(0, len(representatives), 64):
        chosen = torch.from_numpy(representatives[start : start + 64])
        part = expected.contributors(ids[chosen], expected.expert_bounds(problem))
        shape = (len(part.token), DRAWS)
        small = torch.randint(-256, 257, shape, generator=generator).float()
        rows = small * 2.0 ** -torch.randint(0, 9, shape, generator=generator)
        given = Contributions(
            rows.to(torch.bfloat16), part.token, part.rank, part.choice, len(chosen), ids.shape[1]
        )
        differ[chosen] = (one(given) != other(given)).any(dim=1)
    return differ[torch.from_numpy(representatives[pattern])]


@pytest.mark.parametrize("tokens", LADDER)
@pytest.mark.parametrize("ep_size", EP_SIZES)
@pytest.mark.parametrize("model", SHAPES)
def test_reductions_that_differ_for_a_token_are_far_apart(
    traces: dict[str, Trace], model: str, ep_size: int, tokens: int
) -> None:
    compared = differing = 0
    for problem in problems(SHAPES[model], traces[model], ep_size, tokens):
        results = [(each, combined(problem, each)) for each in reductions(ep_size)]
        for (one, got), (other, want) in combinations(results, 2):
            differ = are_different_functions(problem, one, other)
            apart = torch.minimum(error(got, want), error(want, got)) >= 4 * COMBINE_REL_TOL
            assert apart[differ].all(), (one.name, other.name, problem.rank)
            assert not (got != want).any(dim=1)[~differ].any(), "the draws missed a difference"
            compared += len(differ)
            differing += int(differ.sum())
    assert compared
    # Two contributors cannot tell: EP2 has nothing to observe, and from EP4 on T = 1 has already.
    assert bool(differing) == (ep_size > 2)


@pytest.mark.parametrize("ep_size", EP_SIZES[1:])
def test_every_wrong_model_is_seen_at_one_token_per_rank(traces: dict[str, Trace], ep_size: int) -> None:
    """What a case asserts: of all ranks' tokens together, one at least exposes each wrong model."""
    for right, wrong in combinations(range(len(reductions(ep_size))), 2):
        models = reductions(ep_size)
        worst = max(
            float(error(combined(problem, models[wrong]), combined(problem, models[right])).max())
            for problem in problems(SHAPES["deepseek_v3"], traces["deepseek_v3"], ep_size, 1)
        )
        assert worst >= 4 * COMBINE_REL_TOL


@pytest.mark.parametrize("ep_size", EP_SIZES)
def test_messages_sum_exactly_so_that_order_does_not_matter(traces: dict[str, Trace], ep_size: int) -> None:
    """The right reduction is bit-exact in any order of additions: an FP64 sum narrows to the same."""
    (problem, *_) = problems(SHAPES["deepseek_v3"], traces["deepseek_v3"], ep_size, 64)

    def in_fp64(given: Contributions) -> Tensor:
        backwards = torch.arange(len(given.token) - 1, -1, -1)
        sums = torch.zeros(given.tokens, given.rows.shape[1], dtype=torch.float64)
        sums.index_add_(0, given.token[backwards], given.rows[backwards].double())
        assert torch.equal(sums, sums.float().double())
        return sums.to(torch.bfloat16).float()

    want = combined(problem, named("rank-sum-fp32", 1))
    got = combined(problem, Reduction("fp64", in_fp64))
    assert float(error(got, want).max()) == 0.0
    assert float((got == want).float().mean()) == 1.0


@pytest.mark.parametrize("ep_size", [8, 16])
def test_a_short_row_still_exposes_a_wrong_model_over_the_tokens(
    traces: dict[str, Trace], ep_size: int
) -> None:
    shape = Shape("short", hidden=64, experts=256, top_k=8)
    one, other = (
        torch.cat([combined(problem, named(name, 1)) for problem in problems(shape, trace, ep_size, 8)])
        for trace in [traces["deepseek_v3"]]
        for name in ("rank-sum-fp32", "topk-slot-tree")
    )
    assert float((error(one, other) >= 4 * COMBINE_REL_TOL).float().mean()) > 0.5


@pytest.mark.parametrize("ep_size", EP_SIZES[1:])
def test_constant_rows_expose_a_wrong_model_too(traces: dict[str, Trace], ep_size: int) -> None:
    for one, other in combinations(reductions(ep_size), 2):
        found = max(
            float(error(combined_constant(problem, one), combined_constant(problem, other)).max())
            for problem in problems(SHAPES["deepseek_v3"], traces["deepseek_v3"], ep_size, 8)
        )
        assert found >= 4 * COMBINE_REL_TOL, (one.name, other.name)
