"""The device context: once lost, every later call on this process fails."""

from __future__ import annotations

LAUNCH_FAILURE = "CUDA error: unspecified launch failure"
MISALIGNED = "CUDA error: misaligned address"


class Context:
    """The error that this process is stuck with, or None."""

    error: str | None = None


def check() -> None:
    """Raise what an earlier kernel left behind, as any later CUDA call does."""
    if Context.error is not None:
        raise RuntimeError(Context.error)


def lose(error: str) -> None:
    """Make ``error`` sticky and raise it."""
    Context.error = error
    check()


def require(condition: bool, text: str) -> None:
    """A C++ check of the wheel: RuntimeError with its prefix."""
    if not condition:
        raise RuntimeError(f"Check failed: {text}")
