"""What a test can ask the stand-in: counts of what happened in this process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counts:
    """Workspaces ``opened`` and ``closed``, ``dispatches`` and ``combines`` entered, modules ``built``."""

    opened: int = 0
    closed: int = 0
    dispatches: int = 0
    combines: int = 0
    built: int = 0

    @property
    def live(self) -> int:
        """Workspaces mapped now."""
        return self.opened - self.closed


counts = Counts()
