"""Launches that never were, with the noise of real ones: what a comparison must not call a change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pytest_ep.results.sides import Row
from pytest_ep.results.sides import RowKey
from pytest_ep.results.sides import load_side

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
        self._samples = {
            (number, key): [np.array(launch.rows[key].seconds) for launch in wheel.launches]
            for number, wheel in enumerate(self.wheels)
            for key in self.keys
        }
        self._centre = {
            one: float(np.mean([np.log(np.median(launch)) for launch in launches]))
            for one, launches in self._samples.items()
        }
        self._deviations = {
            key: np.concatenate([self._seen(one) for one in self._next(key)]) for key in self.keys
        }

    def rows(
        self, source: np.random.Generator, wheel: int, key: RowKey, launches: int, change: float
    ) -> list[Row]:
        """Return a row of so many launches of a wheel, all times multiplied by ``change``."""
        return [self._row(source, wheel, key, change) for _ in range(launches)]

    def _row(self, source: np.random.Generator, wheel: int, key: RowKey, change: float) -> Row:
        real = self._samples[wheel, key]
        samples = real[source.integers(len(real))]
        moved = self._centre[wheel, key] + source.choice(self._deviations[key])
        seconds = samples / np.median(samples) * np.exp(moved) * change
        clock = self.wheels[wheel].launches[0].rows[key].clock
        return Row(key, {"clock": clock, "p50_us": float(np.median(seconds)) * 1e6}, tuple(seconds.tolist()))

    def _next(self, key: RowKey) -> Sequence[RowKey]:
        """Return the rows of the same component at this T, the one before and the one after."""
        curve = [one for one in self.keys if one.component == key.component]
        place = curve.index(key)
        return curve[max(0, place - 1) : place + 2]

    def _seen(self, key: RowKey) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return by how far, in logarithms, launches were from the mean of their wheel; and the reverse."""
        found = []
        for number in range(len(self.wheels)):
            logs = np.log([np.median(launch) for launch in self._samples[number, key]])
            found.append((logs - self._centre[number, key]) * np.sqrt(logs.size / (logs.size - 1)))
        return np.concatenate([*found, *(-one for one in found)])
