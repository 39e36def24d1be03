"""Operators of a group that spans nodes, for products that take 0.5, 1 and 2 times as long as the network.

How long is measured first, in the same run: with what crosses fixed, the other side of the weight decides the product's time.
Two ranks of one machine can be two nodes: NCCL is told that they are different hosts, and goes over sockets.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ..measure.cases import OPS, Case
from ..measure.runs import Session

ROWS, FEATURES = 8192, 4096  # what crosses: 64 MiB in bf16, of which each of two ranks sends half, in chunks of 8 MiB
RATIOS = (0.5, 1.0, 2.0)  # product over network
_STEP = 256
_TINY = {"rows": 16, "features": 32}
# Sockets over loopback carried 2.0 GB/s each way as they come, and 5.3 so (2 x H200).
_SOCKETS = {
    "NCCL_SOCKET_NTHREADS": "8",
    "NCCL_NSOCKS_PERTHREAD": "4",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
}


def pretend_nodes(node_ranks: int) -> None:
    """Let NCCL take the ranks of this machine for several hosts, where torchrun has started more than a node has. Before NCCL."""
    here, count = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if count > node_ranks:
        for name, value in (_SOCKETS | {"NCCL_HOSTID": f"node{here // node_ranks}"}).items():
            os.environ.setdefault(name, value)


def hierarchical_cases(session: Session, passes: tuple[str, ...], tiny: bool) -> list[Case]:
    """The cases of both operators, for products of several lengths against the network. Collective."""
    world = session.world.size
    rows, kept = (_TINY["rows"], _TINY["features"]) if tiny else (ROWS, FEATURES)
    others = [32 * world, 64 * world] if tiny else _other_features(session)
    return [
        Case("", op, pass_, rows, *((other, kept) if op == "ag_gemm" else (kept, other)))
        for op in OPS
        for other in others
        for pass_ in passes
    ]


def _other_features(session: Session) -> list[int]:
    """The features, over all ranks, with which a product takes each of RATIOS times as long as the network. Collective."""
    world = session.world
    shard = torch.randn(ROWS // world.size, FEATURES, device=world.device, dtype=session.settings.dtype)
    whole, right = shard.new_empty(ROWS, FEATURES), shard.new_empty(FEATURES, 16384).normal_()
    calls = {
        "wire": lambda index: dist.all_gather_into_tensor(whole, shard, group=world.group),
        "gemm": lambda index: whole @ right,
    }
    timings = session.time(calls, 2 * ROWS * FEATURES * right.shape[1])
    as_long_as_the_wire = right.shape[1] * timings["wire"].ms / timings["gemm"].ms
    world.say(f"the network takes {timings['wire'].ms:.2f} ms for {shard.nbytes >> 20} MiB of each rank")
    return [world.size * _STEP * max(1, round(ratio * as_long_as_the_wire / _STEP)) for ratio in RATIOS]
