"""The fused operators on Hopper: when the warp-specialised kernels serve a call, and how they are launched.

They need TMA: bf16 or fp16, rows that start on 16 bytes, a GPU of compute capability 9. Everything else takes the portable
kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..domain import OverlapDomain
from ..packed_launch import Launch
from ..protocol.slot import Call
from .tiles import multiprocessors, protocol_arguments, sending

BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES = 128, 256, 64, 8, 4
PART_M, HALF_N = BLOCK_M // 2, BLOCK_N // 2  # what one of two multiplying groups stores at a time
# Tiles that are stored at a peer leave at NVLink's pace: buffers for all quarters of one, and a stage less, hide that.
STAGES_DIRECT, BUFFERS_DIRECT = 3, 2
# What a CTA that sends rows has in flight, in elements. More takes from the product and sends no faster: 8192 x 14336 x 4096 took
# 7 us longer than with the copy engine with 1024, 22 with 2048 (of 637); with copies as long as the product, 8192 x 2048 x 4096
# took 162 us with 1024, 161 with 2048, 165 with 4096 (2 x H200, probes/stored_gathers.py).
STEP = 1024
MOST_PEERS = 7  # that the kernel has a tensor descriptor for
# Two groups of 4 multiplying warps and up to 4 others, which load and store, share 65,536 registers: 168 a thread, then 232 and
# 40. Triton counts the first group only.
_LAUNCH = {"num_warps": 4, "maxnreg": 168}


def serves(a_mk: torch.Tensor, b_kn: torch.Tensor) -> bool:
    """Whether the Hopper kernels can multiply a_mk [M, K] by b_kn [K, N]."""
    aligned = (a_mk.data_ptr() | b_kn.data_ptr()) % 16 == 0
    return aligned and serves_layout(a_mk.device, a_mk.dtype, a_mk.stride(), b_kn.shape, b_kn.stride())


@functools.cache
def serves_layout(
    device: torch.device, dtype: torch.dtype, a_stride: tuple[int, int], b_shape: torch.Size, b_stride: tuple[int, int]
) -> bool:
    """Both operands with contiguous rows (b perhaps transposed), rows and outputs that start on 16 bytes."""
    if device.type != "cuda" or dtype == torch.float32 or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    b_row, b_step = (b_stride[1], b_stride[0]) if b_stride[0] == 1 else b_stride
    pitches = (a_stride[0], b_row, b_shape[1])
    whole = all(pitch > 0 and pitch * dtype.itemsize % 16 == 0 for pitch in pitches)
    return a_stride[1] == 1 and b_step == 1 and whole


def serves_scatter(a_mk: torch.Tensor, b_kn: torch.Tensor, m_chunk: int) -> bool:
    """Whether they can also send chunks of m_chunk rows: partial tiles leave by TMA, so none may cross a chunk's edge."""
    return m_chunk % BLOCK_M == 0 and serves(a_mk, b_kn)


def all_gather_gemm(
    domain: OverlapDomain, call: Call, own: torch.Tensor, b_kn: torch.Tensor, sends: bool
) -> torch.Tensor:
    """y [M, N] = (own [M/W, K] and the peers' shards) @ b_kn [K, N]. sends: the kernel stores own at the peers."""
    y = own.new_empty(own.shape[0] * domain.world_size, b_kn.shape[1])
    addresses = (own.data_ptr(), own.data_ptr(), b_kn.data_ptr(), b_kn.data_ptr(), y.data_ptr(), y.data_ptr())
    key = ("gather", sends, own.shape, b_kn.shape, b_kn.stride())
    call.launches.run(key, addresses, lambda: _gather_launch(domain, call, own, b_kn, y, sends))
    return y


def _gather_launch(
    domain: OverlapDomain, call: Call, own: torch.Tensor, b_kn: torch.Tensor, y: torch.Tensor, sends: bool
) -> Launch:
    from ..kernels.hopper_all_gather_gemm import hopper_all_gather_gemm_kernel

    (m_shard, k), n = own.shape, b_kn.shape[1]
    arguments = dict(
        own_desc=_descriptor(own, BLOCK_M, BLOCK_K), own_ptr=own,
        gathered_desc=_descriptor(call.blocks.flatten(0, 1), BLOCK_M, BLOCK_K),
        b_desc=_operand(b_kn, BLOCK_N), b_half_desc=_operand(b_kn, HALF_N), y_desc=_descriptor(y, PART_M, HALF_N), y_ptr=y,
        m_shard=m_shard, n=n, k=k,
    )  # fmt: skip
    words = sending(domain, call, sends)
    whole = m_shard % (call.chunks * BLOCK_M) == 0
    arguments |= words.arguments
    constants = _constants(b_kn, STAGES) | {"WHOLE_TILES": whole, "STEP": STEP} | words.constants
    replaced = ("own_desc", "own_ptr", "b_desc", "b_half_desc", "y_desc", "y_ptr")
    # Whole tiles may be cut into halves, so that half as many still reach every SM; what sends rows does it from every SM.
    tiles = _tiles(domain, m_shard, n) * (2 if whole else 1)
    programs = multiprocessors(domain.device) if sends else tiles
    return _launch(hopper_all_gather_gemm_kernel, domain, call, programs, arguments, constants, replaced)


def gemm_reduce_scatter(
    domain: OverlapDomain,
    call: Call,
    a_mk: torch.Tensor,
    b_kn: torch.Tensor,
    staging: torch.Tensor | None,
    y: torch.Tensor,
    reduce: bool,
) -> None:
    """y [M/W, N] from a_mk [M, K] @ b_kn [K, N] and what the peers send.

    Args:
        staging: [W, M/W, N], where partials for the peers are written; None: at the peers.
        reduce: wait for what the peers send and add it; else y is the own partial.
    """
    staged = () if staging is None else (staging.data_ptr(),)
    key = ("scatter", len(staged), reduce, a_mk.shape, a_mk.stride(), b_kn.shape, b_kn.stride())
    addresses = (a_mk.data_ptr(), b_kn.data_ptr(), y.data_ptr(), *staged)
    call.launches.run(key, addresses, lambda: _scatter_launch(domain, call, a_mk, b_kn, staging, y, reduce))


def _scatter_launch(
    domain: OverlapDomain,
    call: Call,
    a_mk: torch.Tensor,
    b_kn: torch.Tensor,
    staging: torch.Tensor | None,
    y: torch.Tensor,
    reduce: bool,
) -> Launch:
    from ..kernels.hopper_gemm_reduce_scatter import hopper_gemm_reduce_scatter_kernel

    m_shard, n = y.shape
    arguments = dict(
        a_desc=_descriptor(a_mk, BLOCK_M, BLOCK_K), b_desc=_operand(b_kn, BLOCK_N), y_desc=_descriptor(y, PART_M, HALF_N),
        received_desc=_descriptor(call.blocks.flatten(0, 1), BLOCK_M, HALF_N), m_shard=m_shard, n=n, k=a_mk.shape[1],
    )  # fmt: skip
    places = [staging.flatten(0, 1)] if staging is not None else [call.landing(peer) for peer in call.peers] or [y]
    places += places[:1] * (MOST_PEERS - len(places))  # every parameter wants a value
    for step, place in enumerate(places, start=1):
        arguments[f"to{step}_desc"] = _descriptor(place, PART_M, HALF_N)
    direct = staging is None
    constants = _constants(b_kn, STAGES_DIRECT if direct else STAGES)
    constants |= {"DIRECT": direct, "REDUCE": reduce, "BUFFERS": BUFFERS_DIRECT if direct else 1}
    replaced = ("a_desc", "b_desc", "y_desc", *([] if staging is None else ["to1_desc"]))
    tiles = _tiles(domain, m_shard, n)
    return _launch(hopper_gemm_reduce_scatter_kernel, domain, call, tiles, arguments, constants, replaced)


def _tiles(domain: OverlapDomain, m_shard: int, n: int) -> int:
    return -(-m_shard // BLOCK_M) * -(-n // BLOCK_N) * domain.world_size


def _launch(
    kernel: Any, domain: OverlapDomain, call: Call, programs: int,
    arguments: dict[str, Any], constants: dict[str, Any], replaced: tuple[str, ...],
) -> Launch:  # fmt: skip
    words = protocol_arguments(domain, call, stores=constants["DIRECT"])
    grid = (min(programs, multiprocessors(domain.device)),)
    return Launch(kernel, grid, arguments | words.arguments, constants | words.constants, replaced)


def _constants(b_kn: torch.Tensor, stages: int) -> dict[str, Any]:
    return dict(
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        GROUP_M=GROUP_M,
        STAGES=stages,
        B_IS_NK=b_kn.stride(0) == 1,
        **_LAUNCH,
    )


def _operand(b_kn: torch.Tensor, cols: int) -> Any:
    """The descriptor of b_kn [K, N] as it lies in memory, [N, K] or [K, N], in panels of `cols` columns."""
    if b_kn.stride(0) == 1:
        return _descriptor(b_kn.t(), cols, BLOCK_K)
    return _descriptor(b_kn, BLOCK_K, cols)


def _descriptor(matrix: torch.Tensor, rows: int, cols: int) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [rows, cols], _shared_layout(rows, cols, matrix.dtype))


@functools.cache
def _shared_layout(rows: int, cols: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16

    return NVMMASharedLayout.get_default_for([rows, cols], bfloat16 if dtype == torch.bfloat16 else float16)
