"""What it brings to copy the own rows for a weight gradient beside the product before it (`keep_own`), and not behind it.

    torchrun --nproc-per-node 2 benchmarks/probes/kept_beside.py

Layers, forward and backward, both ways and their six GEMMs alone, in turns in a random order; the time of the slowest rank,
medians of 60 rounds in milliseconds, and the median of the rounds' ratios. Both ways must give the same bits.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist

from overlap_train import OverlapConfig, all_gather_linear, linear_reduce_scatter
from overlap_train.ops.plan import EnginePlan
from overlap_train.tools.bench.layer_data import Data, Outcome, forward_backward, six_gemms_alone
from overlap_train.tools.measure.shapes import LAYERS
from overlap_train.tools.measure.timing import Call
from overlap_train.tools.measure.world import World

CALLS = {("llama3-8b-attn", 8192): 20, ("llama3-8b-mlp", 8192): 8, ("llama3-70b-mlp", 4096): 4}  # in a turn
ROUNDS, WARM_UP = 60, 3
BEHIND = mock.patch.object(EnginePlan, "hides_copies", False)


def measure(name: str, sequence: int, calls: int, world: World) -> None:
    data, config = Data.make(LAYERS[name], sequence, world, torch.bfloat16, 0), OverlapConfig()
    ours = forward_backward(
        lambda x: all_gather_linear(x, data.w1, group=world.group, config=config),
        lambda h: linear_reduce_scatter(h, data.w2, group=world.group, config=config), data,
    )  # fmt: skip
    ways: dict[str, Callable[[], Outcome]] = {
        "gemms": partial(several, six_gemms_alone(data, world), calls),
        "beside": partial(several, ours, calls), "behind": partial(behind, ours, calls),
    }  # fmt: skip
    same = all(torch.equal(one, other) for one, other in zip(ways["beside"](), ways["behind"](), strict=True))
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(WARM_UP + ROUNDS):
        for way in random.sample(list(ways), len(ways)):
            took = slowest(ways[way], world) / calls
            if turn >= WARM_UP:
                times[way].append(took)
    medians = ", ".join(f"{way} {statistics.median(found):.4f}" for way, found in times.items())
    ratio = statistics.median(one / other for one, other in zip(times["beside"], times["behind"], strict=True))
    if world.rank == 0:
        print(f"{name} s={sequence}: {medians}, beside over behind {ratio:.4f}, the same bits: {same}", flush=True)


def several(call: Call, calls: int) -> Outcome:
    for index in range(calls):
        outcome = call(index)
    return outcome


def behind(call: Call, calls: int) -> Outcome:
    with BEHIND:
        return several(call, calls)


def slowest(turn: Callable[[], Outcome], world: World) -> float:
    """Milliseconds that the slowest rank's GPU takes for a turn, begun by all at once."""
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)  # 1 ms, in which the host gets ahead
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    turn()
    end.record()
    torch.cuda.synchronize()
    took = torch.tensor([begin.elapsed_time(end)], device=world.device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    random.seed(1)  # all ranks take the same turns
    world = World(dist.group.WORLD, device, dist.get_rank(), dist.get_world_size())
    for (name, sequence), calls in CALLS.items():
        measure(name, sequence, calls, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
