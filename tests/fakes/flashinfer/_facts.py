"""What distinguishes the imitated releases: one row of facts per API generation."""

from __future__ import annotations

import os
from dataclasses import dataclass

from packaging.version import InvalidVersion
from packaging.version import Version

VERSION = os.environ.get("PYTEST_EP_FAKE_FLASHINFER", "0.6.16.post4")
OLD_TOP_KS = (1, 2, 4, 6, 8, 10, 16, 22)
NEW_TOP_KS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)


@dataclass(frozen=True)
class Facts:
    """One API generation.

    ``accumulate``: what combine adds in, "payload" or "float32"; ``even_experts``: experts must be a multiple
    of ep_size; ``barrier``: construction ends in one; ``handles``: how memory is shared, "pidfd", "sockets"
    or "agreed"; ``packed``: planes are unpadded and the copy width looks at the row alone;
    ``drops_invalid``: a token's expert id outside [0, experts) has no destination.
    """

    name: str
    accumulate: str
    top_ks: tuple[int, ...]
    max_payloads: int
    even_experts: bool
    barrier: bool
    handles: str
    packed: bool
    quantised_output: bool
    rank_mask: bool
    backend_choice: bool
    max_ranks: int = 64
    drops_invalid: bool = False
    moe_alltoall: bool = True
    one_sided: bool = False


V068 = Facts("0.6.8", "payload", OLD_TOP_KS, 4, True, False, "pidfd", True, False, False, False)
V0614 = Facts("0.6.14", "payload", OLD_TOP_KS, 6, True, False, "pidfd", True, True, False, False)
V0616 = Facts("0.6.16", "float32", NEW_TOP_KS, 6, False, False, "sockets", True, True, True, False)
V071 = Facts(
    "0.7.1", "float32", NEW_TOP_KS, 6, False, True, "sockets", False, True, True, True, one_sided=True
)
V074 = Facts(
    name="0.7.4",
    accumulate="float32",
    top_ks=(1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 22),
    max_payloads=4,
    even_experts=True,
    barrier=True,
    handles="agreed",
    packed=False,
    quantised_output=False,
    rank_mask=True,
    backend_choice=False,
    max_ranks=256,
    drops_invalid=True,
    moe_alltoall=False,
    one_sided=True,
)
FIRST_RELEASES = (("0.7.4rc0", V074), ("0.7.1rc0", V071), ("0.6.16rc1", V0616), ("0.6.14rc0", V0614))


def facts_of(version: str) -> Facts:
    """The generation a release belongs to; a version that does not parse behaves like 0.6.16."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return V0616
    return next((facts for first, facts in FIRST_RELEASES if parsed >= Version(first)), V068)


FACTS = facts_of(VERSION)
