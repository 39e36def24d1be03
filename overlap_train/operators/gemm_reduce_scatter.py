"""GEMM + ReduceScatter: y_shard_m [M/W, N] = this rank's rows of the sum over ranks of a_mk [M, K/W] @ b_kn [K/W, N].

The GEMM computes the rows of rank R+1 first and its own last. The copy engine pushes a destination's rows as soon as they are
complete. The own rows then add the partials that have arrived, in fp32 and in fixed order: the same bits on every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from ..domain import OverlapDomain
from . import hopper
from .tiles import chunk_count, grid_size, launch_arguments, tile_config


class Scatter(Protocol):
    """y_shard_m [M/W, N] on its way."""

    def finish(self) -> torch.Tensor:
        """y_shard_m, complete."""
        ...


def start_gemm_reduce_scatter(
    domain: OverlapDomain, a_mk: torch.Tensor, b_kn: torch.Tensor, method: str, op: str
) -> Scatter:
    """Start the GEMM and the pushes; `finish` waits for the peers' partials."""
    return SCATTERS[method](domain, a_mk, b_kn, op)


class CollectiveScatter:
    """One GEMM, then NCCL or gloo, which runs beside what the caller does before `finish`."""

    def __init__(self, domain: OverlapDomain, a_mk: torch.Tensor, b_kn: torch.Tensor, op: str) -> None:
        self._partial = a_mk @ b_kn
        self._y = self._partial.new_empty(a_mk.shape[0] // domain.world_size, b_kn.shape[1])
        self._work = dist.reduce_scatter_tensor(self._y, self._partial, group=domain.group, async_op=True)

    def finish(self) -> torch.Tensor:
        self._work.wait()
        return self._y


class ChunkedScatter:
    """A library GEMM for each destination's rows, pushed as it ends; the reduction is a pass of its own."""

    def __init__(self, domain: OverlapDomain, a_mk: torch.Tensor, b_kn: torch.Tensor, op: str) -> None:
        world, n = domain.world_size, b_kn.shape[1]
        self._domain = domain
        self._partials = a_mk.new_empty(world, a_mk.shape[0] // world, n)  # block d: rows of rank d
        self._call = domain.scatter.open(self._partials.shape[1:], a_mk.dtype, op)
        rows = a_mk.unflatten(0, (world, -1))
        for target in self._call.peers():
            torch.mm(rows[target], b_kn, out=self._partials[target])
            domain.engine.fork()
            domain.engine.push(self._call.deliver(self._partials, [target]))
        torch.mm(rows[domain.rank], b_kn, out=self._partials[domain.rank])

    def finish(self) -> torch.Tensor:
        self._call.wait_for_all()
        own = self._partials[self._domain.rank]
        return reduce_partials(own, self._call.blocks, self._domain.rank)


def reduce_partials(own: torch.Tensor, received: torch.Tensor, rank: int) -> torch.Tensor:
    """own [M/W, N] + received [W, M/W, N] in rank order, block `rank` left out, summed in fp32 -> own's dtype."""
    if own.device.type == "cuda":
        from ..kernels.gemm_reduce_scatter import reduce_partials_kernel

        y, block = torch.empty_like(own), 1024
        grid = (-(-own.numel() // block),)
        reduce_partials_kernel[grid](own, received, y, own.numel(), rank, WORLD=len(received), BLOCK=block)
        return y
    total = own.float()
    for source in range(len(received)):
        if source != rank:
            total = total + received[source]
    return total.to(own.dtype)


class FusedScatter:
    """One persistent kernel; a counter per destination and chunk releases its push, and the last tiles are the reduction."""

    def __init__(self, domain: OverlapDomain, a_mk: torch.Tensor, b_kn: torch.Tensor, op: str) -> None:
        world, n = domain.world_size, b_kn.shape[1]
        m_shard = a_mk.shape[0] // world
        chunks = chunk_count(m_shard, n * a_mk.element_size(), domain.device)
        self._domain, self._a, self._b = domain, a_mk, b_kn
        self._staging = a_mk.new_empty(world, m_shard, n)
        self._y = a_mk.new_empty(m_shard, n)
        self._call = domain.scatter.open(self._y.shape, a_mk.dtype, op, chunks)
        if hopper.serves_reduce_scatter(a_mk, b_kn, m_shard // chunks):
            self._launch(self._hopper_kernel, hopper.BLOCK_M, hopper.BLOCK_N)
        else:
            tile = tile_config(a_mk.dtype, domain.device)
            self._launch(self._portable_kernel, tile.block_m, tile.block_n)

    def _launch(self, kernel: Callable[[], None], block_m: int, block_n: int) -> None:
        m_shard, n = self._y.shape
        tiles = -(-(m_shard // self._call.chunks) // block_m) * -(-n // block_n)  # of one chunk
        self._domain.engine.launch(kernel, self._call.deliver(self._staging, self._call.peers(), tiles))

    def _hopper_kernel(self) -> None:
        hopper.gemm_reduce_scatter(self._domain, self._call, self._a, self._b, self._staging, self._y)

    def _portable_kernel(self) -> None:
        from ..kernels.gemm_reduce_scatter import gemm_reduce_scatter_kernel

        domain, a_mk, b_kn, (m_shard, n) = self._domain, self._a, self._b, self._y.shape
        tile = tile_config(a_mk.dtype, domain.device)
        gemm_reduce_scatter_kernel[grid_size(m_shard, n, domain.world_size, tile, domain.device)](
            a_mk, b_kn, self._staging, self._call.blocks, self._y,
            m_shard, n, a_mk.shape[1], a_mk.stride(0), a_mk.stride(1), b_kn.stride(0), b_kn.stride(1),
            complete_ptr=self._call.slot.complete, **launch_arguments(domain, self._call, a_mk.dtype),
        )  # fmt: skip

    def finish(self) -> torch.Tensor:
        return self._y


SCATTERS: dict[str, Callable[[OverlapDomain, torch.Tensor, torch.Tensor, str], Scatter]] = {
    "collective": CollectiveScatter,
    "chunked": ChunkedScatter,
    "fused": FusedScatter,
}
