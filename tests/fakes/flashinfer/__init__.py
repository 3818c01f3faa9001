"""A stand-in for flashinfer-python: the API and the arithmetic of several releases, over gloo, on the CPU.

PYTEST_EP_FAKE_FLASHINFER names the release (default 0.6.16.post4), PYTEST_EP_FAKE_FAULT what goes wrong
(see ``_faults.py``). Importing it fails where the release it imitates would: see ``jit/env.py``.
"""

from __future__ import annotations

from . import _faults as _faults
from . import jit as jit
from ._facts import VERSION as __version__

__all__ = ["__version__"]
