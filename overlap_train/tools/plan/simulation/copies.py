"""Kernels that only read and write memory, and the passes that a projection of Ulysses makes on the attention's side.

                    ours                               without overlap
    qkv forward     unpack                             blocks put together; unpack
    qkv backward    pack                               pack; blocks put together
    proj forward    rows ordered                       rows ordered; blocks put together
    proj backward   rows of x ordered, then of dx      blocks put together; rows of dx ordered

`pack` and `unpack` are our kernels on both sides (operators/attention_layout.py), as in the benchmark's baseline
(tools/bench/attention_blocks.py). By `unpack` ours leaves the slot. Rows are ordered by torch (ulysses/rows.py).
"""

from __future__ import annotations

from ....planning import cost
from .timeline import COMPUTE, Kernel
from .work import Work


def give(work: Work) -> list[Kernel]:
    """The pass before an exchange that makes what is sent of what the attention has."""
    if work.side is None:
        return []
    return [_order(work, "index_select")] if work.side.angle_bytes is None else [_heads(work, "pack")]


def take(work: Work) -> list[Kernel]:
    """The pass after an exchange that gives the attention what has arrived; plain rows leave the slot so, but the own block."""
    if work.side is None:
        return [] if work.plan.method == "collective" else [copied(work, 2 * (work.world - 1) * work.shard_bytes)]
    return [_order(work, "index_put_")] if work.side.angle_bytes is None else [_heads(work, "unpack")]


def put_together(work: Work) -> Kernel:
    """torch's copy of all blocks: a product's columns rank after rank before NCCL sends them, or what it has brought, side by
    side."""
    return _by_torch(work, "copy of the blocks")


def copied(work: Work, nbytes: float, name: str = "copy of the blocks") -> Kernel:
    """A kernel that reads and writes so many bytes in all."""
    return Kernel(name, COMPUTE, cost.sum_us(work.system, nbytes), work.system.gap_us)


def _heads(work: Work, name: str) -> Kernel:
    assert work.side is not None and work.side.angle_bytes is not None
    return copied(work, 2 * work.world * work.shard_bytes + work.side.angle_bytes, f"{name} kernel")


def _order(work: Work, name: str) -> Kernel:
    return _by_torch(work, f"{name} kernel")


def _by_torch(work: Work, name: str) -> Kernel:
    us = cost.torch_copy_us(work.system, 2 * work.world * work.shard_bytes)
    return Kernel(name, COMPUTE, us, work.system.gap_us)
