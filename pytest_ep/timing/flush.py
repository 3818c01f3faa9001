"""Overwriting the L2 cache between timed pairs."""

from __future__ import annotations

import torch

L2_SIZES = 2
"""The buffer's size in caches: one would leave what was not replaced."""


class L2Flush:
    """Writes a buffer larger than the device's L2 cache, on the current stream, or into a graph."""

    def __init__(self, device: torch.device) -> None:
        """Allocate it."""
        size = L2_SIZES * torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        """Issue one write of the whole buffer; nothing waits for it."""
        self._buffer.zero_()
