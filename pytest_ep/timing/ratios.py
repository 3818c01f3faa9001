"""The ratio of two sides' medians, each of a few launches, and how far it can be trusted.

Samples of one launch share what that launch was like, so launches count, not samples. Two or three launches
that happen to agree are no evidence that launches agree: what is known of launches in general is weighed with
what these show, as if seen in ``PRIOR_FREEDOM`` more launches (a moderated variance, after Smyth,
Stat. Appl. Genet. Mol. Biol. 3 (2004) 3). All is in logarithms, in which a ratio is a difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pytest_ep.timing.statistics import Samples
from pytest_ep.timing.statistics import student

CONFIDENCE = 0.99
"""Of every interval."""
PRIOR_FREEDOM = 5
"""Degrees of freedom that ``launch_noise`` counts for."""
DRAWS = 400
"""Bootstrap replicates: a standard error within 4 %."""
_SEED = 20261129

Logs = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LaunchNoise:
    """By how much medians of launches of the same thing differ: standard deviations that add as squares.

    ``us`` is the same at every length, ``share`` a share of the median.
    """

    us: float
    share: float

    def of(self, median_us: float) -> float:
        """Return the relative standard deviation at a median."""
        return math.hypot(self.us / median_us, self.share)

    def __str__(self) -> str:
        return f"{self.us:g} us and {100 * self.share:g} %" if self.us else f"{100 * self.share:g} %"


LAUNCH_COST_NOISE = LaunchNoise(5.0, 0.15)
"""What is assumed of launch cost, event less graph, as the median over the T of a curve."""


def launch_noise(clock: str, component: str) -> LaunchNoise:
    """Return what is assumed of launches, on the wide side of what was seen.

    By the graph clock medians of twelve launches on 2 H200 differ by 0.1 us in dispatch and in combine at any
    T (rms, 0.27 at most) and by 0.05 us in roundtrip; by the event clock, Python included, by 20 %, up to a
    factor of two. Six launches over gloo on a CPU, by the host's clock, differ by 9 %. Launches by the
    kernel clock were not compared, and are taken to be as by the graph clock. ci/soaks/compare_trials.py
    shows what these assumptions give.
    """
    if clock == "host":
        return LaunchNoise(0.0, 0.1)
    if clock == "event":
        return LaunchNoise(0.0, 0.2)
    return LaunchNoise(0.06 if component == "roundtrip" else 0.17, 0.002)


@dataclass(frozen=True, slots=True)
class Measured:
    """One side of a ratio: ``logs`` [L] of its launches' medians.

    ``within`` is the variance of one such log that sampling alone explains, ``between`` its whole variance,
    sampling included, as L launches show it; 0 for one.
    """

    logs: Logs
    within: float
    between: float

    @property
    def launches(self) -> int:
        """How many launches."""
        return self.logs.size

    @property
    def median(self) -> float:
        """The side's figure: the geometric mean of its launches' medians."""
        return math.exp(float(self.logs.mean()))


@dataclass(frozen=True, slots=True)
class Ratio:
    """New over base, with its 99 % interval."""

    value: float
    low: float
    high: float


def measure(medians: Sequence[float], samples: Sequence[Samples] | None = None) -> Measured:
    """Measure a side by its launches' medians, L, in any unit, and the samples of each, in any unit.

    Of medians of more samples than are at hand the sampling error is taken from those, on the wide side.
    Without samples it is taken as none.

    A hierarchical bootstrap: ``within`` is that of a launch's samples, ``between`` that of whole launches.
    The latter needs no draws: of figures of L launches drawn again it is s^2 (L - 1) / L^2, s^2 being the
    logs' variance, so that s^2 is one launch's without bias. Samples of the launches drawn are not drawn
    again, as a launch's median has its sampling error already, which would then count two or three times
    (the cluster bootstrap: Field and Welsh, J. R. Statist. Soc. B 69 (2007) 369).
    """
    logs = np.log(np.asarray(medians, dtype=np.float64))
    within = float(np.mean([_sampling_variance(one) for one in samples])) if samples else 0.0
    return Measured(logs, within, float(logs.var(ddof=1)) if logs.size > 1 else 0.0)


def scale(sides: Iterable[Measured], noise: LaunchNoise) -> float:
    """Return by what the assumed variance of launches is to be multiplied on the rows of one curve.

    Rows share their launches, so all rows together count as the launches of one side less one, beside the
    ``PRIOR_FREEDOM`` of the assumption.
    """
    seen = [(one.between / _assumed(one, noise), one.launches - 1) for one in sides if one.launches > 1]
    if not seen:
        return 1.0
    shown = sum(variance for variance, _ in seen) / len(seen)
    freedom = sum(freedom for _, freedom in seen) / len(seen)
    return (PRIOR_FREEDOM + freedom * shown) / (PRIOR_FREEDOM + freedom)


def ratio(base: Measured, new: Measured, noise: LaunchNoise, scaled: float = 1.0) -> Ratio:
    """Return the ratio of two sides; ``scaled`` is the curve's ``scale``.

    Student's interval with the degrees of freedom of Welch and Satterthwaite (Biometrics Bull. 2 (1946) 110).
    """
    parts = [_error(one, noise, scaled) for one in (base, new)]
    total = sum(variance for variance, _ in parts)
    freedom = total**2 / sum(variance**2 / freedom for variance, freedom in parts)
    half = student((1 + CONFIDENCE) / 2, freedom) * math.sqrt(total)
    log = float(new.logs.mean() - base.logs.mean())
    return Ratio(math.exp(log), math.exp(log - half), math.exp(log + half))


def slow_launches(one: Measured, noise: LaunchNoise, least: float) -> int:
    """Return how many launches form a slow group of their own, 0 where all are one group.

    Two groups: of three or more launches, a gap that is at least the share ``least``, three times the range
    of either group, and five times the deviation assumed of launches.
    """
    if one.launches < 3:
        return 0
    ordered = np.sort(one.logs)
    gaps = np.diff(ordered)
    low = int(gaps.argmax()) + 1
    inside = max(ordered[low - 1] - ordered[0], ordered[-1] - ordered[low])
    wide = max(math.log1p(least), 3 * inside, 5 * noise.of(one.median))
    return one.launches - low if gaps[low - 1] >= wide else 0


def _assumed(one: Measured, noise: LaunchNoise) -> float:
    return noise.of(one.median) ** 2 + one.within


def _error(one: Measured, noise: LaunchNoise, scaled: float) -> tuple[float, float]:
    """Return the variance of a side's figure and its degrees of freedom.

    Launches that agree more closely than their sampling error allows do so by chance.
    """
    own = one.launches - 1
    variance = (PRIOR_FREEDOM * scaled * _assumed(one, noise) + own * one.between) / (PRIOR_FREEDOM + own)
    return max(variance, one.within) / one.launches, PRIOR_FREEDOM + own


def _sampling_variance(samples: Samples) -> float:
    """Return the variance of the logarithm of the median of samples drawn again."""
    low, high = _middles(samples.size)
    ordered = np.sort(samples)
    return float(np.log((ordered[low] + ordered[high]) / 2).var())


@lru_cache(maxsize=32)
def _middles(count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Draw samples by their place in order, and return the two middle places of each draw: [DRAWS] both."""
    drawn = np.sort(np.random.default_rng(_SEED).integers(count, size=(DRAWS, count)), axis=1)
    return drawn[:, (count - 1) // 2], drawn[:, count // 2]
