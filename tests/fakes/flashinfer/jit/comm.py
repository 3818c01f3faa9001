"""The modules of the one-sided transport."""

from __future__ import annotations

from .._facts import FACTS
from .core import JitSpec

if FACTS.moe_alltoall:

    def gen_moe_alltoall_module() -> JitSpec:
        """The module of MoeAlltoAll."""
        return JitSpec("mnnvl_moe_alltoall")


if not FACTS.moe_alltoall:

    def gen_nvlink_one_sided_alltoall_module() -> JitSpec:
        """The module of NVLinkOneSidedAlltoAll, once it has its own."""
        return JitSpec("nvlink_one_sided_alltoall")
