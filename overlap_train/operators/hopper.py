"""How the warp-specialised kernels for Hopper are launched.

They need TMA: bf16 or fp16, rows that start on 16 bytes, a GPU of compute capability 9 (planning/tiling.py).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..gpu.launch import Launch
from ..planning.engine_plan import MOST_DIRECT_PEERS, EnginePlan
from ..planning.schedule.kinds import A2A_GEMM
from ..planning.schedule.order import units_in_run
from ..planning.tiling import HOPPER_TILE
from ..protocol.slot import Call
from ..runtime.domain import OverlapDomain
from .kernel_args import (
    GatherOperands,
    ScatterOperands,
    grid_size,
    multiprocessors,
    protocol_arguments,
    receiving_arguments,
    sending_constants,
)

BLOCK_M, BLOCK_N, BLOCK_K = HOPPER_TILE.block_m, HOPPER_TILE.block_n, HOPPER_TILE.block_k
# A strip, which each of two multiplying groups has of a tile, and half a tile's columns: it stores one such quarter at a time.
PART_M, HALF_N = BLOCK_M // HOPPER_TILE.parts, BLOCK_N // 2
# Tiles that are stored at a peer leave at NVLink's pace: a buffer for each quarter of one, and a stage less, hide that.
STAGES, STAGES_DIRECT, BUFFERS_DIRECT = HOPPER_TILE.num_stages, 3, 2
# What a CTA that sends rows has in flight, in elements. More takes from the product and sends no faster: 8192 x 14336 x 4096 took
# 7 us longer than with the copy engine with 1024, 22 with 2048 (of 637); with copies as long as the product, 8192 x 2048 x 4096
# took 162 us with 1024, 161 with 2048, 165 with 4096 (2 x H200, benchmarks/notes.md).
STEP = 1024
# Two groups of 4 multiplying warps and up to 4 others, which load and store, share 65,536 registers: 168 a thread, then 232 and
# 40. Triton counts the first group only.
LAUNCH = {"num_warps": HOPPER_TILE.num_warps, "maxnreg": 168}


def gather_launch(
    domain: OverlapDomain, call: Call, plan: EnginePlan, operands: GatherOperands, block: torch.Tensor
) -> Launch:
    """The Launch of the Hopper kernel that receives and multiplies (persistent.py: receive_and_multiply). Values replaced at each
    launch: own block, own, b, y, tag. block: own [M/W, K] in AG + GEMM, this rank's block of own [W, M/W, K/W] in A2A + GEMM."""
    from ..kernels.hopper_all_gather_gemm import hopper_all_gather_gemm_kernel
    from ..kernels.hopper_all_to_all_gemm import hopper_all_to_all_gemm_kernel

    own, b_kn, y, sends = operands.own, operands.b_kn, operands.y, operands.sends
    (m_shard, k), n = own.shape[-2:], b_kn.shape[1]
    exchange = plan.kind == A2A_GEMM
    blocks = 1 if exchange else domain.world_size  # of rows of y
    kernel, received = (
        (hopper_all_to_all_gemm_kernel, "received_desc")
        if exchange
        else (hopper_all_gather_gemm_kernel, "gathered_desc")
    )
    protocol, receiving = protocol_arguments(domain, call, direct=sends), receiving_arguments(domain, call, operands)
    arguments = dict(
        own_desc=_descriptor(block, PART_M, BLOCK_K), own_ptr=own,
        b_desc=_operand(b_kn, BLOCK_N), b_half_desc=_operand(b_kn, HALF_N), y_desc=_stored(y, blocks * call.chunks),
        m_shard=m_shard, n=n, k=k, **protocol.arguments, **receiving.arguments,
    ) | {received: _descriptor(call.blocks.flatten(0, 1), PART_M, BLOCK_K)}  # fmt: skip
    constants = _constants(b_kn, STAGES) | {"STEP": STEP} | protocol.constants | receiving.constants
    # Tiles may be cut into halves, and half as many still reach every SM. What sends rows does it from every SM.
    halves = 2 * HOPPER_TILE.count(m_shard // call.chunks, n, blocks * call.chunks)
    grid = grid_size(multiprocessors(domain.device) if sends else halves, domain.device, plan.spared_sms)
    replaced = (("own_desc",), ("own_ptr",), ("b_desc", "b_half_desc"), ("y_desc",), ("tag",))
    return Launch(kernel, grid, arguments, constants, replaced)


def scatter_launch(domain: OverlapDomain, call: Call, plan: EnginePlan, operands: ScatterOperands) -> Launch:
    """The Launch of the Hopper kernel that multiplies and sends (persistent.py: multiply_and_send). Values replaced at each
    launch: a, b, staging (unused where the kernel stores at the peers), y, tag."""
    from ..kernels.hopper_gemm_reduce_scatter import hopper_gemm_reduce_scatter_kernel

    a_mk, b_kn, staging, y = operands.a_mk, operands.b_kn, operands.staging, operands.y
    m_shard, n = y.shape
    direct = staging is None
    protocol = protocol_arguments(domain, call, direct)
    arguments = dict(
        a_desc=_descriptor(a_mk, PART_M, BLOCK_K), b_desc=_operand(b_kn, BLOCK_N),
        b_half_desc=_operand(b_kn, HALF_N), y_desc=_stored(y, call.chunks),
        received_desc=_descriptor(call.blocks.flatten(0, 1), PART_M, HALF_N), m_shard=m_shard, n=n, k=a_mk.shape[1],
        **protocol.arguments,
    )  # fmt: skip
    if staging is not None:
        places = [_stored(staging.flatten(0, 1), domain.world_size * call.chunks)]
    else:
        places = [_stored(call.remote_block(peer), call.chunks) for peer in call.peers] or [arguments["y_desc"]]
    places += places[:1] * (MOST_DIRECT_PEERS - len(places))  # every parameter wants a value
    arguments |= {f"to{step}_desc": place for step, place in enumerate(places, start=1)}
    constants = _constants(b_kn, STAGES_DIRECT if direct else STAGES) | protocol.constants
    sending = sending_constants(plan, direct)
    run = units_in_run(plan.kind, domain.world_size, call.chunks, direct, sending["REDUCE"])
    constants |= sending | {"RUN": run, "BUFFERS": BUFFERS_DIRECT if direct else 1}
    grid = grid_size(HOPPER_TILE.count(m_shard, n) * domain.world_size, domain.device, plan.spared_sms)
    replaced = (("a_desc",), ("b_desc", "b_half_desc"), () if direct else ("to1_desc",), ("y_desc",), ("tag",))
    return Launch(hopper_gemm_reduce_scatter_kernel, grid, arguments, constants, replaced)


def _constants(b_kn: torch.Tensor, stages: int) -> dict[str, Any]:
    tile = dict(BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=HOPPER_TILE.group_m)
    return dict(STAGES=stages, B_IS_NK=b_kn.stride(0) == 1, **tile, **LAUNCH)


def _operand(b_kn: torch.Tensor, cols: int) -> Any:
    """The descriptor of b_kn [K, N] as it lies in memory, [N, K] or [K, N], in panels of `cols` columns."""
    if b_kn.stride(0) == 1:
        return _descriptor(b_kn.t(), cols, BLOCK_K)
    return _descriptor(b_kn, BLOCK_K, cols)


def _stored(matrix: torch.Tensor, chunks: int) -> Any:
    """The descriptor of a matrix [*, N] of `chunks` chunks of rows that is stored: TMA leaves out what lies beyond a chunk."""
    return _descriptor(matrix.unflatten(0, (chunks, -1)), 1, PART_M, HALF_N)


def _descriptor(tensor: torch.Tensor, *block: int) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, list(block), _shared_layout(block, tensor.dtype))


@functools.cache
def _shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16

    return NVMMASharedLayout.get_default_for(list(block), bfloat16 if dtype == torch.bfloat16 else float16)
