"""Samples of all ranks: equal batches until rank 0 says that it is enough, and what they say together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pytest_ep.ranks.fate import AgreedFailure
from pytest_ep.ranks.fate import Failure
from pytest_ep.results.record import JSON
from pytest_ep.run import Run
from pytest_ep.timing import statistics
from pytest_ep.timing.sampling import COMPONENTS
from pytest_ep.timing.sampling import Batch
from pytest_ep.timing.sampling import Sampler

BATCH = 8
FLOOR, CAP = 16, 512
"""Samples of a component: at least, at most."""
LATE = 3.0
"""An iteration is late from this many medians on."""
SKEWED = 0.5
"""A case is skewed where the ranks' median spread is this share of its value, or more."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """All ranks' samples of one clock: maxima and spread by series, seconds; and each rank's own.

    ``met`` says whether the interval that was asked for was reached, None where the number was given.
    """

    seconds: dict[str, statistics.Samples]
    spread: dict[str, statistics.Samples]
    by_rank: list[Batch]
    elapsed: float
    met: bool | None

    def median_us(self, series: str) -> float:
        """The median of the maxima, us."""
        return statistics.median(self.seconds[series]) * 1e6

    def skew(self, component: str) -> dict[str, JSON]:
        """Say how the ranks differ.

        Each one's median; which was slowest and which fastest most often, and how often; how many iterations
        were late. Ranks of one exchange end together, so the one that begins late is the fastest.
        """
        table = np.array([samples[component] for samples in self.by_rank])
        maxima = self.seconds[component]
        slowest, fastest = (
            np.bincount(places, minlength=len(table))
            for places in (table.argmax(axis=0), table.argmin(axis=0))
        )
        middle = statistics.median(maxima)
        return {
            "rank_p50_us": [float(one) for one in np.median(table, axis=1) * 1e6],
            "slowest_rank": int(slowest.argmax()),
            "slowest_share": float(slowest.max() / maxima.size),
            "fastest_rank": int(fastest.argmax()),
            "fastest_share": float(fastest.max() / maxima.size),
            "late": int((maxima >= LATE * middle).sum()),
            "skewed": bool(statistics.median(self.spread[component]) >= SKEWED * middle),
        }


def sample(run: Run, sampler: Sampler, number: int | None) -> Sampled:
    """Take batches on all ranks together until it is enough; ``number`` asks for exactly so many samples.

    Raises AgreedFailure where a rank's samples are none.
    """
    number = number or run.options.iterations
    by_rank: list[Batch] = [{one: [] for one in sampler.series} for _ in range(run.ranks.size)]
    began = time.monotonic()
    taken = 0
    while True:
        size = BATCH if number is None else min(BATCH, number - taken)

        def batch(size: int = size) -> tuple[Batch, float]:
            return sampler.batch(size), time.monotonic() - began

        said: list[tuple[Batch, float]] = run.fate.together("timing", batch)
        for mine, (theirs, _) in zip(by_rank, said, strict=True):
            for series in sampler.series:
                mine[series] += theirs[series]
        taken += size
        seconds, spread = combined(by_rank)
        elapsed = said[0][1]  # rank 0's clock is everyone's
        met = _met(seconds, run.options.target_ci) if number is None else None
        if taken == number or (met is not None and _enough(run, taken, elapsed, met)):
            return Sampled(seconds, spread, by_rank, elapsed, met)


def combined(
    by_rank: Sequence[Batch],
) -> tuple[dict[str, statistics.Samples], dict[str, statistics.Samples]]:
    """Reduce the ranks' samples to maxima and spread by series. Raises AgreedFailure where one is unsound."""
    seconds, spread = {}, {}
    for series in by_rank[0]:
        try:
            both = statistics.combine_ranks([samples[series] for samples in by_rank])
        except statistics.SampleError as error:
            raise AgreedFailure(Failure(f"{series}: {error}")) from None
        seconds[series], spread[series] = both
    return seconds, spread


def _enough(run: Run, taken: int, elapsed: float, met: bool) -> bool:
    """Whether the interval is narrow enough, or the time used up."""
    if taken < FLOOR:
        return False
    return met or taken >= CAP or elapsed >= run.options.time_budget


def _met(seconds: dict[str, statistics.Samples], target: float) -> bool:
    noises = [statistics.noise(seconds[component]) for component in COMPONENTS]
    return all(noise is not None and noise <= target for noise in noises)
