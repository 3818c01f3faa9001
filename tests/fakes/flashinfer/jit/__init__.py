"""Building and finding kernel modules."""

from __future__ import annotations

from . import env as env
