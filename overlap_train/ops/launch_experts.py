"""Launches of the kernels of experts. Those that multiply are for Hopper alone: 16-bit numbers, features in multiples of
FEATURES."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from ..gpu.launch import Launch
from ..group.domain import OverlapDomain
from ..group.slots import Call
from .expert_tables import LEAST_ROWS
from .launch import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    LAUNCH,
    PART_M,
    STAGES,
    STEP,
    Replaced,
    descriptor,
    grid_size,
    multiprocessors,
    protocol_arguments,
)

if TYPE_CHECKING:
    from .grouped import GroupedProduct
    from .plan import EnginePlan
    from .routing import Routing

FEATURES = BLOCK_K  # else the last panel of an expert's transposed weight would have rows of the next one
MOST_RANKS = 8  # a warp notes in 64 bits which of the chunks of all ranks it has waited for
_MOST_ROWS = (
    1 << 24
)  # of an operand, as its descriptor says: one launch for any number. No strip ends beyond the last row.


def dispatch_and_multiply(
    domain: OverlapDomain, call: Call, plan: EnginePlan, routing: Routing, x: torch.Tensor, numbers: torch.Tensor | None,
    product: GroupedProduct, y: torch.Tensor,
) -> None:  # fmt: skip
    """Launch the kernel that stores the rows of x [T, K], and their numbers, fp32 [N] in sent order, at their places in the slots
    of their experts' ranks, and fills y [R, N] with the product of what arrives in this rank's."""
    tables = routing.tables
    tensors = dict(
        x_ptr=_readable(x), tokens_ptr=routing.tokens, y_ptr=y, pairs_ptr=tables.pairs, pieces_ptr=tables.pieces
    )
    tensors |= dict(peers_ptr=tables.peers, segments_ptr=tables.segments) | (
        {} if numbers is None else dict(numbers_ptr=numbers)
    )
    _run("hopper_dispatch_gemm", domain, call, plan, product, tensors)


def multiply_and_combine(
    domain: OverlapDomain, call: Call, plan: EnginePlan, routing: Routing, a: torch.Tensor, numbers: torch.Tensor | None,
    product: GroupedProduct,
) -> None:  # fmt: skip
    """Launch the kernel that multiplies a [R, K], and stores the rows of the product, and numbers, fp32 [R], at their places in
    the slots of the ranks that they are for."""
    tables, missing = routing.tables, LEAST_ROWS - len(a)
    a = torch.nn.functional.pad(a, (0, 0, 0, missing)) if missing > 0 else _readable(a)
    tensors = dict(a_ptr=a, pairs_ptr=tables.pairs, segments_ptr=tables.segments, peers_ptr=tables.peers)
    tensors |= {} if numbers is None else dict(numbers_ptr=numbers)
    _run("hopper_gemm_combine", domain, call, plan, product, tensors)


def sum_on_gpu(domain: OverlapDomain, rows: torch.Tensor, index: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The sums [T, H] of rows [*, H], as kernels/sum_of_tokens.py has them: index int64 [N], ends int64 [T + 1]. torch's
    embedding_bag takes three to six times as long (32768 rows of 2048 features: 135 us on an H200)."""
    y = rows.new_empty(len(ends) - 1, rows.shape[1])
    values = tuple(tensor.data_ptr() for tensor in (rows, index, ends, y))
    domain.launches.run(("sum of tokens", y.shape, y.dtype, values[0] % 16), values, _sum_launch, rows, index, ends, y)
    return y


def _sum_launch(rows: torch.Tensor, index: torch.Tensor, ends: torch.Tensor, y: torch.Tensor) -> Launch:
    from ..kernels.sum_of_tokens import sum_of_tokens_kernel

    tensors = dict(rows_ptr=rows, index_ptr=index, ends_ptr=ends, y_ptr=y)
    block = min(2048, 1 << (y.shape[1] - 1).bit_length())
    constants = dict(BLOCK=block, num_warps=max(1, block // 256))
    replaced: Replaced = tuple((name,) for name in tensors)
    return Launch(sum_of_tokens_kernel, (len(y),), tensors | dict(features=y.shape[1]), constants, replaced)


def _readable(rows: torch.Tensor) -> torch.Tensor:
    """rows, or a copy where vector loads and TMA could not read them."""
    aligned = rows.is_contiguous() and rows.data_ptr() % 16 == 0
    return rows if aligned else rows.clone(memory_format=torch.contiguous_format)


def _run(
    name: str, domain: OverlapDomain, call: Call, plan: EnginePlan, product: GroupedProduct, tensors: dict[str, torch.Tensor]
) -> None:  # fmt: skip
    """Launch kernel `name`. tensors: what it is told that lies elsewhere in the next call."""
    b = product.stack.flatten(0, 1)
    key = (name, plan, product.transposed, b.shape, "numbers_ptr" in tensors)
    values = (*(tensor.data_ptr() for tensor in tensors.values()), b.data_ptr(), call.tag.word)
    call.launches.run(key, values, _launch, name, domain, call, plan, product, tensors, b)


def _launch(
    name: str, domain: OverlapDomain, call: Call, plan: EnginePlan, product: GroupedProduct, tensors: dict[str, torch.Tensor],
    b: torch.Tensor,
) -> Launch:  # fmt: skip
    """b: weights of all experts, one below the other."""
    kernel = getattr(import_module(f"...kernels.{name}", __name__), f"{name}_kernel")
    like = tensors["x_ptr" if "x_ptr" in tensors else "a_ptr"]
    block = (BLOCK_N, BLOCK_K) if product.transposed else (BLOCK_K, BLOCK_N)
    arguments: dict[str, Any] = dict(numbers_ptr=None) | tensors
    arguments |= dict(b_desc=descriptor(b, *block), n=product.features, k=like.shape[1])
    replaced: Replaced = tuple((each,) for each in tensors)
    if name == "hopper_dispatch_gemm":
        arguments |= dict(rows_desc=descriptor(call.gathered, PART_M, BLOCK_K))
    else:
        whole = descriptor(like, PART_M, BLOCK_K)
        arguments |= dict(a_desc=replace(whole, shape=[_MOST_ROWS, like.shape[1]]))
        replaced = (("a_ptr", "a_desc"), *replaced[1:])
    arguments |= protocol_arguments(domain, call, direct=True) | dict(
        sent_ptr=call.slot.direct_counters.sent, memory_at_ptr=call.slot.memory_at
    )
    constants = dict(
        WORLD=domain.world_size, STEP=STEP // like.itemsize, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
        GROUP_M=plan.tile.group_m, STAGES=STAGES, B_IS_NK=product.transposed,
    )  # fmt: skip
    arguments, constants = (
        {each: value for each, value in told.items() if each in kernel.arg_names} for told in (arguments, constants)
    )
    grid = grid_size(multiprocessors(domain.device), domain.device, plan.sm_margin)
    return Launch(kernel, grid, arguments, constants | LAUNCH, (*replaced, ("b_desc",), ("tag",)))
