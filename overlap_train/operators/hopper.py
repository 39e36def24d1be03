"""The fused operators on Hopper: when the warp-specialised kernels serve a call, and how they are launched.

They need TMA: bf16 or fp16, rows that start on 16 bytes, a GPU of compute capability 9. Everything else takes the portable
kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..domain import OverlapDomain
from ..workspace import Call
from .tiles import multiprocessors, protocol_arguments

BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES = 128, 256, 64, 8, 4
# 8 multiplying warps and the loading warp, padded to 4, share 65,536 registers: 168 a thread at entry, then 240 and 40.
_LAUNCH = {"num_warps": 8, "maxnreg": 168}


def serves_all_gather(x_shard_m: torch.Tensor, b_kn: torch.Tensor) -> bool:
    """Whether the Hopper kernel can multiply gathered x [M, K] by b_kn [K, N]."""
    return (
        _is_hopper(x_shard_m) and _tma_rows(x_shard_m) and _tma_operand(b_kn) and _whole_16_bytes(b_kn.shape[1], b_kn)
    )


def serves_reduce_scatter(a_mk: torch.Tensor, b_kn: torch.Tensor, m_chunk: int) -> bool:
    """Whether the Hopper kernel can multiply a_mk [M, K] by b_kn [K, N] and send chunks of m_chunk rows: partial tiles leave by
    TMA, so none may cross a chunk's edge."""
    return serves_all_gather(a_mk, b_kn) and m_chunk % BLOCK_M == 0


def all_gather_gemm(domain: OverlapDomain, call: Call, own: torch.Tensor, b_kn: torch.Tensor) -> torch.Tensor:
    """y [M, N] = (own [M/W, K] and the peers' shards) @ b_kn [K, N]."""
    from ..kernels.hopper_all_gather_gemm import hopper_all_gather_gemm_kernel

    (m_shard, k), n = own.shape, b_kn.shape[1]
    y = own.new_empty(m_shard * domain.world_size, n)
    gathered = call.blocks.flatten(0, 1)
    hopper_all_gather_gemm_kernel[_grid(m_shard * domain.world_size, n, domain.device)](
        _descriptor(own, BLOCK_M, BLOCK_K), _descriptor(gathered, BLOCK_M, BLOCK_K), *_operand(b_kn),
        _descriptor(y, BLOCK_M, BLOCK_N // 2), y, m_shard, n, k, **_arguments(domain, call, b_kn),
        WHOLE_TILES=m_shard % (call.chunks * BLOCK_M) == 0,
    )  # fmt: skip
    return y


def gemm_reduce_scatter(
    domain: OverlapDomain, call: Call, a_mk: torch.Tensor, b_kn: torch.Tensor, staging: torch.Tensor, y: torch.Tensor
) -> None:
    """staging [W, M/W, N] and y [M/W, N] from a_mk [M, K] @ b_kn [K, N] and what the peers send."""
    from ..kernels.hopper_gemm_reduce_scatter import hopper_gemm_reduce_scatter_kernel

    m_shard, n = y.shape
    hopper_gemm_reduce_scatter_kernel[_grid(a_mk.shape[0], n, domain.device)](
        _descriptor(a_mk, BLOCK_M, BLOCK_K), *_operand(b_kn), _descriptor(staging.flatten(0, 1), BLOCK_M, BLOCK_N // 2),
        call.blocks, y, m_shard, n, a_mk.shape[1], complete_ptr=call.slot.complete, **_arguments(domain, call, b_kn),
    )  # fmt: skip


def _arguments(domain: OverlapDomain, call: Call, b_kn: torch.Tensor) -> dict[str, Any]:
    return dict(
        **protocol_arguments(domain, call), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M,
        STAGES=STAGES, B_IS_NK=b_kn.stride(0) == 1, **_LAUNCH,
    )  # fmt: skip


def _operand(b_kn: torch.Tensor) -> tuple[Any]:
    """The descriptor of b_kn [K, N] as it lies in memory: [N, K] or [K, N]."""
    if b_kn.stride(0) == 1:
        return (_descriptor(b_kn.t(), BLOCK_N, BLOCK_K),)
    return (_descriptor(b_kn, BLOCK_K, BLOCK_N),)


def _descriptor(matrix: torch.Tensor, rows: int, cols: int) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [rows, cols], _shared_layout(rows, cols, matrix.dtype))


@functools.cache
def _shared_layout(rows: int, cols: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16

    return NVMMASharedLayout.get_default_for([rows, cols], bfloat16 if dtype == torch.bfloat16 else float16)


def _grid(m: int, n: int, device: torch.device) -> tuple[int]:
    return (min(-(-m // BLOCK_M) * -(-n // BLOCK_N), multiprocessors(device)),)


def _is_hopper(x: torch.Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype != torch.float32 and _capability(x.device) == 9


@functools.cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _tma_operand(b_kn: torch.Tensor) -> bool:
    return _tma_rows(b_kn.t() if b_kn.stride(0) == 1 else b_kn)


def _tma_rows(matrix: torch.Tensor) -> bool:
    return matrix.stride(1) == 1 and matrix.data_ptr() % 16 == 0 and _whole_16_bytes(matrix.stride(0), matrix)


def _whole_16_bytes(elements: int, matrix: torch.Tensor) -> bool:
    return elements * matrix.element_size() % 16 == 0
