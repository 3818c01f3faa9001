"""Dispatch, sanitise and combine on one allocation, with the checks of the wheel and the switched faults."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _device
from .. import _faults
from .._device import require
from .._facts import FACTS
from ..fake import counts
from . import _kernels
from .mnnvl import MnnvlMemory
from .mnnvl import Record


@dataclass(frozen=True)
class Geometry:
    """The sizes that dispatch and combine of one round share."""

    runtime_max: int
    ep_rank: int
    ep_size: int
    top_k: int
    experts: int


def align(offset: int, alignment: int = 128) -> int:
    """The next multiple of ``alignment``."""
    return -(-offset // alignment) * alignment


def record_of(workspace: Tensor) -> Record:
    """The allocation behind a workspace tensor."""
    return MnnvlMemory.allocated_map[workspace.data_ptr()]


def view(record: Record, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of this rank's bytes at ``offset``."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return record.own[offset : offset + size].view(dtype).view(shape)


def exchange(record: Record, data: Any) -> Any:
    """What each rank brings to this kernel. A kernel whose peer never comes does not fail: it waits."""
    try:
        return record.comm.allgather(data)
    except RuntimeError:
        _faults.hang()


def plane_offsets(payloads: list[Tensor], start: int, geometry: Geometry) -> tuple[list[int], int]:
    """Where the planes of each payload begin, and where the last ends.

    Packed planes are copied in the widest unit that divides the row, wherever the plane begins.
    """
    offsets, end = [], start
    for payload in payloads:
        row = payload.shape[1] * payload.element_size()
        if FACTS.name == "0.7.4":
            end = align(end)
        if FACTS.packed and end % math.gcd(row, 16):
            _device.lose(_device.MISALIGNED)
        require(end % payload.element_size() == 0, "Misaligned payload buffer")
        offsets.append(end)
        end += geometry.ep_size * geometry.runtime_max * row
    return offsets, end


def initialize(workspace: Tensor, ep_rank: int, ep_size: int) -> None:
    """Let peers in; the workspace must span exactly the EP group."""
    _device.check()
    require(
        workspace.shape[0] == ep_size,
        f"workspace.size(0) == epSize ({workspace.shape[0]} vs. {ep_size}) : "
        "workspace first dim must equal ep_size",
    )
    require(0 <= ep_rank < ep_size, "epRank >= 0 && epRank < epSize : epRank out of range")
    record_of(workspace).mark_mapped()


def check_inputs(ids: Tensor, payloads: list[Tensor], geometry: Geometry) -> None:
    """The C++ checks that precede the launch."""
    require(ids.is_contiguous(), "tokenSelectedExperts must be contiguous")
    require(ids.dtype == torch.int32, "Inconsistency of Tensor type: tokenSelectedExperts")
    require(ids.dim() == 2, "token_selected_experts must be 2D")
    require(ids.shape[1] == geometry.top_k, "token_selected_experts shape mismatch")
    require(len(payloads) > 0, "At least one payload is required")
    require(len(payloads) <= FACTS.max_payloads, f"Too many payloads: {len(payloads)} > {FACTS.max_payloads}")
    for index, payload in enumerate(payloads):
        require(payload.is_contiguous(), "payload must be contiguous")
        require(payload.dim() == 2, f"payload {index} must be 2D")
        require(
            payload.shape[0] == ids.shape[0],
            f"payload {index} first dimension must match local_num_tokens",
        )
    require(geometry.runtime_max > 0, "runtimeMaxTokensPerRank > 0")
    require(0 < geometry.ep_size <= FACTS.max_ranks, f"epSize must be in the range (0, {FACTS.max_ranks}]")
    require(geometry.experts >= geometry.ep_size, "num_experts must be >= ep_size")
    if FACTS.even_experts:
        require(geometry.experts % geometry.ep_size == 0, "num_experts must be divisible by ep_size")
    if geometry.top_k not in FACTS.top_ks:
        raise RuntimeError(
            "Error in function 'moe_a2a_dispatch_launch' at moeAlltoAllKernels.cu: Unsupported top_k"
        )


def dispatch(
    ids: Tensor, payloads: list[Tensor], record: Record, offsets: list[int], geometry: Geometry
) -> list[Tensor]:
    """Exchange the payloads: planes [ep_size, runtime_max, columns], garbage past the counts."""
    _device.check()
    counts.dispatches += 1
    if _faults.at("launch-failure", counts.dispatches):
        _device.lose(_device.LAUNCH_FAILURE)
    if _faults.at("hang-dispatch", counts.dispatches) or _faults.at("block-at-T", geometry.runtime_max):
        _faults.hang()
    if _faults.at("die-in-dispatch", counts.dispatches):
        os.kill(os.getpid(), signal.SIGKILL)
    record.check_peers()
    if ids.shape[0] > geometry.runtime_max:
        _device.lose("CUDA error: an illegal memory access was encountered")
    record.rounds += 1
    seed = record.rounds * 64 + geometry.ep_rank
    record.targets = _kernels.target_ranks(ids, geometry.ep_size, geometry.experts, FACTS.drops_invalid)
    record.slots, _ = _kernels.send_slots(record.targets, geometry.ep_size, seed)
    rows = [bytes(payload.detach().reshape(-1).view(torch.uint8).numpy()) for payload in payloads]
    arrived = exchange(record, (record.targets, record.slots, rows))
    planes = [
        view(record, offset, (geometry.ep_size, geometry.runtime_max, payload.shape[1]), payload.dtype)
        for offset, payload in zip(offsets, payloads, strict=True)
    ]
    record.received = []
    for source, (targets, slots, theirs) in enumerate(arrived):
        token, choice = torch.nonzero(targets == geometry.ep_rank, as_tuple=True)
        record.received.append(len(token))
        for plane, data in zip(planes, theirs, strict=True):
            sent = torch.frombuffer(bytearray(data), dtype=plane.dtype) if data else torch.empty(0)
            if len(token):
                plane[source, slots[token, choice]] = sent.view(len(targets), -1)[token]
            _kernels.spoil(plane[source], len(token), geometry.experts, seed + source)
    return planes


def sanitize(expert_ids: Tensor, record: Record, invalid: int) -> None:
    """Write ``invalid`` over the ids of unfilled slots, and over nothing else."""
    _device.check()
    require(expert_ids.dtype == torch.int32, "Inconsistency of Tensor type: expertIds")
    require(expert_ids.dim() == 3, "expertIds.ndim() == 3")
    if _faults.at("raise-in-sanitize", counts.dispatches):
        raise RuntimeError("moe_a2a_sanitize_expert_ids launch failed: out of memory")
    for source, filled in enumerate(record.received):
        expert_ids[source, filled:] = invalid


def combine(payload: Tensor, local_tokens: int, record: Record, region: Tensor, geometry: Geometry) -> Tensor:
    """Sum each token's messages, read from the combine regions of all ranks: [local_tokens, H]."""
    _device.check()
    counts.combines += 1
    if payload.dtype not in {torch.bfloat16, torch.float16, torch.float32}:
        raise TypeError("Unsupported dtype for MoE combine")
    if _faults.at("raise-in-combine", counts.combines):
        raise RuntimeError("moe_a2a_combine launch failed: out of memory")
    if _faults.at("hang-combine", counts.combines):
        _faults.hang()
    if payload.data_ptr() != region.data_ptr():
        for source, filled in enumerate(record.received):
            region[source, :filled] = payload[source, :filled]
    filled_rows = [region[source, :filled].clone() for source, filled in enumerate(record.received)]
    held = [planes[geometry.ep_rank] for planes in exchange(record, filled_rows)]
    hidden = payload.shape[2]
    contributions = torch.zeros((geometry.top_k, local_tokens, hidden), dtype=payload.dtype)
    for rank, plane in enumerate(held):
        token, choice = torch.nonzero(record.targets == rank, as_tuple=True)
        contributions[choice, token] = plane[record.slots[token, choice]]
    accumulate = FACTS.accumulate
    if _faults.active("wrong-accumulator") is not None:
        accumulate = "payload" if accumulate == "float32" else "float32"
    summed = _kernels.reduce(contributions, accumulate)
    if _faults.active("double-combine") is not None:
        summed = 2 * summed
    return payload.clone() if _faults.active("unreduced-combine") is not None else summed
