"""What ranks other than 0 would print: held back until it is known whether this is our kind of run."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any
from typing import TextIO

LAST_BYTES = 1500


def last_lines() -> str:
    """Return the end of what is captured at this moment, by file descriptor; pytest then still has all of it.

    Empty where nothing is captured so: then it has gone where people see it.
    """
    said = []
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # a pipe, a terminal, a file that is only written
            size = os.fstat(descriptor).st_size
            said.append(os.pread(descriptor, LAST_BYTES, max(0, size - LAST_BYTES)))
    return "\n".join(b"\n".join(said).decode(errors="replace").splitlines()[-10:])


class HeldOutput(io.TextIOBase):
    """Stands in for stdout: keeps what is written, then passes it on or drops it."""

    def __init__(self, target: TextIO) -> None:
        self._target = target
        self._held: list[str] = []
        self._write: Callable[[str], object] = self._held.append

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As the real one says, so that the report is formed as it would be without us."""
        return self._target.encoding

    def __getattr__(self, name: str) -> Any:
        """As the real one has it: a conftest may ask for ``buffer`` or ``reconfigure``."""
        return getattr(self._target, name)

    def isatty(self) -> bool:
        """As the real one says."""
        return self._target.isatty()

    def fileno(self) -> int:
        """As the real one says."""
        return self._target.fileno()

    def write(self, text: str) -> int:
        """Keep, pass on or drop the text."""
        self._write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the real one."""
        self._target.flush()

    def release(self) -> None:
        """Print what was held, and pass on all that follows."""
        held, self._held = self._held, []
        self._write = self._target.write
        self._target.write("".join(held))
        self._target.flush()
        self._step_back()

    def drop(self) -> None:
        """Forget what was held, and all that follows until ``release``."""
        self._held = []
        self._write = len
        self._step_back()

    def _step_back(self) -> None:
        """Put the real one back: from here on the terminal reporter alone writes to this."""
        if sys.stdout is self:
            sys.stdout = self._target
