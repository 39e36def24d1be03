"""What is measured as calls: checked first, then run on rotating inputs, in turns.

W ranks, weight [N, K], x [M, K], dy [M, N]. Each kind of pass (Case.kind) has its matrices in the layout of training:

    gather   left [M/W, C]  right [C, F] view   whole [M, C], left of all ranks
             y [M, F] = whole @ right
    scatter  left [M, C]    right [C, F] view   whole [M, F], which a reduce-scatter is timed on
             y [M/W, F] = this rank's rows of the sum over ranks of left @ right; of what all-reduces all rows
    gemm_a2a left [M/W, C]  right [C, F] view, the same on every rank   whole [M, C], left of all ranks
             y [M, F/W] = this rank's columns of whole @ right
    a2a_gemm left [M, C/W]  right [C, F] view, the same on every rank   whole [M/W, C], this rank's rows of all columns
             y [M/W, F] = whole @ right

In fp8 left and whole have one byte an element, and right is [F, C] with the scales of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...config import OverlapConfig
from ...group.domain import OverlapDomain
from ...group.memory import Request, may_hold, prepare
from ...group.registry import check as check_timeouts
from ...group.registry import domain_of
from ...group.signals import Tag
from ...ops.blocks import new_packed, new_rows, squares, write_pieces
from ...ops.launch import is_interpreted
from ...ops.plan import EnginePlan, planner_of
from ...ops.product import BlockMatrix, Fp8Matrix, Right
from ...ops.quantize import FORWARD, quantized_by_torch
from ...select.choose import Choice, alone
from ...select.cost import reach_of
from ...select.method import MOST_BYTES, NAMES, Method, Pass, flagged_bytes, packed_bytes
from .cases import OPERATORS, Case
from .check import ROUNDINGS, ROUNDINGS_IN_FP8, check
from .results import Results
from .timing import Call, Pace, Timing, input_sets, measure, pace
from .world import World

Run = Callable[[Any], Any]  # from one of the input sets to what it computes
Check = Callable[[str, Any], None]  # of what one of them computed, by name; raises


@dataclass(frozen=True)
class Session:
    """What every measurement of a run needs. methods: of OverlapConfig.method; dtype: of all inputs, or of results in fp8; quick:
    fewer and shorter rounds; fp8: as in OverlapConfig; graphs: a burst is one CUDA graph."""

    methods: tuple[str, ...]
    dtype: torch.dtype
    quick: bool
    config: OverlapConfig
    world: World
    results: Results
    fp8: str = "off"
    graphs: bool = False

    def domain(self, received: Sequence[int]) -> OverlapDomain:
        """The domain of the ranks, with symmetric memory for shapes of which a rank receives so many bytes: it is allocated
        once. Collective. Raises ValueError where config.symmetric_mib does not hold them."""
        domain = domain_of(self.world.group, self.config, self.world.device)
        words = [flagged_bytes(nbytes, self.world.size) for nbytes in received if nbytes <= MOST_BYTES]
        largest, flagged = max(received), max(words, default=0)
        request = Request("a measurement", f"the largest shape, {largest} bytes", largest, flagged)
        too_much = (
            f"the largest shape: each rank receives {largest >> 20} MiB, for which {self.config.symmetric_mib} MiB of symmetric "
            "memory are too few; measure fewer rows, or shorter sequences"
        )
        prepare(domain, request, None if may_hold(domain, request) else too_much, "overlap_train.tools")
        return domain

    def pace(self, flops: float) -> Pace:
        """Of calls with so many floating-point operations on one rank."""
        return pace(flops, self.quick, self.world.device.type == "cuda")

    def time(self, calls: Mapping[str, Call], flops: float) -> dict[str, Timing]:
        """Time all calls in turns; flops: of one of them, on one rank. Collective."""
        return measure(calls, self.pace(flops), self.world.group, self.world.device)


@dataclass(frozen=True)
class Operands:
    """One input set. by_rank: right where the rows of each rank are multiplied apart, if it is another one."""

    left: torch.Tensor
    right: Right
    whole: torch.Tensor
    by_rank: Right | None = None


def in_fp8(o: Operands, case: Case, session: Session) -> Operands:
    """The same in fp8, as blocks or by scales for numbers up to 8; summed as in training. What a reduce-scatter is timed on stays
    as it is. Collective."""
    assert isinstance(o.right, torch.Tensor)
    if session.fp8 == "blockwise":
        return in_blocks(o, o.right, case, session)
    most = torch.full((1,), 8.0, device=o.left.device)
    left, whole, right = (
        quantized_by_torch(matrix.contiguous(), most, FORWARD) for matrix in (o.left, o.whole, o.right.t())
    )
    matrix = Fp8Matrix(right.rows, left.inverse, right.inverse, o.left.dtype, fast=case.pass_ == "fprop")
    return Operands(left.rows, matrix, whole.rows if case.kind.gathers else o.whole)


def in_blocks(o: Operands, right: torch.Tensor, case: Case, session: Session) -> Operands:
    """in_fp8 with scales of blocks, as training has them (blockwise.py). Collective."""
    domain = domain_of(session.world.group, session.config, session.world.device)
    w8 = squares(domain, right.t(), True, False)
    assert w8.rows is not None
    matrix = BlockMatrix(w8.rows, w8.inverse, o.left.dtype)
    if case.kind.reduces:
        at_once, by_rank = (new_rows(o.left, ranks) for ranks in (1, session.world.size))
        for rows in (at_once, by_rank):
            write_pieces(domain, o.left, rows, None)
        whole, apart = (matrix._replace(a_inverse=rows.inverse) for rows in (at_once, by_rank))
        return Operands(at_once.numbers, whole, o.whole, apart)
    twice = case.planned(session.world.size, session.dtype, session.fp8).twice
    packed, width = new_packed(o.left, twice), packed_bytes(o.left.shape[1])
    write_pieces(domain, o.left, packed[:, :width], packed[:, width:] if twice else None)
    return Operands(packed, matrix, session.world.gather(packed))


def normal(world: World, dtype: torch.dtype, seed: int, shared: bool = False) -> Callable[..., torch.Tensor]:
    """A maker of normal random numbers by shape, others for each seed and rank. shared: the same on all ranks."""
    generator = torch.Generator(world.device).manual_seed(1000 * seed + (999 if shared else world.rank))
    return partial(torch.randn, dtype=dtype, device=world.device, generator=generator)


def make_operands(case: Case, session: Session, seed: int) -> Operands:
    """Random matrices. Collective."""
    world, own = session.world, normal(session.world, session.dtype, seed)
    m, n, k, ranks = case.m, case.n, case.k, world.size
    if case.kind.exchanges:
        weight = normal(world, session.dtype, seed, shared=True)(n, k)
    else:
        weight = own(n // ranks, k) if OPERATORS[case.op].gathers else own(n, k // ranks)
    right = weight.t() if case.pass_ == "fprop" else weight
    if case.kind.reduces:
        made = Operands(own(m, len(right)), right, own(m, right.shape[1]))
    elif case.kind.sums_blocks:
        left = own(m, len(right) // ranks)
        made = Operands(left, right, side_by_side(ranks, world.exchange(left)))
    else:
        left = own(m // ranks, len(right))
        made = Operands(left, right, world.gather(left))
    return made if session.fp8 == "off" else in_fp8(made, case, session)


def side_by_side(ranks: int, blocks: torch.Tensor) -> torch.Tensor:
    """W blocks of rows [M, C/W], one after the other, side by side: [M/W, C]."""
    return blocks.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1)


@dataclass(frozen=True)
class Inputs:
    """sets: the first is checked with; calls rotate among all. decoy: one with other numbers. check: of the first's result."""

    sets: Sequence[Any]
    decoy: Any
    check: Check

    @property
    def first(self) -> Any:
        return self.sets[0]

    def call(self, run: Run) -> Call:
        """The run on one set after the other."""
        return lambda index: run(self.sets[index % len(self.sets)])


def inputs_of(case: Case, session: Session) -> Inputs:
    """The operands of one case, in as many sets as the L2 cache cannot hold. Collective."""
    make = partial(make_operands, case, session)
    first, decoy = make(0), make(99)
    sets = [first, *(make(seed) for seed in range(1, input_sets(first.left.nbytes + first.right.nbytes)))]
    if case.kind.reduces:
        sums = session.world.all_reduce if case.all_reduces else session.world.scatter
        expected = sums(_expected(first.left, first.right).float())
    else:  # the unsharded product, or this rank's columns of it
        ranks, rank = (session.world.size, session.world.rank) if case.kind.splits_columns else (1, 0)
        right = first.right if ranks == 1 else first.right.chunk(ranks, dim=1)[rank]  # type: ignore[union-attr]
        expected = _expected(first.whole, right)
    roundings = ROUNDINGS if session.fp8 == "off" else ROUNDINGS_IN_FP8
    return Inputs(sets, decoy, partial(check, expected=expected, roundings=roundings))


def _expected(left: torch.Tensor, right: Right) -> torch.Tensor:
    """left @ right by another way than that of what is checked; of numbers in fp8 in fp32."""
    if isinstance(right, BlockMatrix):
        return right.in_fp32(left).to(right.dtype)
    if isinstance(right, torch.Tensor):
        return left @ right
    return (left.float() @ right.b_nk.t().float() * (right.a_inverse * right.b_inverse)).to(right.dtype)


def problem_of(name: str, run: Run, inputs: Inputs, world: World, check: Check | None) -> str | None:
    """What is wrong with a run on any rank: it raises, or its result is not what `check` allows. Collective.

    It runs twice on other inputs first, so that whatever is left in slots and freed memory is wrong.
    """

    def work() -> None:
        for _ in range(2):
            run(inputs.decoy)
        result = run(inputs.first)
        check_timeouts()
        if check is not None:
            check(name, result)

    return world.attempt(work)


def plan_of(case: Case, domain: OverlapDomain, choice: Choice, like: Operands) -> EnginePlan:
    """How the case runs by a choice; like: one of its input sets."""
    right = like.right if isinstance(like.right, torch.Tensor) else like.right.b_nk
    weight, planned = right if right.is_contiguous() else right.t(), planned_like(case, domain, like)
    planner = planner_of(domain.topology, domain.config)
    return planner.plan(choice, planned, domain.device, weight)


def planned_like(case: Case, domain: OverlapDomain, like: Operands) -> Pass:
    fp8 = {torch.Tensor: "off", Fp8Matrix: "tensorwise", BlockMatrix: "blockwise"}[type(like.right)]
    return case.planned(domain.world_size, like.right.dtype, fp8)


def overlapped(case: Case, domain: OverlapDomain, choice: Choice, like: Operands) -> Run:
    """Our pass, as autograd runs it (linear.py), with nothing after it."""
    by = alone(choice, planned_like(case, domain, like), domain.device)
    plan, kind, ranks = plan_of(case, domain, by, like), case.kind, domain.world_size
    tag = Tag(f"{case.op}/{case.pass_}", f"{case.name} by {by.how}")

    def run(o: Operands) -> torch.Tensor:
        with domain.operator(tag, plan.slots, plan.variant.barrier_first):
            if kind.gathers:
                return plan.start(domain, tag, o.left).matmul(o.right)
            if kind.reduces:
                right = o.by_rank if plan.method == "chunked" and o.by_rank is not None else o.right
                return plan.start(domain, tag, o.left, right).finish()
            if kind.splits_columns:
                y = o.left.new_empty(ranks, len(o.left), o.right.shape[1] // ranks)
                return plan.start(domain, tag, o.left, o.right, y).received().flatten(0, 1)
            y = o.left.new_empty(len(o.left) // ranks, o.right.shape[1])
            return plan.start(domain, tag, o.left.unflatten(0, (ranks, -1))).matmul(o.right, y)

    return run


def nodes_of(session: Session, asked: Sequence[str] = ()) -> int:
    """How many nodes the ranks are on. Collective.

    Raises:
        ValueError: a method that was asked for cannot run on these ranks, or they cannot share memory.
    """
    for name in asked:
        if name in NAMES and Method(name).kernels and session.world.device.type == "cpu" and not is_interpreted():
            names = ", ".join(name for name in NAMES if not Method(name).kernels)
            raise ValueError(f"--methods: {name!r} is not one of {names}, which run on CPU tensors; leave it out")
    found = domain_of(session.world.group, session.config, session.world.device).nodes
    if found.problem is not None:
        raise ValueError(found.problem)
    nodes = found.topology.nodes
    for name in asked:
        if name in NAMES and not reach_of(nodes).may_choose(name):
            raise ValueError(f"--methods: {name!r} stays inside a node, and the ranks are on {nodes}; leave it out")
    return nodes
