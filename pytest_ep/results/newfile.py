"""Files that a command writes: always new ones."""

from __future__ import annotations

from pathlib import Path

from pytest_ep.results.sides import ResultError


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet, line ends as they are. Raises ResultError where it cannot be."""
    try:
        with path.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
    except FileExistsError:
        raise ResultError(f"{path} exists and is not overwritten: name another file") from None
    except OSError as error:
        raise ResultError(f"{path}: cannot be written, {error.strerror}: name another file") from None
