"""The projections of an attention under TP x Ulysses: in which parts they run, and what they take by each method.

in parts    the product of a part hides the exchange of another (replay.py, noted_parts.py)
apart       the linear overlaps over TP alone, before or after an all-to-all by NCCL: of short sequences, and across nodes
            (integrations/megatron/linears/two_groups.py: why_apart)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...config import OverlapConfig
from ...ops.plan import EnginePlan, Plan, make_plan
from ...ops.plan_cache import PlannedOp, tags_of
from ...ops.spec import ALL_GATHER_LINEAR, ALL_TO_ALL, LINEAR_REDUCE_SCATTER
from ...planning import cost
from ...planning.machines import System
from ...planning.table import UNTUNED
from ...schedule.order import GATHER, SCATTER, Topology
from ...select.passes import Pass
from ...select.tiling import Target
from ...ulysses.layout import AttentionHeads
from ...ulysses.rows import SequenceRows
from ...ulysses.two_groups import ShardedLinear, Sizes
from ..measure.models import Model
from .estimates import COLLECTIVE, Estimate, simulated, work_of
from .inputs import Linear, Strategy, heads_of
from .noted_parts import NotedHeads, NotedPart
from .replay import Domain, Grid, Recording
from .simulation.backward import whole
from .simulation.programs import assemble, forward, leading_barrier
from .simulation.timeline import COMMUNICATION, COMPUTE, Group, Kernel, Program
from .simulation.work import ANGLE_BYTES, Work

DTYPE = torch.bfloat16
# Passes over what a collective exchanges, before and after it, by (is QKV, is backward). Each reads and writes all of it
# (integrations/megatron/attention/collective.py). q, k and v come side by side, then rank after rank. Then their rows are
# ordered, and they are taken apart. The context's rows are ordered, and its columns come side by side. The gradient of ordered
# rows is added to zeros, which moves as much as two copies.
COPIES_APART = {(True, False): (2, 2), (True, True): (3, 1), (False, False): (1, 1), (False, True): (1, 2)}


@dataclass(frozen=True)
class Projection:
    """One projection on one rank. heads: of a tensor-parallel rank. n, k: of its weight shard."""

    system: System
    strategy: Strategy
    heads: AttentionHeads
    is_qkv: bool
    n: int
    k: int

    @property
    def sizes(self) -> Sizes:
        """As ulysses/two_group_calls.py has them."""
        s, heads = self.strategy, self.heads
        sent = heads.of_rank(s.cp).features * s.cp if self.is_qkv else self.k
        carries = 1 if self.is_qkv else 2  # backward sends x again
        rows = s.tp * s.micro_batch
        return Sizes(s.seq // s.ranks, rows, sent, self.n, self.k, DTYPE.itemsize, carries)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(first, last) of the positions of each part; one where the exchange is apart."""
        whole_shard = [(0, self.sizes.positions)]
        return self.sizes.parts(OverlapConfig()) if self.strategy.cp_nodes == 1 else whole_shard

    @property
    def exchange_us(self) -> float:
        """Microseconds of the whole exchange by NCCL."""
        s = self.strategy
        nbytes = (s.cp - 1) / s.cp * self._exchanged_bytes
        return cost.all_to_all_us(self.system, nbytes, s.cp, s.cp_nodes)

    @property
    def _exchanged_bytes(self) -> float:
        return float(self.strategy.rows // self.strategy.cp * self.sizes.sent * DTYPE.itemsize)

    def pass_of(self, positions: int, is_backward: bool) -> Pass:
        """The product of so many positions."""
        rows = positions * self.sizes.rows
        first = Pass(GATHER if self.is_qkv else SCATTER, rows, self.n, self.k, DTYPE, self.strategy.tp)
        return first.dgrad if is_backward else first

    def estimate(self, method: str, is_backward: bool) -> Estimate:
        """As training runs it by a method; by `collective` as it is without overlap, whole."""
        if len(self.parts) == 1 or method == COLLECTIVE:
            return self.apart(method, is_backward)
        program, variant = in_parts(self, method, is_backward)
        return simulated(self.system, program, method, f"{variant}, {len(self.parts)} parts")

    def apart(self, method: str, is_backward: bool) -> Estimate:
        pass_ = self.pass_of(self.sizes.positions, is_backward)
        work = work_of(self.system, pass_, method, UNTUNED, nodes=self.strategy.tp_nodes)
        kernels, sending = (whole if is_backward else forward)(work)
        kernels, exchange = [*leading_barrier(work), *kernels], list(self._exchange_by_nccl(is_backward))
        first, second = (kernels, exchange) if self.is_qkv != is_backward else (exchange, kernels)
        variant = f"{work.plan.variant.named(work.plan.method)}, exchange apart"
        return simulated(self.system, assemble(work, [*first, *second], sending), method, variant)

    def _exchange_by_nccl(self, is_backward: bool) -> Iterator[Kernel]:
        gap, (before, after) = self.system.gap_us, COPIES_APART[self.is_qkv, is_backward]
        copy = Kernel("copy of the blocks", COMPUTE, cost.torch_copy_us(self.system, 2 * self._exchanged_bytes), gap)
        yield from (copy for _ in range(before))
        yield Kernel("nccl all-to-all", COMMUNICATION, self.exchange_us, gap)
        yield from (copy for _ in range(after))


def projection(system: System, strategy: Strategy, model: Model, linear: Linear) -> Projection:
    """The Projection of linear_qkv or linear_proj."""
    tp = strategy.tp
    n, k = (linear.n // tp, linear.k) if linear.is_column else (linear.n, linear.k // tp)
    return Projection(system, strategy, heads_of(model, tp), linear.is_column, n, k)


def grid_of(strategy: Strategy, rank: int = 0) -> Grid:
    """The groups of a rank of one node."""
    tp, cp = strategy.tp, strategy.cp
    r, t = divmod(rank, tp)
    tensor = Group(Topology(1, tp, t), range(r * tp, (r + 1) * tp))
    return Grid(tensor, Group(Topology(1, cp, r), range(t, tp * cp, tp)))


def in_parts(one: Projection, method: str, is_backward: bool, rank: int = 0) -> tuple[Program, str]:
    """What a rank does, and the variant of the first part's product."""
    recording = Recording(one.system, grid_of(one.strategy, rank))
    linear = _linear(one, OverlapConfig(method=method), recording)  # type: ignore[arg-type]
    with recording:
        _run(one, linear, recording, is_backward)
    first = linear.parts[0].product.plan
    plan = first.dgrad if is_backward else first.fprop
    return recording.program(), plan.variant.named(plan.method)


def _run(one: Projection, linear: ShardedLinear, recording: Recording, is_backward: bool) -> None:
    """One pass, as autograd has training run it."""
    s, sizes = one.strategy, one.sizes
    if one.is_qkv:
        angles = float(s.ranks * ANGLE_BYTES * one.heads.dim)
        heads, x = NotedHeads(recording, sizes.sent // s.cp, sizes.rows, angles), _meta(s.rows // s.ranks, one.k)
        if is_backward:
            linear.heads_backward(x, heads, True)
        else:
            linear.to_heads(x, heads)
        return
    order = torch.empty(s.cp, s.tp, sizes.positions, dtype=torch.int64, device="meta")
    rows = SequenceRows(_meta(s.seq, s.micro_batch, sizes.sent // s.cp), order)
    if is_backward:
        linear.rows_backward(rows, _meta(s.rows // s.ranks, one.n), rows)
    else:
        linear.to_rows(rows, keep=False)


def _meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=DTYPE, device="meta")


def _linear(one: Projection, config: OverlapConfig, recording: Recording) -> ShardedLinear:
    """A call as planned (ulysses/two_group_calls.py), whose parts are noted."""
    s, sizes, grid, weight = one.strategy, one.sizes, recording.grid, _meta(one.n, one.k)
    spec = ALL_GATHER_LINEAR if one.is_qkv else LINEAR_REDUCE_SCATTER
    device = Target(one.system.capability)

    def plan(spec: object, group: Group, x: torch.Tensor) -> Plan:
        gbs = one.system.nic_gbs
        return make_plan(spec, config, UNTUNED, group.topology, x, weight, device, gbs)  # type: ignore[arg-type]

    exchange = plan(ALL_TO_ALL, grid.ulysses, _meta(sizes.carries * sizes.positions * sizes.rows, sizes.sent))
    tensor, ulysses = Domain(recording, grid.tensor), Domain(recording, grid.ulysses, exchange.fprop)
    exchanges = PlannedOp(ulysses, exchange, tags_of(exchange, "exchange", ()), keeps=False)  # type: ignore[arg-type]
    parts = []
    for first, last in one.parts:
        rows = (last - first) * sizes.rows
        product = plan(spec, grid.tensor, _meta(rows // s.tp if one.is_qkv else rows, one.k))
        planned = PlannedOp(tensor, product, tags_of(product, "product", ()), keeps=False)  # type: ignore[arg-type]
        works = (_work(one, engine, last - first, grid, d) for d, engine in enumerate((product.fprop, product.dgrad)))
        parts.append(NotedPart(first, last, exchanges, planned, *works))
    copies = None if one.heads.kv % s.cp == 0 or not one.is_qkv else _meta(sizes.sent).long()
    return ShardedLinear(tuple(parts), weight, weight, copies, s.micro_batch, s.tp)


def _work(one: Projection, engine: EnginePlan, positions: int, grid: Grid, is_backward: int) -> Work:
    pass_ = one.pass_of(positions, bool(is_backward))
    return Work(one.system, engine, pass_, grid.tensor.topology, parts=len(one.parts))
