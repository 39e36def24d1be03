"""AllToAll + GEMM: y_shard_m [M/W, N] = sum over s of block s [M/W, K/W] @ the s-th rows of b_kn [K, N].

Each rank sends the d-th block of rows of x_shard_k [M, K/W] to rank d, from the caller's tensor, where blocks may lie apart. Of
what it receives, block s holds rank s's columns of its own rows. The GEMM walks the blocks in the order in which they arrive, its
own first, in one fp32 accumulator (schedule/ has the orders).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..group.domain import OverlapDomain
from ..group.signals import Tag
from ..select.tiles import HOPPER
from . import launch
from .collective import should_run_async

if TYPE_CHECKING:
    from .plan import EnginePlan


class AllToAllGemm(ABC):
    """Blocks [W, M/W, K/W] on their way, block s from rank s."""

    @abstractmethod
    def matmul(self, b_kn: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """y [M/W, N] = block by block @ b_kn [K, N]; once. Returns y."""

    @abstractmethod
    def received_view(self) -> torch.Tensor:
        """[W, M/W, K/W], complete; valid until the operator ends (the slot is then free for others)."""

    def received_copy(self) -> torch.Tensor:
        """What all ranks have sent, complete, as [M, K/W], in memory of its own."""
        return self.received_view().flatten(0, 1).clone()


class CollectiveAllToAllGemm(AllToAllGemm):
    """NCCL or gloo, then one GEMM over all blocks side by side."""

    def __init__(self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, sent: torch.Tensor) -> None:
        domain.collective_calls.enter(tag)
        self._received = sent.new_empty(sent.shape)
        received, aside = self._received.flatten(0, 1), should_run_async(sent)
        self._work = dist.all_to_all_single(received, sent.flatten(0, 1), group=domain.group, async_op=aside)

    def matmul(self, b_kn: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """One GEMM over all columns, side by side, as the baselines do it: the copy costs less than sums in fp32 memory."""
        return torch.mm(self.received_view().transpose(0, 1).flatten(1), b_kn, out=y)

    def received_view(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
        return self._received

    def received_copy(self) -> torch.Tensor:
        return self.received_view().flatten(0, 1)


class ChunkedAllToAllGemm(AllToAllGemm):
    """A library GEMM for each block, after a wait for it; their sum is kept in fp32."""

    _sends = False  # whether a kernel stores the blocks at the peers, and no copy
    _arrived = False  # whether all blocks have been waited for

    def __init__(self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, sent: torch.Tensor) -> None:
        self._domain, self._plan, self._tag, self._sent = domain, plan, tag, sent
        self._call = domain.workspace.open(sent.shape[1:], sent.dtype, tag, plan.chunks)
        if not self._sends:
            self._push()

    def _push(self) -> None:
        self._call.next_epoch()
        self._domain.engine.push(self._sent, self._call.routes(self._plan.transfers, pitch=self._sent.stride(0)))

    def matmul(self, b_kn: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rank = self._domain.rank
        b_blocks = b_kn.chunk(self._domain.world_size, dim=0)
        total = product_in_fp32(self._sent[rank], b_blocks[rank])
        for source in self._plan.sources:
            self._call.wait(source)
            add_product_in_fp32(total, self._call.blocks[source], b_blocks[source])
        self._arrived = True
        return y.copy_(total)

    def received_view(self) -> torch.Tensor:
        own = self._sent[self._domain.rank]
        if self._arrived:
            self._call.keep(own)
        else:
            self._call.receive(own)
        return self._call.blocks


class FusedAllToAllGemm(ChunkedAllToAllGemm):
    """One persistent kernel whose tiles wait at each block's edge."""

    def __init__(self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, sent: torch.Tensor) -> None:
        reads_all = self._sends or plan.kernels != HOPPER  # and not only the own block
        super().__init__(domain, plan, tag, sent.contiguous() if reads_all else sent)

    def matmul(self, b_kn: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self._multiply(b_kn, y)
        return y

    def _multiply(self, b_kn: torch.Tensor, y: torch.Tensor) -> None:
        """Fill y."""
        launch.receive_and_multiply(self._domain, self._call, self._plan, self._sent, b_kn, y)


class DirectAllToAllGemm(FusedAllToAllGemm):
    """The FusedAllToAllGemm whose kernel also sends the own blocks to the peers: there are no copies, and no host time for
    them."""

    _sends = True  # and not before it is known whether there is a product
    _is_over = False  # as DirectAllGatherGemm's

    def matmul(self, b_kn: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self._is_over = True
        return super().matmul(b_kn, y)

    def received_view(self) -> torch.Tensor:
        if not self._is_over:  # no product (a frozen input): the peers need the blocks all the same
            self._push()
            self._is_over = True
        return super().received_view()


METHODS: dict[str, Callable[..., AllToAllGemm]] = {
    "collective": CollectiveAllToAllGemm,
    "chunked": ChunkedAllToAllGemm,
    "fused": FusedAllToAllGemm,
    "direct": DirectAllToAllGemm,
}


def product_in_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] @ b [K, N] in fp32, whatever their dtype."""
    if a.dtype == torch.float32:
        return a @ b
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    total = a.new_empty(len(a), b.shape[1], dtype=torch.float32)
    return torch.mm(a.float(), b.float(), out=total)  # autocast leaves out= alone


def add_product_in_fp32(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total [M, N] fp32 += a [M, K] @ b [K, N]."""
    if a.dtype != torch.float32 and a.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())
