"""AllGather + GEMM: y [M, N] = all_gather(x_shard_m [M/W, K]) @ b_kn [K, N].

Each rank sends its shard from the caller's tensor into every peer's slot, nearest first, a signal behind each chunk: by the copy
engine, or (direct) by stores of the GEMM's own kernel. The GEMM walks the shards in the order in which they arrive, its own
first, and waits for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from ..domain import OverlapDomain
from ..tuned.ways import PLAIN, Way
from . import hopper, portable
from .tiles import chunk_count, stored_chunk_count, worth_a_stream


class Gather(Protocol):
    """x [M, K] on its way: row block s comes from rank s."""

    def full(self) -> torch.Tensor:
        """x [M, K], complete; valid until the operator ends (the slot is then free for others)."""
        ...

    def kept(self) -> torch.Tensor:
        """x [M, K], complete, in memory of its own."""
        ...

    def matmul(self, b_kn: torch.Tensor) -> torch.Tensor:
        """x [M, K] @ b_kn [K, N] -> [M, N]."""
        ...


def start_all_gather(domain: OverlapDomain, x_shard_m: torch.Tensor, method: str, op: str, way: Way = PLAIN) -> Gather:
    """Start gathering x_shard_m [M/W, K] for `matmul`; nobody waits yet."""
    return GATHERS[method](domain, x_shard_m.contiguous(), op, way)


def start_all_gather_whole(domain: OverlapDomain, x_shard_m: torch.Tensor, method: str, op: str) -> Gather:
    """Start gathering x_shard_m [M/W, K] for a product that begins when all is there (`full`).

    By all methods but collective in whole blocks and by the copy engine, which leaves the SMs to the product beside it: chunks
    would be pushes for nothing.
    """
    return start_all_gather(domain, x_shard_m, method if method == "collective" else "chunked", op)


class CollectiveGather:
    """NCCL or gloo, then one GEMM: nothing overlaps inside the operator."""

    def __init__(self, domain: OverlapDomain, x_shard_m: torch.Tensor, op: str, way: Way) -> None:
        m_shard, k = x_shard_m.shape
        self._x = x_shard_m.new_empty(m_shard * domain.world_size, k)
        aside = worth_a_stream(self._x)
        self._work = dist.all_gather_into_tensor(self._x, x_shard_m, group=domain.group, async_op=aside)

    def full(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
        return self._x

    def kept(self) -> torch.Tensor:
        return self.full()

    def matmul(self, b_kn: torch.Tensor) -> torch.Tensor:
        return self.full() @ b_kn


class ChunkedGather:
    """Library GEMMs on shards, each behind a wait for its shard."""

    def __init__(self, domain: OverlapDomain, x_shard_m: torch.Tensor, op: str, way: Way) -> None:
        self._domain, self._own = domain, x_shard_m
        self._arrived = False  # whether all blocks have been waited for
        chunks = 1 if way.whole else self._chunks(x_shard_m)
        self._call = domain.workspace.open(x_shard_m.shape, x_shard_m.dtype, op, chunks)
        self._start()

    def _chunks(self, x_shard_m: torch.Tensor) -> int:
        return 1

    def _start(self) -> None:
        self._call.slot.next_epoch()
        self._domain.engine.push(self._own, self._call.broadcast())

    def full(self) -> torch.Tensor:
        self._call.blocks[self._domain.rank].copy_(self._own)
        if not self._arrived:
            self._call.wait_for_all()
        return self._call.blocks.flatten(0, 1)

    def kept(self) -> torch.Tensor:
        return self.full().clone()

    def matmul(self, b_kn: torch.Tensor) -> torch.Tensor:
        # Returned whole and not as a view: callers may write into the result (Megatron's cross entropy does), which autograd
        # refuses for views that were made inside an autograd function.
        y = self._own.new_empty(self._own.shape[0] * self._domain.world_size, b_kn.shape[1])
        blocks = y.unflatten(0, (self._domain.world_size, -1))
        torch.mm(self._own, b_kn, out=blocks[self._domain.rank])
        for source in self._call.sources:
            self._call.wait(source)
            torch.mm(self._call.blocks[source], b_kn, out=blocks[source])
        self._arrived = True
        return y


class FusedGather(ChunkedGather):
    """One persistent kernel whose tiles wait for their chunk."""

    def _chunks(self, x_shard_m: torch.Tensor) -> int:
        m_shard, k = x_shard_m.shape
        return chunk_count(m_shard, k * x_shard_m.element_size(), x_shard_m.device)

    def matmul(self, b_kn: torch.Tensor) -> torch.Tensor:
        return self._multiply(b_kn, sends=False)

    def _multiply(self, b_kn: torch.Tensor, sends: bool) -> torch.Tensor:
        """sends: the kernel stores the own rows at the peers."""
        # full() waits again: its wait costs nothing where the kernel's waits were met, and poisons x where one gave up.
        kernels = hopper if hopper.serves(self._own, b_kn) else portable
        return kernels.all_gather_gemm(self._domain, self._call, self._own, b_kn, sends)


class DirectGather(FusedGather):
    """That kernel sends, too: there are no copies, and no host time for them."""

    def _chunks(self, x_shard_m: torch.Tensor) -> int:
        return stored_chunk_count(x_shard_m.shape[0], x_shard_m.device)

    def _start(self) -> None:
        self._sent = False  # not before it is known whether there is a product

    def matmul(self, b_kn: torch.Tensor) -> torch.Tensor:
        sends, self._sent = not self._sent, True
        return self._multiply(b_kn, sends)

    def full(self) -> torch.Tensor:
        if not self._sent:  # nothing was multiplied (a frozen input): the peers need the rows all the same
            super()._start()
            self._sent = True
        return super().full()


GATHERS: dict[str, Callable[[OverlapDomain, torch.Tensor, str, Way], Gather]] = {
    "collective": CollectiveGather,
    "chunked": ChunkedGather,
    "fused": FusedGather,
    "direct": DirectGather,
}
