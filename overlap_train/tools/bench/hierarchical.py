"""Operators of a group that spans nodes, for products that take 0.5, 1 and 2 times as long as the network.

How long is measured first, in the same run: with what crosses fixed, the other side of the weight decides the product's time.
Two ranks of one machine can be two nodes: NCCL is told that they are different hosts, and goes over sockets.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..measure.cases import OPS, Case
from ..measure.runs import Session

ROWS, FEATURES = 8192, 4096  # what crosses: 64 MiB in bf16, of which each of two ranks sends half, in chunks of 8 MiB
RATIOS = (0.5, 1.0, 2.0)  # product over network
_STEP = 256
_TINY = {"rows": 16, "features": 32}


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
