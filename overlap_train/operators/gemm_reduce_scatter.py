"""GEMM + ReduceScatter: y_shard_m [M/W, N] = this rank's rows of the sum over ranks of a_mk [M, K/W] @ b_kn [K/W, N].

The GEMM computes the rows of rank R+1 first (direct: tiles for all peers in turn) and its own last. The copy engine pushes a
destination's rows as soon as they are complete. The own rows then add the partials that have arrived, in fp32 and in fixed
order: the same bits on every run. The last tiles of a persistent kernel do that, or a kernel of its own in `finish` (chunked, and
fused where `Way.deferred` says so).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from ..domain import OverlapDomain
from ..packed_launch import Launch
from ..protocol.slot import Call
from ..tuned.ways import PLAIN, Way
from . import hopper, portable
from .tiles import chunk_count, stored_chunk_count, worth_a_stream


class Scatter(Protocol):
    """y_shard_m [M/W, N] on its way."""

    def finish(self) -> torch.Tensor:
        """y_shard_m, complete."""
        ...


def start_gemm_reduce_scatter(
    domain: OverlapDomain, a_mk: torch.Tensor, b_kn: torch.Tensor, method: str, op: str, way: Way = PLAIN
) -> Scatter:
    """Start the GEMM and the pushes; `finish` waits for the peers' partials."""
    return SCATTERS[method](domain, a_mk, b_kn, op, way)


class CollectiveScatter:
    """One GEMM, then NCCL or gloo; where that is long (`worth_a_stream`) beside what the caller does before `finish`."""

    def __init__(self, domain: OverlapDomain, a_mk: torch.Tensor, b_kn: torch.Tensor, op: str, way: Way) -> None:
        self._partial = a_mk @ b_kn
        self._y = self._partial.new_empty(a_mk.shape[0] // domain.world_size, b_kn.shape[1])
        aside = worth_a_stream(self._partial)
        self._work = dist.reduce_scatter_tensor(self._y, self._partial, group=domain.group, async_op=aside)

    def finish(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
        return self._y


class ChunkedScatter:
    """A library GEMM for each destination's rows, pushed as it ends; the reduction is a pass of its own."""

    def __init__(self, domain: OverlapDomain, a_mk: torch.Tensor, b_kn: torch.Tensor, op: str, way: Way) -> None:
        world, n = domain.world_size, b_kn.shape[1]
        self._domain = domain
        self._partials = a_mk.new_empty(world, a_mk.shape[0] // world, n)  # block d: rows of rank d
        self._call = domain.workspace.open(self._partials.shape[1:], a_mk.dtype, op)
        self._call.slot.next_epoch()
        rows = a_mk.unflatten(0, (world, -1))
        for target in self._call.peers:
            torch.mm(rows[target], b_kn, out=self._partials[target])
            domain.engine.push(self._partials, self._call.deliver(target))
        torch.mm(rows[domain.rank], b_kn, out=self._partials[domain.rank])

    def finish(self) -> torch.Tensor:
        return reduce_partials(self._domain, self._call, self._partials[self._domain.rank])


def reduce_partials(domain: OverlapDomain, call: Call, own: torch.Tensor) -> torch.Tensor:
    """own [M/W, N] + what the peers send [W, M/W, N] in rank order, the own block left out, summed in fp32 -> own's dtype."""
    call.wait_for_all()
    if own.device.type == "cuda":
        y = torch.empty_like(own)
        call.launches.run("reduce", (own.data_ptr(), y.data_ptr()), partial(_reduce_launch, domain, call, own, y))
        return y
    total = own.to(torch.float32, copy=True)  # not a view, which autograd would refuse to have written into
    for source in range(call.world_size):
        if source != call.rank:
            total = total + call.blocks[source]
    return total.to(own.dtype)


def _reduce_launch(domain: OverlapDomain, call: Call, own: torch.Tensor, y: torch.Tensor) -> Launch:
    from ..kernels.gemm_reduce_scatter import reduce_partials_kernel

    block = 1024
    arguments = dict(
        own_ptr=own, received_ptr=call.blocks, y_ptr=y, size=own.numel(), rank=call.rank, abort_ptr=domain.fault.abort
    )  # fmt: skip
    constants = dict(WORLD=call.world_size, BLOCK=block)
    return Launch(reduce_partials_kernel, (-(-own.numel() // block),), arguments, constants, ("own_ptr", "y_ptr"))


class PersistentScatter:
    """One kernel, whose last tiles are the reduction unless that is deferred."""

    _most_ranks = sys.maxsize  # that the Hopper kernel serves

    def __init__(self, domain: OverlapDomain, a_mk: torch.Tensor, b_kn: torch.Tensor, op: str, way: Way) -> None:
        m_shard, n = a_mk.shape[0] // domain.world_size, b_kn.shape[1]
        self._domain, self._a, self._b = domain, a_mk, b_kn
        self._y = a_mk.new_empty(m_shard, n)  # deferred: the own partial
        self._deferred = way.deferred
        chunks = self._chunks(m_shard, n * a_mk.element_size(), way)
        self._call = domain.workspace.open(self._y.shape, a_mk.dtype, op, chunks)
        fits = domain.world_size <= self._most_ranks
        self._on_hopper = fits and hopper.serves_scatter(a_mk, b_kn, m_shard // chunks)
        self._start()

    def _chunks(self, m_shard: int, row_bytes: int, way: Way) -> int:
        raise NotImplementedError

    def _start(self) -> None:
        raise NotImplementedError

    def _kernel(self, staging: torch.Tensor | None) -> None:
        """Launch it; partials for the peers go to staging [W, M/W, N] or, with None, straight to the peers."""
        kernels = hopper if self._on_hopper else portable
        kernels.gemm_reduce_scatter(self._domain, self._call, self._a, self._b, staging, self._y, not self._deferred)

    def finish(self) -> torch.Tensor:
        return reduce_partials(self._domain, self._call, self._y) if self._deferred else self._y


class FusedScatter(PersistentScatter):
    """A counter per destination and chunk releases its push by the copy engine."""

    def _chunks(self, m_shard: int, row_bytes: int, way: Way) -> int:
        return 1 if way.whole else chunk_count(m_shard, row_bytes, self._domain.device)

    def _start(self) -> None:
        m_shard, n = self._y.shape
        tile = portable.tile_config(self._y.dtype, self._domain.device)
        block_m, block_n = (hopper.BLOCK_M, hopper.BLOCK_N) if self._on_hopper else (tile.block_m, tile.block_n)
        tiles = -(-(m_shard // self._call.chunks) // block_m) * -(-n // block_n)  # of one chunk
        staging = self._a.new_empty(self._domain.world_size, m_shard, n)
        self._call.slot.next_epoch()
        self._domain.engine.launch(lambda: self._kernel(staging), staging, self._call.deliver(None, tiles))


class DirectScatter(PersistentScatter):
    """The epilogue stores tiles at the peers and sends the signals: nothing is staged or pushed, which takes no host time."""

    _most_ranks = hopper.MOST_PEERS + 1

    def _chunks(self, m_shard: int, row_bytes: int, way: Way) -> int:
        return stored_chunk_count(m_shard, self._domain.device)

    def _start(self) -> None:
        self._kernel(None)


SCATTERS: dict[str, Callable[[OverlapDomain, torch.Tensor, torch.Tensor, str, Way], Scatter]] = {
    "collective": CollectiveScatter,
    "chunked": ChunkedScatter,
    "fused": FusedScatter,
    "direct": DirectScatter,
}
