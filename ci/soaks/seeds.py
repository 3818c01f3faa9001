"""Right transports on random shapes, EP sizes, T and routing, ranks as threads: none may fail."""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from functools import partial

import torch

from pytest_ep.matrix.shapes import Shape
from pytest_ep.oracle.checks import Verdict
from pytest_ep.workload.problem import build_problem
from pytest_ep.workload.routing import load_trace
from tests.faults.diagnosed import Crossing
from tests.faults.diagnosed import Fault
from tests.faults.diagnosed import on_threads
from tests.faults.diagnosed import run_case
from tests.faults.diagnosed import threaded
from tests.faults.diagnosed import transport

REDUCTIONS = ("rank-sum-fp32", "two-level", "topk-slot-tree")
EP_SIZES = (1, 2, 3, 4, 5, 8)


@dataclass(frozen=True)
class Draw:
    """What one seed stands for: ``tokens`` of each rank, ``domain`` ranks of a scale-up domain."""

    seed: int
    shape: Shape
    tokens: tuple[int, ...]
    reduction: str
    domain: int
    index_dtype: str


def draw(seed: int) -> Draw:
    """Return the case of a seed."""
    rng = random.Random(seed)
    ranks = rng.choice(EP_SIZES)
    experts = rng.randint(ranks, 96)
    shape = Shape("random", rng.randint(64, 700), experts, rng.randint(1, min(8, experts)))
    most = rng.choice((1, 2, 7, 33))
    tokens = tuple(rng.randint(0, most) for _ in range(ranks)) if rng.random() < 0.5 else (most,) * ranks
    reduction, domain = rng.choice(REDUCTIONS), rng.randint(1, ranks)
    return Draw(seed, shape, tokens, reduction, domain, rng.choice(("int32", "int64")))


def verdicts(one: Draw) -> list[Verdict]:
    """Return every rank's verdict on a case: oracle, timed output, oracle again."""
    right = transport(Fault("right", "", "", declared=one.reduction, domain=one.domain))
    trace = load_trace(one.shape, one.seed, sum(one.tokens), None, write=False)

    def work(crossing: Crossing, rank: int) -> Verdict:
        backend = threaded(right, crossing, rank, one.shape, max(one.tokens))
        problem = build_problem(one.shape, trace, rank, one.tokens, "cpu", one.index_dtype)
        return run_case(backend, problem, one.domain, partial(crossing.all_passed, rank))

    return on_threads(len(one.tokens), work)


def main() -> None:
    """Print every seed that fails, then the sum."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, wrong = time.monotonic(), 0
    for seed in range(options.first, options.first + options.seeds):
        one = draw(seed)
        failed = [v for v in verdicts(one) if not v.passed or v.error or v.bit_exact != 1.0]
        wrong += bool(failed)
        for verdict in failed:
            print(f"{one}: {verdict.message or verdict}", flush=True)
    print(f"{options.seeds} seeds, {wrong} failed, {time.monotonic() - began:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
