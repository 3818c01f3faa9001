"""Communication: memory, communicators and, where the release has it, the one-sided all-to-all."""

from __future__ import annotations

from .._facts import FACTS
from .mapping import Mapping

__all__ = ["Mapping"]
if FACTS.moe_alltoall:
    from .trtllm_moe_alltoall import MoeAlltoAll

    __all__ += ["MoeAlltoAll"]
