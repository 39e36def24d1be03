"""What a plan will launch, found by running its engines on tensors without memory. So all of it, backward and other linears of
a model too, is compiled from the first call on, and forward waits for its own kernels only.

Triton compiles for dtypes, alignments, strides, and sizes other than rows, which meta tensors of torch have. A launch that this
misses, as of an operand that is not aligned, costs time only: it is compiled when it comes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..gpu.launch import Launch
from ..group.domain import OverlapDomain
from ..group.memory import Request
from ..group.signals import Tag
from ..group.slots import Call, Slot
from ..group.waits import BoundedWaits
from ..group.workspace import Workspace
from . import low_latency
from .blocks import BLOCK, new_packed, new_rows
from .expert_tables import LEAST_ROWS, Tables, expert_tables
from .gemm_ar import sums_sent_on
from .grouped import Matrices
from .launch_experts import dispatch_and_multiply, multiply_and_combine
from .messages import open_rows
from .plan import EnginePlan, Plan
from .product import BlockMatrix, Fp8Matrix, Right
from .quantize import FORWARD, GRADIENT
from .spec import Operands

_TAG = Tag("overlap_train/rehearsal", "")


class _Described(list[Launch]):
    """Stands where a LaunchCache does, and keeps what would be launched."""

    def run(self, key: Hashable, values: tuple[int, ...], describe: Callable[..., Launch], *told: Any) -> None:
        self.append(describe(*told))


class _Rehearsal(Workspace):
    """Slots without memory, whose calls describe what they would launch."""

    def __init__(self, domain: OverlapDomain, request: Request) -> None:
        """request: for it the heap may have to grow first."""
        self.launches = _Described()
        layout = domain.layout.covering(request.slot_bytes, request.flagged_bytes)
        waits = BoundedWaits(domain.rank, domain.world_size, domain.config.timeout_s, domain.fault, domain.launcher)
        heap: Any = SimpleNamespace(view=lambda peer: torch.empty(layout.nbytes, dtype=torch.uint8, device="meta"))
        super().__init__(heap, layout, torch.device("meta"), waits)

    def _new_call(self, slot: Slot, block_shape: torch.Size, dtype: torch.dtype, chunks: int) -> Call:
        call = super()._new_call(slot, block_shape, dtype, chunks)
        call.launches = cast(Any, self.launches)
        return call


class _NoCopies:
    """A CopyEngine that sends nothing."""

    def launch(self, kernel: Callable[[], None], *what: Any) -> None:
        kernel()

    def push(self, *what: Any) -> None: ...

    keep = wait_kept = push


def compile_ahead(domain: OverlapDomain, calls: Iterable[tuple[Plan, Operands]]) -> None:
    """Start to compile what calls by these plans with such operands launch."""
    _start(domain, [one for plan, operands in calls for one in launches_of(domain, plan, *operands)])


def compile_experts_ahead(domain: OverlapDomain, plan: Plan, weights: Sequence[torch.Tensor], has_probs: bool) -> None:
    """Start to compile what both operators of experts launch, forward and backward. plan: of one of them, by `fused`."""
    _start(domain, launches_of_experts(domain, plan, weights, has_probs))


def compile_routing_ahead(domain: OverlapDomain, tokens: int, experts: int) -> None:
    """Start to compile what a routing launches."""
    launches, counts = _Described(), torch.empty(domain.world_size, experts, dtype=torch.int32, device="meta")
    expert_tables(cast(Any, launches), counts, domain.rank, tokens, experts)
    _start(domain, launches)


def _start(domain: OverlapDomain, launches: list[Launch]) -> None:
    """Start to compile, each rank of a node another kernel first."""
    from ..gpu.compiling import start  # imports Triton

    # Products, which have the most arguments and take longest, before small kernels.
    launches.sort(key=lambda one: -len(one.arguments))
    first = domain.rank * len(launches) // domain.world_size
    for one in launches[first:] + launches[:first]:
        start(one.kernel, one.grid, one.arguments, one.constants)


def launches_of(
    domain: OverlapDomain, plan: Plan, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> list[Launch]:
    """What compile_ahead starts; of fp8 the products alone. None across nodes, where launches depend on what has arrived."""
    passes = [one for one in _passes(plan, x, w) if one[0].slots]
    if not plan.spec.multiplies or not passes or plan.fprop.reach != "node":
        return []
    workspace, here = _Rehearsal(domain, plan.request), copy.copy(domain)
    here.workspace, here.engine = workspace, cast(Any, _NoCopies())
    with torch.no_grad(), _disable_current_modes():  # that of selective checkpointing would count these products
        for engine, b_kn in passes:
            added = None if bias is None or engine is not plan.fprop else torch.empty_like(bias, device="meta")
            rows = plan.spec.global_rows(x, domain.world_size)
            _rehearse(here, plan, engine, rows, b_kn, added)
            workspace.use.clear()
    return workspace.launches


def launches_of_experts(
    domain: OverlapDomain, plan: Plan, weights: Sequence[torch.Tensor], has_probs: bool
) -> list[Launch]:
    """What compile_experts_ahead starts."""
    (n, k), dtype, workspace, here = (
        weights[0].shape,
        weights[0].dtype,
        _Rehearsal(domain, plan.request),
        copy.copy(domain),
    )
    new, rows = partial(torch.empty, device="meta"), LEAST_ROWS
    here.workspace, here.places_of_weights = workspace, {(): new(len(weights), dtype=torch.int32)}  # type: ignore[assignment]
    probs = new(rows, dtype=torch.float32) if has_probs else None
    tables = Tables(*(new(4, dtype=torch.int32) for _ in Tables._fields))
    of_rows = new(rows, dtype=torch.int64)
    routing: Any = SimpleNamespace(tables=tables, tokens=of_rows, places_of_tokens=of_rows)
    in_fp8 = plan.config.fp8 != "off"
    for engine in (plan.fprop, plan.dgrad):
        for transposed in (True, False):  # forward; backward, of the other operator
            sent, features = (k, n) if transposed else (n, k)
            product: Any = SimpleNamespace(
                transposed=transposed or in_fp8, features=features, depth=sent,
                scales=new(1, dtype=torch.float32) if in_fp8 else None,
                matrices=Matrices(new(features, sent, dtype=FORWARD) if in_fp8 else new(n, k, dtype=dtype), ()),
            )  # fmt: skip
            matrix = new_packed(new(rows, sent)).view(torch.uint8) if in_fp8 else new(rows, sent, dtype=dtype)
            numbers = probs if engine.kind.receives == transposed else None
            if engine.kind.receives:
                call = open_rows(here, _TAG, matrix.dtype, matrix.shape[1], engine.chunks)
                y = new(rows, features, dtype=dtype)
                dispatch_and_multiply(here, call, engine, routing, matrix, numbers, product, y)
            else:
                call = open_rows(here, _TAG, dtype, features)
                multiply_and_combine(here, call, engine, routing, matrix, numbers, product)
            workspace.use.clear()
    return workspace.launches


def _passes(plan: Plan, x: torch.Tensor, w: torch.Tensor) -> Iterator[tuple[EnginePlan, torch.Tensor]]:
    """Each pass with its b [K, N]."""
    wants_dx, in_backward = (
        torch.is_grad_enabled() and x.requires_grad,
        plan.gather is not None and plan.spec.sends_input,
    )
    if not in_backward:
        yield plan.fprop, w.t()
    if wants_dx and (plan.gather is None or in_backward):
        yield plan.dgrad if w.requires_grad else plan.dgrad_alone, w
    no_gather = plan.fprop.shares or plan.shots  # the pass itself sends sums to all
    if plan.gather is not None and not no_gather and (wants_dx or not in_backward):
        yield plan.gather, (w if in_backward else w.t()).t()
    if plan.wgrad is not None and torch.is_grad_enabled() and w.requires_grad:
        yield plan.wgrad, w.t()


def _rehearse(
    domain: OverlapDomain, plan: Plan, engine: EnginePlan, rows: int, b_kn: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """One pass over `rows` rows of all ranks, as the operators make it."""
    kind, ranks, (k, n) = engine.kind, domain.world_size, b_kn.shape
    mine, b_kn = rows // ranks, torch.empty_strided(b_kn.shape, b_kn.stride(), dtype=b_kn.dtype, device="meta")
    multiplies = engine not in (plan.wgrad, plan.gather)
    is_read = engine is not plan.fprop or plan.wgrad is None  # what is received, for a weight gradient
    right, sent = _operands(plan, engine, b_kn, mine if kind.gathers else rows, ranks)
    if plan.shots:
        low_latency.all_reduce(domain, _TAG, b_kn.new_empty(rows, n), plan.shots, engine.sm_margin, bias)
    elif kind.sums_blocks:
        blocks = engine.start(domain, _TAG, b_kn.new_empty(ranks, mine, k // ranks))
        if multiplies:
            blocks.matmul(b_kn, b_kn.new_empty(mine, n))
        if is_read:
            blocks.received_view()
    elif kind.gathers:
        gather = engine.start(domain, _TAG, sent)
        if multiplies:
            gather.matmul(right, bias)
        if engine in (plan.dgrad, plan.wgrad):
            gather.keep_own(plan.dgrad)
        if is_read:
            gather.gathered_view()
    elif engine.shares:
        sums_sent_on(domain, engine, (_TAG, _TAG), b_kn.new_empty(rows, k), b_kn, bias)
    elif kind.reduces:
        engine.start(domain, _TAG, sent, right, bias).finish()
    else:
        engine.start(domain, _TAG, b_kn.new_empty(mine, k), b_kn).received()


def _operands(plan: Plan, engine: EnginePlan, b_kn: torch.Tensor, rows: int, ranks: int) -> tuple[Right, torch.Tensor]:
    """(b as a pass multiplies by it, so many rows of its other operand as they are sent or multiplied). Of packed rows one
    rounding: the kernels that multiply both are the same."""
    a_mk, b_nk = b_kn.new_empty(rows, len(b_kn)), b_kn.new_empty(b_kn.shape[::-1], dtype=FORWARD)
    if plan.config.fp8 == "off":
        return b_kn, a_mk
    if plan.config.fp8 == "blockwise":
        n, k = b_nk.shape
        b_inverse = b_kn.new_empty(n // BLOCK, -(-k // (4 * BLOCK)) * 4, dtype=torch.float32)
        if engine.kind.receives:
            return BlockMatrix(b_nk, b_inverse, plan.dtype), new_packed(a_mk)
        a8 = new_rows(a_mk, ranks if engine.method == "chunked" else 1)
        return BlockMatrix(b_nk, b_inverse, plan.dtype, a8.inverse), a8.numbers
    dtype = FORWARD if engine in (plan.fprop, plan.wgrad) else GRADIENT[plan.config.fp8]
    inverse = torch.empty(1, dtype=torch.float32, device="meta")
    return Fp8Matrix(b_nk, inverse, inverse, plan.dtype, engine is plan.fprop), a_mk.to(dtype)
