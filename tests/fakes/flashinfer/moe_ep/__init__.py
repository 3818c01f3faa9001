"""Expert parallelism as layers; of its transports only the one-sided one, from 0.7.1 on."""

from __future__ import annotations

from .._facts import FACTS

if FACTS.name == "0.6.8":
    raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
if FACTS.one_sided:
    from .config import BootstrapConfig as BootstrapConfig
    from .config import MoEEpCommParams as MoEEpCommParams
    from .config import MoEEpDispatchResult as MoEEpDispatchResult
    from .config import NVLinkOneSidedConfig as NVLinkOneSidedConfig
    from .one_sided import NVLinkOneSidedAlltoAll as NVLinkOneSidedAlltoAll
