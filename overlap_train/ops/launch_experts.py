"""Launches of the kernels of experts. Those that multiply are for Hopper alone: 16-bit numbers in rows of 16 bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..gpu.launch import Launch
from ..group.domain import OverlapDomain
from ..group.slots import Call
from .blocks import tails
from .expert_tables import LEAST_ROWS
from .launch import (
    BLOCK_M,
    BLOCK_N,
    HALF_N,
    LAUNCH,
    PANEL_BYTES,
    PART_M,
    STAGES,
    STEP,
    Replaced,
    Scaling,
    descriptor,
    grid_size,
    multiprocessors,
    protocol_arguments,
    shared_layout,
)
from .quantize import FORWARD

if TYPE_CHECKING:
    from .grouped import BlockProduct, GroupedProduct
    from .plan import EnginePlan
    from .routing import Routing

_COMBINE = ("counter_ptr", "complete_ptr", "left_ptr", "epoch_ptr", "outgoing_at_ptr", "abort_ptr", "tag")
_DISPATCH = (*_COMBINE, "signals_ptr", "record_ptr", "limit")  # it also waits
MOST_RANKS = 8  # a warp notes in 64 bits which of the chunks of all ranks it has waited for
MOST_STEPS = (1 << 31) - 1  # of 16 bytes, behind the lowest weight: what a coordinate holds
# Of an operand, as its descriptor says: one launch serves any number. No strip ends beyond the last row.
_MOST_ROWS = 1 << 24


def dispatch_and_multiply(
    domain: OverlapDomain, call: Call, plan: EnginePlan, routing: Routing, x: torch.Tensor, numbers: torch.Tensor | None,
    product: GroupedProduct | BlockProduct, y: torch.Tensor,
) -> None:  # fmt: skip
    """Launch the kernel that stores the rows of x [T, K], and their numbers out of fp32 [T, E], at their places in the slots of
    their experts' ranks, and fills y [R, N] with the product of what arrives in this rank's."""
    tables = routing.tables
    tensors = dict(x_ptr=_readable(x), tokens_ptr=routing.tokens, places_ptr=routing.places_of_tokens, y_ptr=y)
    tensors |= {f"{name}_ptr": getattr(tables, name) for name in ("pairs", "pieces", "peers", "segments")}
    _run(_dispatch_launch, domain, call, plan, product, tensors, numbers)


def multiply_and_combine(
    domain: OverlapDomain, call: Call, plan: EnginePlan, routing: Routing, a: torch.Tensor, numbers: torch.Tensor | None,
    product: GroupedProduct | BlockProduct,
) -> None:  # fmt: skip
    """Launch the kernel that multiplies a [R, K], and stores the rows of the product, and numbers, fp32 [R], at their places in
    the slots of the ranks that they are for."""
    tables, missing = routing.tables, LEAST_ROWS - len(a)
    a = torch.nn.functional.pad(a, (0, 0, 0, missing)) if missing > 0 else _readable(a)
    tensors = dict(a_desc=a, pairs_ptr=tables.pairs, segments_ptr=tables.segments, peers_ptr=tables.peers)
    if product.scales is not None:
        tensors |= dict(a_scale_ptr=tails(a.view(FORWARD), product.depth))
    _run(_combine_launch, domain, call, plan, product, tensors, numbers)


def sum_on_gpu(domain: OverlapDomain, rows: torch.Tensor, index: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The sums [T, H] of rows [*, H], as kernels/sum_of_tokens.py has them: index int64 [N], ends int64 [T + 1]. torch's
    embedding_bag takes three to six times as long (32768 rows of 2048 features: 135 us on an H200)."""
    y = rows.new_empty(len(ends) - 1, rows.shape[1])
    values = tuple(tensor.data_ptr() for tensor in (rows, index, ends, y))
    domain.launches.run(
        ("sum of tokens", y.shape, y.dtype, values[0] % 16), values, _sum_launch, domain, rows, index, ends, y
    )
    return y


def _sum_launch(
    domain: OverlapDomain, rows: torch.Tensor, index: torch.Tensor, ends: torch.Tensor, y: torch.Tensor
) -> Launch:
    from ..kernels.sum_of_tokens import sum_of_tokens_kernel

    tensors = dict(rows_ptr=rows, index_ptr=index, ends_ptr=ends, y_ptr=y)
    block = min(2048, 1 << (y.shape[1] - 1).bit_length())
    constants = dict(BLOCK=block, num_warps=max(1, block // 256))
    replaced: Replaced = tuple((name,) for name in tensors)
    arguments = tensors | dict(features=y.shape[1], abort_ptr=domain.fault.abort)
    return Launch(sum_of_tokens_kernel, (len(y),), arguments, constants, replaced)


def _readable(rows: torch.Tensor) -> torch.Tensor:
    """rows, or a copy where vector loads and TMA could not read them."""
    aligned = rows.is_contiguous() and rows.data_ptr() % 16 == 0
    return rows if aligned else rows.clone(memory_format=torch.contiguous_format)


def _run(
    describe: Callable[..., Launch], domain: OverlapDomain, call: Call, plan: EnginePlan, product: GroupedProduct | BlockProduct,
    tensors: dict[str, torch.Tensor], numbers: torch.Tensor | None,
) -> None:  # fmt: skip
    """tensors: what the kernel is told that lies elsewhere in the next call. The first one has the rows that are multiplied."""
    b, at = product.matrices
    tensors |= dict(b_at_ptr=_on_device(domain, at))
    tensors |= {} if numbers is None else dict(numbers_ptr=numbers)
    tensors |= {} if product.scales is None else dict(b_scale_ptr=product.scales)
    key = (describe, plan, product.transposed, b.shape, b.dtype, numbers is None)
    values = (*(tensor.data_ptr() for tensor in tensors.values()), b.data_ptr(), call.tag.word)
    call.launches.run(key, values, describe, domain, call, plan, product, tensors, b)


def _dispatch_launch(domain: OverlapDomain, call: Call, plan: EnginePlan, *told: Any) -> Launch:
    from ..kernels.hopper_dispatch_gemm import hopper_dispatch_gemm_kernel

    arguments, constants, replaced = _told(_DISPATCH, domain, call, plan, *told)
    rows, product = call.gathered, told[0]
    if product.scales is not None:
        rows = rows.view(FORWARD)
        arguments |= dict(a_scale_ptr=tails(rows, product.depth))
    constants |= dict(STEP=STEP // rows.itemsize)
    arguments |= dict(rows_desc=_panels(rows, product), sent_ptr=call.slot.direct_counters.sent)
    return Launch(hopper_dispatch_gemm_kernel, _grid(domain, plan), arguments, constants, replaced)


def _combine_launch(domain: OverlapDomain, call: Call, plan: EnginePlan, *told: Any) -> Launch:
    from ..kernels.hopper_gemm_combine import hopper_gemm_combine_kernel

    arguments, constants, replaced = _told(_COMBINE, domain, call, plan, *told)
    a, product = arguments["a_desc"], told[0]
    a_desc = _panels(a if product.scales is None else a.view(FORWARD), product)
    arguments |= dict(a_desc=replace(a_desc, shape=[_MOST_ROWS, product.depth]), like_ptr=call.gathered)
    return Launch(hopper_gemm_combine_kernel, _grid(domain, plan), arguments, constants, replaced)


def _panels(rows: torch.Tensor, product: GroupedProduct | BlockProduct) -> Any:
    """The descriptor of rows that are multiplied."""
    return descriptor(rows[:, : product.depth], PART_M, PANEL_BYTES // rows.itemsize)


def _told(
    of_protocol: tuple[str, ...], domain: OverlapDomain, call: Call, plan: EnginePlan, product: GroupedProduct | BlockProduct,
    tensors: dict[str, torch.Tensor], b: torch.Tensor,
) -> tuple[dict[str, Any], dict[str, Any], Replaced]:  # fmt: skip
    """(arguments, constants, what is replaced) that both kernels have. b: the weight that lies lowest."""
    depth, protocol = PANEL_BYTES // b.itemsize, protocol_arguments(domain, call, direct=True)
    block = (BLOCK_N, depth) if product.transposed else (depth, BLOCK_N)
    pitch = next(iter(tensors.values())).shape[1]
    arguments = dict(numbers_ptr=None) | tensors | {name: protocol[name] for name in of_protocol}
    arguments |= dict(b_desc=_anywhere(b, *block), n=product.features, k=product.depth, pitch=pitch)
    arguments |= dict(memory_at_ptr=call.slot.memory_at)
    constants = dict(
        WORLD=domain.world_size, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=depth, GROUP_M=plan.tile.group_m, STAGES=STAGES,
        B_IS_NK=product.transposed, **LAUNCH,
    )  # fmt: skip
    of_b: tuple[str, ...] = ("b_desc",)
    if product.scales is not None:
        arguments |= dict(b_half_desc=descriptor(b, HALF_N, depth))
        constants |= Scaling((product.scales,), of_blocks=True).constants
        of_b += ("b_half_desc",)
    return arguments, constants, (*((name,) for name in tensors), of_b, ("tag",))


def _anywhere(b: torch.Tensor, *block: int) -> Any:
    """The descriptor of matrices like b, in blocks [1, *block]: at (i, row, column), of that which begins 16 i bytes behind b."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    shape, strides = [MOST_STEPS, *b.shape], [16 // b.itemsize, *b.stride()]
    return TensorDescriptor(b, shape, strides, [1, *block], shared_layout((1, *block), b.dtype))


def _on_device(domain: OverlapDomain, at: tuple[int, ...]) -> torch.Tensor:
    """int32. Layers' weights lie alike, in few ways: each is copied once."""
    known = domain.places_of_weights.get(at)
    if known is None:
        table = torch.tensor(at, dtype=torch.int32)
        known = domain.places_of_weights.put(at, table.to(domain.device, non_blocking=True))
    return known


def _grid(domain: OverlapDomain, plan: EnginePlan) -> tuple[int]:
    return grid_size(multiprocessors(domain.device), domain.device, plan.sm_margin)
