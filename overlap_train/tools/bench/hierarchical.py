"""Operators of a group that spans nodes, for products that take 0.5, 1 and 2 times as long as the network.

How long is measured first, in the same run: with what crosses fixed, the other side of the weight decides the product's time.

    ag_gemm    weight [other, kept]    x [M, kept] is gathered
    gemm_rs    weight [kept, other]    y [M, kept] is scattered
    gemm_a2a   weight [kept, other]    y [M, kept] is exchanged
    a2a_gemm   weight [other, kept]    x [M, kept] is exchanged

Two ranks of one machine can be two nodes (measure/pretended.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...schedule.order import A2A_GEMM
from ..measure.cases import EXCHANGES, OPS, Case
from ..measure.runs import Session
from ..measure.timing import Call

# What is gathered: 64 MiB in bf16, of which each of two ranks sends half. What is exchanged has as many features for each node:
# so as many bytes of each rank cross.
ROWS, FEATURES = 8192, 4096
RATIOS = (0.5, 1.0, 2.0)  # product over network
_STEP = 256
_PRODUCT = 16384  # columns of the product that is timed
_TINY = {"rows": 16, "features": 32}


@dataclass(frozen=True)
class Shapes:
    """Which cases: operators, passes, products over network, ranks of a node. tiny: to try the code on CPU processes."""

    ops: tuple[str, ...]
    passes: tuple[str, ...]
    ratios: tuple[float, ...]
    node_ranks: int
    tiny: bool

    @property
    def rows(self) -> int:
        return _TINY["rows"] if self.tiny else ROWS

    def kept(self, op: str, world: int) -> int:
        """The features of what crosses the network."""
        return (_TINY["features"] if self.tiny else FEATURES) * (world // self.node_ranks if op in EXCHANGES else 1)

    def others(self, op: str, world: int, flops: float) -> list[int]:
        """The other features of the weight, for each length of the product. flops: of one rank, as long as the network takes."""
        if self.tiny:
            return [32 * world, 64 * world]
        steps = flops / (2 * self.rows * self.kept(op, world) * _STEP)
        return [world * _STEP * max(1, round(ratio * steps)) for ratio in self.ratios]


def hierarchical_cases(session: Session, shapes: Shapes) -> list[Case]:
    """The cases of all operators, for products of several lengths against the network. Collective."""
    world = session.world.size
    flops = dict.fromkeys(shapes.ops, 0.0) if shapes.tiny else _flops_beside_the_network(session, shapes)
    cases = []
    for op in shapes.ops:
        kept = shapes.kept(op, world)
        for other in shapes.others(op, world, flops[op]):
            weight = (other, kept) if op in ("ag_gemm", A2A_GEMM) else (kept, other)
            cases += [Case("", op, pass_, shapes.rows, *weight) for pass_ in shapes.passes]
    return cases


def _flops_beside_the_network(session: Session, shapes: Shapes) -> dict[str, float]:
    """By operator: the floating-point operations of a product of one rank that takes as long as the network. Collective."""
    world, found = session.world, dict[str, float]()
    left = torch.randn(ROWS, FEATURES, device=world.device, dtype=session.settings.dtype)
    right, flops = left.new_empty(FEATURES, _PRODUCT).normal_(), 2.0 * ROWS * FEATURES * _PRODUCT
    for ops, what in ((OPS, "gathered"), (EXCHANGES, "exchanged")):
        if not set(ops) & set(shapes.ops):
            continue
        wire, nbytes = _wire(session, shapes, ops[0])
        timings = session.time({"wire": wire, "gemm": lambda index: left @ right}, flops)
        world.say(f"the network takes {timings['wire'].ms:.2f} ms for {nbytes >> 20} MiB of each rank, {what}")
        found |= dict.fromkeys(ops, flops * timings["wire"].ms / timings["gemm"].ms)
    return found


def _wire(session: Session, shapes: Shapes, op: str) -> tuple[Call, int]:
    """What NCCL does for an operator, and the bytes that each rank has for it."""
    world, dtype, kept = session.world, session.settings.dtype, shapes.kept(op, session.world.size)
    whole = torch.zeros(ROWS, kept // (world.size if op in EXCHANGES else 1), device=world.device, dtype=dtype)
    if op in EXCHANGES:
        received = torch.empty_like(whole)
        return lambda index: dist.all_to_all_single(received, whole, group=world.group), whole.nbytes
    shard = torch.zeros(ROWS // world.size, kept, device=world.device, dtype=dtype)
    return lambda index: dist.all_gather_into_tensor(whole, shard, group=world.group), shard.nbytes
