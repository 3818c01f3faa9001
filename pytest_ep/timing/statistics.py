"""What a list of durations says: medians, percentiles, noise, and the slowest rank of each iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float64]

STORED_SAMPLES = 512
"""The most samples that a row keeps."""


class SampleError(ValueError):
    """Samples that are no measurement; the message is one line that names the rank and the fault."""


def checked(samples: npt.ArrayLike, owner: str) -> Samples:
    """Return ``samples`` [n] as float64 seconds; each must be finite and positive, and n at least 1.

    ``owner`` names whose samples they are in the SampleError. pytest-benchmark itself accepts zero and
    negative durations, and one NaN makes it lose the whole result file.
    """
    array = np.asarray(samples, dtype=np.float64)
    if array.ndim != 1 or not array.size:
        raise SampleError(f"{owner} has no samples")
    faulty = np.flatnonzero(~(np.isfinite(array) & (array > 0)))
    if faulty.size:
        first = int(faulty[0])
        raise SampleError(
            f"{owner}: sample {first} of {array.size} is {array[first]} s, which is no duration"
            f" ({faulty.size} such)"
        )
    return array


def combine_ranks(per_rank: Sequence[npt.ArrayLike]) -> tuple[Samples, Samples]:
    """Reduce every rank's seconds to the group's: (maxima [n], spread [n]).

    An iteration lasts as long as on its slowest rank; spread is its slowest minus its fastest rank.
    Raises SampleError where a rank has no samples, another count than rank 0, or a sample that is not
    finite and positive: left out of the maximum, such a rank would make the group look fast.
    """
    ranks = [checked(samples, f"rank {rank}") for rank, samples in enumerate(per_rank)]
    if not ranks:
        raise SampleError("no rank has samples")
    for rank, samples in enumerate(ranks):
        if samples.size != ranks[0].size:
            raise SampleError(f"rank {rank} has {samples.size} samples where rank 0 has {ranks[0].size}")
    table = np.stack(ranks)
    maxima = table.max(axis=0)
    return maxima, maxima - table.min(axis=0)


def percentile(samples: Samples, q: float) -> float:
    """Return the nearest-rank percentile: the smallest sample that q percent of them do not exceed."""
    rank = max(1, math.ceil(q * samples.size / 100))
    return float(np.partition(samples, rank - 1)[rank - 1])


def median(samples: Samples) -> float:
    """Return the middle sample, or the mean of the two middle ones."""
    return float(np.median(samples))


def noise(samples: Samples) -> float | None:
    """Return the half-width of the 95 % interval of the median, in percent of the median.

    The interval runs between two order statistics, so it assumes no shape of distribution: with k the
    largest rank for which P[Binomial(n, 1/2) < k] <= 2.5 %, from the k-th smallest to the k-th largest.
    Fewer than 6 samples hold no such pair, and give None (null in JSON). Samples are taken as independent;
    where they drift together the true interval is wider.
    """
    depth = _interval_depth(samples.size)
    if not depth:
        return None
    ordered = np.sort(samples)
    return float(50 * (ordered[-depth] - ordered[depth - 1]) / median(samples))


def student(probability: float, freedom: float) -> float:
    """Return a quantile of Student's t, within 0.1 % for ``probability`` 0.5 to 0.995 and ``freedom`` from 5.

    Its expansion around the normal quantile (Abramowitz and Stegun 26.7.5).
    """
    z = NormalDist().inv_cdf(probability)
    square = z * z
    terms = (
        (square + 1) * z / 4,
        ((5 * square + 16) * square + 3) * z / 96,
        (((3 * square + 19) * square + 17) * square - 15) * z / 384,
        ((((79 * square + 776) * square + 1482) * square - 1920) * square - 945) * z / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def thin(samples: Samples, limit: int = STORED_SAMPLES) -> Samples:
    """Return at most ``limit`` of the samples, evenly spaced in time.

    Evenly in time, not by value, so that what is kept still shows drift and bursts, and is chosen blind to
    what it says. Medians and percentiles are to be computed before thinning.
    """
    if samples.size <= limit:
        return samples
    return samples[np.arange(limit) * samples.size // limit]


@lru_cache(maxsize=64)
def _interval_depth(n: int) -> int:
    """Return k of ``noise``: how far the interval's ends lie from the extremes; 0 where none is wide enough.

    In exact integers: 2^n in floats ends at n = 1023.
    """
    depth, ways, below = 0, 1, 1
    while 40 * below <= 1 << n:
        depth += 1
        ways = ways * (n - depth + 1) // depth
        below += ways
    return depth
