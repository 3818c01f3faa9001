"""Launches that never were, with the noise of real ones: what a comparison must not call a change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pytest_ep.results.sides import Row
from pytest_ep.results.sides import RowKey
from pytest_ep.results.sides import load_side
from pytest_ep.timing.statistics import Samples

BASELINES = Path(__file__).parents[1] / "ci" / "baselines" / "h200-x2"


class RealNoise:
    """Draws launches from the baselines: three launches each of several wheels.

    A launch's row has the samples of a real launch of that wheel and T, moved to the wheel's mean, then by
    how far some launch was from its own wheel's mean: of any wheel, at that T or the next ones of the same
    component, either way. Three launches around their own mean differ by too little, which is made up for.
    """

    def __init__(self, folder: Path = BASELINES) -> None:
        self.wheels = [load_side(str(wheel)) for wheel in sorted(folder.iterdir())]
        self.keys: list[RowKey] = sorted(set.intersection(*(set(w.launches[0].rows) for w in self.wheels)))
        self._samples: dict[tuple[int, RowKey], list[Samples]] = {}
        self._logs: dict[tuple[int, RowKey], Samples] = {}
        for number, wheel in enumerate(self.wheels):
            for key in self.keys:
                real = [np.array(launch.rows[key].seconds) for launch in wheel.launches]
                medians = [np.median(samples) for samples in real]
                self._samples[number, key] = [one / middle for one, middle in zip(real, medians, strict=True)]
                self._logs[number, key] = np.log(medians)
        self._centre = {one: float(logs.mean()) for one, logs in self._logs.items()}
        self._deviations = {
            key: np.sort(np.concatenate([self._seen(one) for one in self._next(key)])) for key in self.keys
        }

    def side(
        self,
        source: np.random.Generator,
        wheel: int,
        keys: Sequence[RowKey],
        launches: int,
        change: float = 1.0,
        *,
        alike: bool = False,
    ) -> dict[RowKey, list[Row]]:
        """Return each key's rows in so many launches of a wheel, all times multiplied by ``change``.

        Rows of a launch deviate each by itself, or ``alike``: all are equally far into their own tails, as
        those of a launch that is slow throughout.
        """
        places = source.random((launches, 1 if alike else len(keys)))
        places = np.broadcast_to(places, (launches, len(keys)))
        return {
            key: [self._row(source, wheel, key, float(place), change) for place in places[:, column]]
            for column, key in enumerate(keys)
        }

    def _row(self, source: np.random.Generator, wheel: int, key: RowKey, place: float, change: float) -> Row:
        real = self._samples[wheel, key]
        samples = real[source.integers(len(real))]
        deviations = self._deviations[key]
        median = math.exp(self._centre[wheel, key] + deviations[int(place * deviations.size)]) * change
        clock = self.wheels[wheel].launches[0].rows[key].clock
        return Row(key, {"clock": clock, "p50_us": median * 1e6}, tuple((samples * median).tolist()))

    def _next(self, key: RowKey) -> Sequence[RowKey]:
        """Return the rows of the same component at this T, the one before and the one after."""
        curve = [one for one in self.keys if one.component == key.component]
        place = curve.index(key)
        return curve[max(0, place - 1) : place + 2]

    def _seen(self, key: RowKey) -> Samples:
        """Return by how far, in logarithms, launches were from the mean of their wheel; and the reverse."""
        found = []
        for number in range(len(self.wheels)):
            logs = self._logs[number, key]
            found.append((logs - self._centre[number, key]) * np.sqrt(logs.size / (logs.size - 1)))
        return np.concatenate([*found, *(-one for one in found)])
