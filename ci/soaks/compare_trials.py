"""What a comparison says of launches with real noise, those of NEW slower or faster by a known share.

A trial compares all rows of two sides. None may have the wrong sign, nor be called the same where the change
is beyond the floor; of no change at all at most 1 % of the rows may be called slower or faster. Changes of
1 % are judged by a finer floor, as no 1 % is beyond one of 1 %. Rows of a launch deviate each by itself, or
all alike: a launch that is slow throughout.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from pytest_ep.results import times
from pytest_ep.results.verdicts import FASTER
from pytest_ep.results.verdicts import SAME
from pytest_ep.results.verdicts import SLOWER
from pytest_ep.results.verdicts import UNCLEAR
from pytest_ep.results.verdicts import Floor
from tests.real_noise import RealNoise

LAUNCHES = ((1, 1), (2, 2), (3, 3), (5, 5), (3, 1))
FLOOR, FINE = Floor(), Floor(0.5, 0.05)
CHANGES = (
    (0.0, FLOOR),
    (0.01, FINE),
    (-0.01, FINE),
    *((change, FLOOR) for change in (0.015, -0.015, 0.03, -0.03, 0.1, -0.1)),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What the trials of one line have in common."""

    alike: bool
    launches: tuple[int, int]
    change: float
    floor: Floor

    def seed(self, given: int) -> list[int]:
        """Return the seed of its trials."""
        return [given, self.alike, *self.launches, round(1000 * (self.change + 1))]

    def wrong(self, row: times.RowVerdict) -> str:
        """Return what is wrong with a verdict; empty where nothing is."""
        if not self.change:
            return "called slower or faster" if row.word in (SLOWER, FASTER) else ""
        if row.word == (FASTER if self.change > 0 else SLOWER):
            return "wrong sign"
        beyond = abs(self.change) > self.floor.of(row.base_us)
        return "called the same" if row.word == SAME and beyond else ""

    def trial(self, noise: RealNoise, source: np.random.Generator) -> Iterator[times.RowVerdict]:
        """Yield the verdicts on all rows of one pair of sides."""
        wheel = int(source.integers(len(noise.wheels)))
        base, new = (
            noise.side(source, wheel, noise.keys, launches, change, alike=self.alike)
            for launches, change in zip(self.launches, (1.0, 1 + self.change), strict=True)
        )
        for curve in times.curves({key: (base[key], new[key]) for key in noise.keys}, self.floor):
            yield from curve.rows

    def line(self, noise: RealNoise, trials: int, seed: int) -> tuple[str, bool]:
        """Make the trials; return what came of them, and whether a rule is broken."""
        source = np.random.default_rng(self.seed(seed))
        began, counts, faults, spoilt = time.monotonic(), Counter[str](), Counter[str](), 0
        for _ in range(trials):
            rows = list(self.trial(noise, source))
            counts.update(row.word for row in rows)
            counts["bimodal"] += sum(row.ratio is None for row in rows)
            found = [fault for row in rows if (fault := self.wrong(row))]
            faults.update(found)
            spoilt += bool(found)
        total = trials * len(noise.keys)
        columns = (SLOWER, FASTER, SAME, UNCLEAR, "bimodal")
        said = ", ".join(f"{count} {fault}" for fault, count in faults.items()) or "none"
        text = (
            f"{'alike' if self.alike else 'apart'} {self.launches[0]} to {self.launches[1]}"
            f" {100 * self.change:+6.1f} % {self.floor.percent:4.1f} % "
            + "".join(f"{100 * counts[name] / total:7.2f}" for name in columns)
            + f"  {said} of {total}, in {spoilt} of {trials}, {time.monotonic() - began:.0f} s"
        )
        return text, sum(faults.values()) > (0 if self.change else total / 100)


def main() -> None:
    """Print a line for each setting; exit 1 where a rule is broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    noise, broken = RealNoise(), False
    print("rows  launches change  floor  slower faster   same unclear bimodal  wrong rows, comparisons")
    for alike, launches, (change, floor) in product((False, True), LAUNCHES, CHANGES):
        text, wrong = Setting(alike, launches, change, floor).line(noise, options.trials, options.seed)
        print(text, flush=True)
        broken |= wrong
    sys.exit(broken)


if __name__ == "__main__":
    main()
