"""The fused operators where the Hopper kernels do not serve: other GPUs, fp32, sizes that TMA refuses, Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..config import flag_name
from ..domain import OverlapDomain
from ..methods import TRAITS
from ..packed_launch import Launch
from ..protocol.slot import Call
from .tiles import multiprocessors, protocol_arguments, sending


@dataclass(frozen=True)
class TileConfig:
    """How a kernel is cut: output tile, depth of a step, rows of tiles that share columns in L2, warps, stages."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3

    def constants(self) -> dict[str, int]:
        return dict(
            BLOCK_M=self.block_m, BLOCK_N=self.block_n, BLOCK_K=self.block_k, GROUP_M=self.group_m,
            num_warps=self.num_warps, num_stages=self.num_stages,
        )  # fmt: skip


_HALF = TileConfig(128, 256, 64)
_FULL = TileConfig(64, 64, 32, num_warps=4)  # fp32 has no tensor-core path
_INTERPRETED = TileConfig(32, 32, 32, num_warps=4)


def why_not(method: str, device: torch.device) -> str | None:
    """Why a method's kernels cannot run on a device, or None."""
    if device.type == "cuda" or not TRAITS[method].kernels or _is_interpreted():
        return None
    return (
        f"method={method!r} with CPU tensors: its kernels run there in Triton's interpreter only, which is for tests "
        f"(TRITON_INTERPRET=1 before the first import); use 'auto' or 'chunked' ({flag_name('method')})"
    )


def _is_interpreted() -> bool:
    """As was decided when the kernels were first imported."""
    from triton.runtime.interpreter import InterpretedFunction

    from ..kernels.all_gather_gemm import all_gather_gemm_kernel

    return isinstance(all_gather_gemm_kernel, InterpretedFunction)


def tile_config(dtype: torch.dtype, device: torch.device) -> TileConfig:
    """The tile for a dtype. The interpreter pays per operation, not per element."""
    if device.type != "cuda":
        return _INTERPRETED
    return _FULL if dtype == torch.float32 else _HALF


def all_gather_gemm(
    domain: OverlapDomain, call: Call, own: torch.Tensor, b_kn: torch.Tensor, sends: bool
) -> torch.Tensor:
    """y [M, N] = (own [M/W, K] and the peers' shards) @ b_kn [K, N]. sends: the kernel stores own at the peers."""
    y = own.new_empty(own.shape[0] * domain.world_size, b_kn.shape[1])
    addresses = (own.data_ptr(), b_kn.data_ptr(), y.data_ptr())
    key = ("portable gather", sends, own.shape, b_kn.shape, b_kn.stride(), _alignment(addresses))
    call.launches.run(key, addresses, lambda: _gather_launch(domain, call, own, b_kn, y, sends))
    return y


def _gather_launch(
    domain: OverlapDomain, call: Call, own: torch.Tensor, b_kn: torch.Tensor, y: torch.Tensor, sends: bool
) -> Launch:
    from ..kernels.all_gather_gemm import all_gather_gemm_kernel

    (m_shard, k), n = own.shape, b_kn.shape[1]
    arguments = dict(
        own_ptr=own, gathered_ptr=call.blocks, b_ptr=b_kn, y_ptr=y, m_shard=m_shard, n=n, k=k,
        stride_bk=b_kn.stride(0), stride_bn=b_kn.stride(1),
    )  # fmt: skip
    words, replaced = sending(domain, call, sends), ("own_ptr", "b_ptr", "y_ptr")
    return _launch(
        all_gather_gemm_kernel, domain, call, y, m_shard, arguments | words.arguments, words.constants, replaced
    )


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
    written = y if staging is None else staging
    addresses = (a_mk.data_ptr(), b_kn.data_ptr(), written.data_ptr(), y.data_ptr())
    shapes = (a_mk.shape, a_mk.stride(), b_kn.shape, b_kn.stride())
    key = ("portable scatter", staging is None, reduce, shapes, _alignment(addresses))
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
    from ..kernels.gemm_reduce_scatter import gemm_reduce_scatter_kernel

    m_shard, n = y.shape
    arguments = dict(
        a_ptr=a_mk, b_ptr=b_kn, staging_ptr=y if staging is None else staging, received_ptr=call.blocks, y_ptr=y,
        m_shard=m_shard, n=n, k=a_mk.shape[1], stride_am=a_mk.stride(0), stride_ak=a_mk.stride(1),
        stride_bk=b_kn.stride(0), stride_bn=b_kn.stride(1),
        memory_at_ptr=call.slot.memory_at,
    )  # fmt: skip
    replaced = ("a_ptr", "b_ptr", "staging_ptr", "y_ptr")
    constants = {"DIRECT": staging is None, "REDUCE": reduce}
    return _launch(gemm_reduce_scatter_kernel, domain, call, y, m_shard, arguments, constants, replaced)


def _launch(
    kernel: Any, domain: OverlapDomain, call: Call, y: torch.Tensor, m_shard: int,
    arguments: dict[str, Any], constants: dict[str, Any], replaced: tuple[str, ...],
) -> Launch:  # fmt: skip
    words, tile = protocol_arguments(domain, call, stores=constants["DIRECT"]), tile_config(y.dtype, domain.device)
    constants = constants | words.constants | tile.constants()
    constants |= dict(PRECISION="ieee", TIMED=domain.device.type == "cuda")
    grid = grid_size(m_shard, y.shape[1], domain.world_size, tile, domain.device)
    return Launch(kernel, grid, arguments | words.arguments, constants, replaced)


def grid_size(m_shard: int, n: int, world_size: int, tile: TileConfig, device: torch.device) -> tuple[int]:
    """One CTA per SM, or per tile if there are fewer; one in the interpreter, which runs CTAs one after the other."""
    if device.type != "cuda":
        return (1,)
    tiles = -(-m_shard // tile.block_m) * -(-n // tile.block_n) * world_size
    return (min(tiles, multiprocessors(device)),)


def _alignment(addresses: tuple[int, ...]) -> tuple[bool, ...]:
    """What Triton compiles a kernel for: which pointers are on 16 bytes."""
    return tuple(address % 16 == 0 for address in addresses)
