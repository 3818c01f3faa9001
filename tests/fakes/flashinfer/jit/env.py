"""Where modules are looked for, and whether the prebuilt packages fit this release."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from .._facts import FACTS
from .._facts import VERSION

FLASHINFER_BASE_DIR = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", tempfile.gettempdir()))
FLASHINFER_WORKSPACE_DIR = FLASHINFER_BASE_DIR / ".cache" / "flashinfer" / VERSION / "90a"
FLASHINFER_JIT_DIR = FLASHINFER_WORKSPACE_DIR / "cached_ops"
FALLBACK_AOT_DIR = Path(__file__).resolve().parents[1] / "data" / "aot"


def _package(name: str) -> Any:
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None


def _fits(distribution: str, version: str) -> bool:
    """Old releases refuse to be imported beside another version, newer ones ignore the package."""
    if distribution == "flashinfer-cubin":
        fits = version == VERSION
    elif FACTS.backend_choice or not FACTS.moe_alltoall:
        fits = version == VERSION or version.startswith(f"{VERSION}+")
    else:
        fits = version.startswith(VERSION)
    if fits or os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK"):
        return True
    text = f"{distribution} version ({version}) does not match flashinfer version ({VERSION}). "
    if FACTS.name in {"0.7.1", "0.7.4"}:
        logging.getLogger("flashinfer.jit").warning(
            "Ignoring incompatible %s package: %s", distribution, text
        )
        return False
    raise RuntimeError(
        text + "Please install the same version of both packages. "
        "Set FLASHINFER_DISABLE_VERSION_CHECK=1 to bypass this check."
    )


def _aot_dir() -> Path:
    cubin = _package("flashinfer_cubin")
    if cubin is not None:
        _fits("flashinfer-cubin", cubin.__version__)
    cache = _package("flashinfer_jit_cache")
    if cache is not None and _fits("flashinfer-jit-cache", cache.__version__):
        return Path(cache.get_jit_cache_dir())
    return FALLBACK_AOT_DIR


FLASHINFER_AOT_DIR = _aot_dir()
