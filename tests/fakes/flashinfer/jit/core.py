"""One kernel module: built by the first rank that asks, under a lock, or found prebuilt."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from .. import _faults
from ..fake import counts
from . import env as jit_env


class MissingJITCacheError(RuntimeError):
    """Compilation is disabled and no prebuilt module exists."""


@dataclass(frozen=True)
class JitSpec:
    """A module by name."""

    name: str

    @property
    def aot_path(self) -> Path:
        """Where a prebuilt module would be."""
        return jit_env.FLASHINFER_AOT_DIR / self.name / f"{self.name}.so"

    @property
    def jit_library_path(self) -> Path:
        """Where the built module goes."""
        return jit_env.FLASHINFER_JIT_DIR / self.name / f"{self.name}.so"

    @property
    def lock_path(self) -> Path:
        """What builders exclude one another with."""
        return jit_env.FLASHINFER_JIT_DIR / "tmp" / f"{self.name}.lock"

    @property
    def is_aot(self) -> bool:
        """Whether a prebuilt module exists."""
        return self.aot_path.exists()

    @property
    def is_compiled(self) -> bool:
        """Whether any built module exists."""
        return self.is_aot or self.jit_library_path.exists()

    def build(self, verbose: bool = False, need_lock: bool = True) -> None:
        """Compile unless that is done; each build adds a line with its rank to builds.log."""
        if os.environ.get("FLASHINFER_DISABLE_JIT"):
            raise MissingJITCacheError(
                "JIT compilation is disabled via FLASHINFER_DISABLE_JIT environment variable, "
                "but the required module is not found in the JIT cache."
            )
        if self.jit_library_path.exists():
            return
        if _faults.active("build-fails") is not None:
            raise RuntimeError("Ninja build failed. Ninja output:\nninja: build stopped: subcommand failed.")
        slow = _faults.active("build-sleep")
        if slow is not None:
            time.sleep(slow.number)
        self.jit_library_path.parent.mkdir(parents=True, exist_ok=True)
        with (jit_env.FLASHINFER_JIT_DIR / "builds.log").open("a") as log:
            log.write(f"{self.name} rank {_faults.this_rank()}\n")
        self.jit_library_path.touch()
        counts.built += 1

    def build_and_load(self) -> object:
        """The module, built if need be."""
        if not self.is_aot:
            self.lock_path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.lock_path):
                self.build()
        return object()
