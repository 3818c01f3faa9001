"""The one enumeration that the public signatures mention."""

from __future__ import annotations

from enum import Enum


class SfLayout(Enum):
    """Layouts of output scale factors."""

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2
