"""A rig for checks of the stand-in on two ranks: import it as a release, drive it, collect what failed.

Ranks stay in step because every check ends in the default group, which the stand-in never uses for its own
exchanges.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

OLD, EIGHT, SIXTEEN, SEVEN, LAST = "0.6.8.post1", "0.6.15.post1", "0.6.16.post4", "0.7.2.post1", "0.7.4"
ALLTOALL = (OLD, EIGHT, SIXTEEN, SEVEN)
EVERY = (*ALLTOALL, LAST)
HIDDEN, TOP_K, EXPERTS, TOKENS = 16, 4, 8, 6
CHECKS: dict[str, Callable[[int], None]] = {}


def check(function: Callable[[int], None]) -> Callable[[int], None]:
    CHECKS[function.__name__] = function
    return function


def fresh(version: str, fault: str = "", base: str = "") -> Any:
    """Import the stand-in anew as ``version``."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]
    os.environ["PYTEST_EP_FAKE_FLASHINFER"] = version
    os.environ["PYTEST_EP_FAKE_FAULT"] = fault
    os.environ["FLASHINFER_WORKSPACE_BASE"] = base or os.environ["CHECKS_BASE"]
    package = importlib.import_module("flashinfer")
    load("_faults").hang = stop
    return package


def stop() -> None:
    raise TimeoutError("would wait for ever")


def load(name: str) -> Any:
    return importlib.import_module(f"flashinfer.{name}")


def raised(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """The type and text of what the call raises, "" if nothing."""
    try:
        call(*arguments, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def make(rank: int, top_k: int = TOP_K, experts: int = EXPERTS, tokens: int = TOKENS) -> Any:
    """The transport of the release just imported."""
    mnnvl, facts = load("comm.mnnvl"), load("_facts").FACTS
    if not facts.moe_alltoall:
        moe_ep = load("moe_ep")
        params = moe_ep.MoEEpCommParams(experts, top_k, tokens, HIDDEN)
        config = moe_ep.NVLinkOneSidedConfig(cft=False, lamport=False, comm_backend=mnnvl.TorchDistBackend())
        return moe_ep.NVLinkOneSidedAlltoAll(moe_ep.BootstrapConfig(2, rank), params, config)
    mapping = load("comm").Mapping(2, rank, 2, tp_size=2, moe_ep_size=2)
    config = mnnvl.MnnvlConfig(comm_backend=mnnvl.TorchDistBackend())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        transport = load("comm").MoeAlltoAll(
            mapping, tokens, top_k, experts, hidden_size=HIDDEN, mnnvl_config=config
        )
    dist.barrier()
    return transport


def inputs(rank: int, tokens: int = TOKENS, top_k: int = TOP_K) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that say whose they are, ids that go to both ranks or to one, weights; exact in BF16."""
    number = torch.arange(tokens) + 1 + 100 * rank
    token = number[:, None].expand(-1, HIDDEN).to(torch.bfloat16).contiguous()
    ids = (torch.arange(top_k)[None] + torch.arange(tokens)[:, None]) % EXPERTS
    ids[:1] = torch.arange(top_k) % 4
    return token, ids.to(torch.int32), torch.rand(tokens, top_k)


def dispatch(transport: Any, token: Tensor, ids: Tensor, weights: Tensor, limit: int) -> list[Tensor]:
    if hasattr(transport, "destroy"):
        result = transport.dispatch(token, ids, weights, runtime_max_tokens_per_rank=limit)
        flat = (result.hidden_states, result.topk_ids, result.topk_weights)
        return [plane.view(2, limit, -1) for plane in flat]
    received: list[Tensor] = transport.dispatch(
        ids, [token, ids, weights], limit, invalid_token_expert_id=-1, expert_id_payload_index=1
    )
    return received


def region(transport: Any, limit: int) -> Tensor:
    if hasattr(transport, "destroy"):
        return transport.get_combine_input_buffer(torch.bfloat16).view(2, limit, -1)  # type: ignore[no-any-return]
    place: Tensor = transport.get_combine_payload_tensor_in_workspace(limit, HIDDEN, torch.bfloat16)
    return place


def combine(transport: Any, payload: Tensor, limit: int) -> Tensor:
    if hasattr(transport, "destroy"):
        return transport.combine(payload)  # type: ignore[no-any-return]
    combined: Tensor = transport.combine(payload, limit, payload_in_workspace=True)
    return combined


def release(transport: Any) -> None:
    dist.barrier()
    transport.destroy() if hasattr(transport, "destroy") else transport._reset_workspace()


def echo(transport: Any, rank: int, limit: int = TOKENS, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """(what combine returned, what it should have) when every rank sends back what it received."""
    token, ids, weights = inputs(rank, tokens, transport.top_k if hasattr(transport, "top_k") else TOP_K)
    received = dispatch(transport, token, ids, weights, limit)
    place = region(transport, limit)
    place.copy_(torch.where(received[1][..., :1] >= 0, received[0], torch.zeros((), dtype=torch.bfloat16)))
    ranks = torch.stack([(ids // 4 == owner).any(dim=1) for owner in range(2)]).sum(dim=0)
    return combine(transport, place, limit), token * ranks[:, None].to(torch.bfloat16)


def other_ranks_agree(rank: int, mine: str) -> list[str]:
    texts: list[Any] = [None, None]
    dist.all_gather_object(texts, mine)
    return texts


def main(rank: int, store: str, results: str) -> None:
    """Run every check; write {check: traceback or ""} as JSON to ``results``.rank."""
    os.environ["RANK"] = str(rank)
    limit = timedelta(seconds=10)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    outcome: dict[str, str] = {}
    for name, function in CHECKS.items():
        try:
            function(rank)
            mine = ""
        except Exception:
            mine = f"rank {rank}\n{traceback.format_exc()}"
            print(name, mine, file=sys.stderr, flush=True)
        texts = other_ranks_agree(rank, mine)
        outcome[name] = "\n".join(filter(None, texts))
        Path(f"{results}.{rank}").write_text(json.dumps(outcome))
    dist.destroy_process_group()
