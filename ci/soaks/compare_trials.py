"""What a comparison says of launches with real noise, those of NEW slower or faster by a known share.

A trial compares all rows of two sides. None may have the wrong sign, nor be called the same where the change
is beyond the floor; of no change at all at most 1 % of the rows may be called slower or faster.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import numpy as np

from pytest_ep.results import times
from pytest_ep.results.verdicts import FASTER
from pytest_ep.results.verdicts import SAME
from pytest_ep.results.verdicts import SLOWER
from pytest_ep.results.verdicts import UNCLEAR
from pytest_ep.results.verdicts import Floor
from tests.real_noise import RealNoise

LAUNCHES = ((1, 1), (2, 2), (3, 3), (5, 5), (3, 1))
CHANGES = (0.0, 0.01, -0.01, 0.03, -0.03, 0.1, -0.1)
FLOOR = Floor()


def wrong(row: times.RowVerdict, change: float) -> str:
    """Return what is wrong with a verdict; empty where nothing is."""
    if not change:
        return "called slower or faster" if row.word in (SLOWER, FASTER) else ""
    if row.word == (FASTER if change > 0 else SLOWER):
        return "wrong sign"
    beyond = abs(change) > FLOOR.of(row.base_us)
    return "called the same" if row.word == SAME and beyond else ""


def trial(
    noise: RealNoise, source: np.random.Generator, launches: tuple[int, int], change: float
) -> list[times.RowVerdict]:
    """Return the verdicts on all rows of one pair of sides."""
    wheel = int(source.integers(len(noise.wheels)))
    pairs = {
        key: (
            noise.rows(source, wheel, key, launches[0], 1.0),
            noise.rows(source, wheel, key, launches[1], 1 + change),
        )
        for key in noise.keys
    }
    return [row for curve in times.curves(pairs, FLOOR) for row in curve.rows]


def main() -> None:
    """Print a line for each number of launches and change; exit 1 where a rule is broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    noise, broken = RealNoise(), False
    print("launches change  slower faster   same unclear  bimodal  wrong rows, of comparisons with one")
    for launches in LAUNCHES:
        for change in CHANGES:
            source = np.random.default_rng([options.seed, *launches, round(1000 * (change + 1))])
            began, counts, faults, spoilt = time.monotonic(), Counter[str](), Counter[str](), 0
            for _ in range(options.trials):
                rows = trial(noise, source, launches, change)
                counts.update(row.word for row in rows)
                counts["bimodal"] += sum(row.ratio is None for row in rows)
                found = [fault for row in rows if (fault := wrong(row, change))]
                faults.update(found)
                spoilt += bool(found)
            total = options.trials * len(noise.keys)
            broken |= sum(faults.values()) > (0 if change else total / 100)
            shares = "".join(
                f"{100 * counts[word] / total:7.2f}" for word in (SLOWER, FASTER, SAME, UNCLEAR, "bimodal")
            )
            said = ", ".join(f"{count} {fault}" for fault, count in faults.items()) or "none"
            print(
                f"{launches[0]} to {launches[1]} {100 * change:+6.0f} % {shares}  {said} of {total},"
                f" in {spoilt} of {options.trials} comparisons, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    sys.exit(broken)


if __name__ == "__main__":
    main()
