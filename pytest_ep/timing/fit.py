"""Latency and bandwidth of a curve: a line of time over bytes, where a line explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pytest_ep.timing.statistics import student

LEAST_POINTS = 4
LEAST_R2 = 0.9
LEAST_TRANSFER = 0.25
"""The share of the longest time that the bytes must account for: with less the bandwidth was hardly used."""

_T_975 = {2: 4.3027, 3: 3.1824, 4: 2.7764}


@dataclass(frozen=True, slots=True)
class Fit:
    """``seconds = latency + bytes / bandwidth``, each with its 95 % interval (low, high).

    ``latency`` in seconds, ``bandwidth`` in bytes per second; its high end is None where the data allow any.
    ``transfer`` is the share of the bytes in the longest time.
    """

    latency: float
    latency_interval: tuple[float, float]
    bandwidth: float
    bandwidth_interval: tuple[float, float | None]
    r2: float
    transfer: float
    points: int


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Fit | None:
    """Fit by ordinary least squares; None where the line does not explain the points.

    It does with at least 4 different sizes, R^2 of 0.9 or more, a quarter or more of the time of the largest
    size due to its bytes, and a latency above zero. Intervals are Student's, for n - 2 degrees of freedom:
    residuals are taken as independent and alike, so where they grow with the size, as they do, the latency's
    is on the wide side.
    """
    x, y = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if np.unique(x).size < LEAST_POINTS:
        return None
    centred = x - x.mean()
    squares = float(centred @ centred)
    slope = float(centred @ y) / squares
    latency = float(y.mean() - slope * x.mean())
    residual = float(((y - latency - slope * x) ** 2).sum())
    total = float(((y - y.mean()) ** 2).sum())
    r2 = 1 - residual / total if total else 0.0
    if r2 < LEAST_R2 or latency <= 0 or slope <= 0:
        return None
    transfer = slope * float(x.max()) / (latency + slope * float(x.max()))
    if transfer < LEAST_TRANSFER:
        return None
    error = student_975(x.size - 2) * math.sqrt(residual / (x.size - 2))
    slope_error = error / math.sqrt(squares)
    latency_error = error * math.sqrt(1 / x.size + x.mean() ** 2 / squares)
    return Fit(
        latency=latency,
        latency_interval=(latency - latency_error, latency + latency_error),
        bandwidth=1 / slope,
        bandwidth_interval=(
            1 / (slope + slope_error),
            1 / (slope - slope_error) if slope > slope_error else None,
        ),
        r2=r2,
        transfer=transfer,
        points=x.size,
    )


def student_975(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t for 2 or more degrees of freedom, within 0.1 %."""
    return _T_975.get(freedom) or student(0.975, freedom)
