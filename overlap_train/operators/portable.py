"""How the plain Triton kernels are launched: on other GPUs than Hopper, in fp32, with sizes that TMA refuses, interpreted."""

from __future__ import annotations

from typing import Any

import torch

from ..gpu.launch import Launch
from ..planning.engine_plan import EnginePlan
from ..planning.schedule.kinds import A2A_GEMM
from ..protocol.slot import Call
from ..runtime.domain import OverlapDomain
from .kernel_args import (
    GatherOperands,
    ScatterOperands,
    grid_size,
    on_a_gpu,
    protocol_arguments,
    receiving_arguments,
    sending_constants,
)


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, as was decided when they were first imported."""
    from triton.runtime.interpreter import InterpretedFunction

    from ..kernels.all_gather_gemm import all_gather_gemm_kernel

    return isinstance(all_gather_gemm_kernel, InterpretedFunction)


def gather_launch(
    domain: OverlapDomain, call: Call, plan: EnginePlan, operands: GatherOperands, block: torch.Tensor
) -> Launch:
    """The Launch of the plain Triton kernel that receives and multiplies (persistent.py: receive_and_multiply). Values replaced
    at each launch: own block, own, b, y, tag. The kernel works out the own block's address from own, therefore no argument takes
    it."""
    from ..kernels.all_gather_gemm import all_gather_gemm_kernel
    from ..kernels.all_to_all_gemm import all_to_all_gemm_kernel

    own, b_kn, y, sends = operands.own, operands.b_kn, operands.y, operands.sends
    (m_shard, k), n = own.shape[-2:], b_kn.shape[1]
    exchange = plan.kind == A2A_GEMM
    kernel, received = (
        (all_to_all_gemm_kernel, "received_ptr") if exchange else (all_gather_gemm_kernel, "gathered_ptr")
    )
    protocol, receiving = protocol_arguments(domain, call, direct=sends), receiving_arguments(domain, call, operands)
    arguments = dict(
        own_ptr=own, b_ptr=b_kn, y_ptr=y, m_shard=m_shard, n=n, k=k,
        stride_bk=b_kn.stride(0), stride_bn=b_kn.stride(1), **protocol.arguments, **receiving.arguments,
    ) | {received: call.blocks}  # fmt: skip
    constants = _constants(plan, domain) | protocol.constants | receiving.constants
    grid = grid_size(
        plan.tile.count(m_shard, n) * (1 if exchange else domain.world_size), domain.device, plan.spared_sms
    )
    return Launch(kernel, grid, arguments, constants, ((), ("own_ptr",), ("b_ptr",), ("y_ptr",), ("tag",)))


def scatter_launch(domain: OverlapDomain, call: Call, plan: EnginePlan, operands: ScatterOperands) -> Launch:
    """The Launch of the plain Triton kernel that multiplies and sends (persistent.py: multiply_and_send). Values replaced at each
    launch: a, b, staging (y where the kernel stores at the peers), y, tag."""
    from ..kernels.gemm_reduce_scatter import gemm_reduce_scatter_kernel

    a_mk, b_kn, staging, y = operands.a_mk, operands.b_kn, operands.staging, operands.y
    m_shard, n = y.shape
    direct = staging is None
    protocol = protocol_arguments(domain, call, direct)
    arguments = dict(
        a_ptr=a_mk, b_ptr=b_kn, staging_ptr=y if staging is None else staging, received_ptr=call.blocks, y_ptr=y,
        m_shard=m_shard, n=n, k=a_mk.shape[1], stride_am=a_mk.stride(0), stride_ak=a_mk.stride(1),
        stride_bk=b_kn.stride(0), stride_bn=b_kn.stride(1), memory_at_ptr=call.slot.memory_at, **protocol.arguments,
    )  # fmt: skip
    constants = _constants(plan, domain) | protocol.constants | sending_constants(plan, direct)
    grid = grid_size(plan.tile.count(m_shard, n) * domain.world_size, domain.device, plan.spared_sms)
    replaced = (("a_ptr",), ("b_ptr",), ("staging_ptr",), ("y_ptr",), ("tag",))
    return Launch(gemm_reduce_scatter_kernel, grid, arguments, constants, replaced)


def _constants(plan: EnginePlan, domain: OverlapDomain) -> dict[str, Any]:
    tile = plan.tile
    return dict(
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m, num_warps=tile.num_warps,
        num_stages=tile.num_stages, PRECISION="ieee", TIMED=on_a_gpu(domain),
    )  # fmt: skip
