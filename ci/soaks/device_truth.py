"""FlashInfer's pair period without the plugin: (t96 - t32) / 64 of two CUDA graphs built here, by T.

Run under torchrun with two ranks or more; rank 0 prints one JSON object {T: microseconds}. It shares no code
with pytest_ep, so that the plugin's graph clock can be held against it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys

import torch
import torch.distributed as dist
from flashinfer.comm.mapping import Mapping
from flashinfer.comm.mnnvl import MnnvlConfig
from flashinfer.comm.mnnvl import TorchDistBackend
from flashinfer.comm.trtllm_moe_alltoall import MoeAlltoAll

SETTLED = 3
"""Graphs of nothing before the first: from the third graph of a process on, all its replays are slower."""
HIDDEN, EXPERTS, TOP_K, ROUTINGS, FILL, REPLAYS = 7168, 256, 8, 8, 8, 24


class Pairs:
    """A graph of ``FILL`` pairs, an event, ``pairs`` pairs, an event."""

    def __init__(
        self, alltoall: MoeAlltoAll, tokens: int, pairs: int, inputs: list[list[torch.Tensor]]
    ) -> None:
        self.start, self.end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        self.graph = torch.cuda.CUDAGraph()

        def pair(index: int) -> None:
            ids, x, weights = inputs[index % len(inputs)]
            alltoall.dispatch(ids, [x, ids, weights], tokens, -1, 1)
            region = alltoall.get_combine_payload_tensor_in_workspace(tokens, HIDDEN, torch.bfloat16)
            alltoall.combine(region, tokens, payload_in_workspace=True)

        for index in range(ROUTINGS):
            pair(index)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            for index in range(FILL):
                pair(index)
            self.start.record()
            for index in range(pairs):
                pair(index)
            self.end.record()

    def milliseconds(self) -> float:
        """Replay once, from a barrier; the slowest rank's time."""
        torch.cuda.synchronize()
        dist.barrier()
        self.graph.replay()
        torch.cuda.synchronize()
        taken = torch.tensor([self.start.elapsed_time(self.end)])
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)


def routings(tokens: int, rank: int) -> list[list[torch.Tensor]]:
    """Random distinct experts, the same tokens each time."""
    generator = torch.Generator().manual_seed(1000 + rank)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(device="cuda", dtype=torch.bfloat16)
    weights = torch.full((tokens, TOP_K), 1 / TOP_K, device="cuda")
    made = []
    for _ in range(ROUTINGS):
        ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices.int().cuda()
        made.append([ids, x, weights])
    return made


def settle() -> None:
    """Come to the state in which a process with several graphs is."""
    nothing = torch.zeros(1, device="cuda")
    for _ in range(SETTLED):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            nothing.add_(1)


def main() -> None:
    """Measure every T of the command line."""
    ladder = [int(text) for text in sys.argv[1:]] or [1, 64, 512, 8192]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "gloo"
    )  # as the plugin has for this transport: NCCL changes the period at T=1 by 2 %
    mapping = Mapping(world_size=size, rank=rank, gpus_per_node=size, tp_size=size, moe_ep_size=size)
    config = MnnvlConfig(comm_backend=TorchDistBackend())
    alltoall = MoeAlltoAll(mapping, max(ladder), TOP_K, EXPERTS, hidden_size=HIDDEN, mnnvl_config=config)
    dist.barrier()
    settle()
    found = {}
    for tokens in ladder:
        inputs = routings(tokens, rank)
        short, long = Pairs(alltoall, tokens, 32, inputs), Pairs(alltoall, tokens, 96, inputs)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(REPLAYS):
            times[0].append(short.milliseconds())
            times[1].append(long.milliseconds())
        short_ms, long_ms = (statistics.median(one) for one in times)
        found[tokens] = 1e3 * (long_ms - short_ms) / 64
        if rank == 0:
            print(f"T={tokens}: t32/32 {1e3 * short_ms / 32:.2f} us, t96/96 {1e3 * long_ms / 96:.2f} us")
    if rank == 0:
        print(json.dumps({"device_truth_us": found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
