"""AllGather + GEMM: y [M, N] = all_gather(x_shard_m [M/W, K]) @ b_kn [K, N] + bias [N], if there is one: rounded once.

Each rank sends its shard from the caller's tensor into every peer's slot, with a signal after each chunk: by the copy engine, or
(direct) by stores of the GEMM's own kernel. The GEMM walks the shards in the order in which they arrive, its own first, and waits
for each (schedule/ has the orders).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..group.domain import OverlapDomain
from ..group.signals import Tag
from . import collective as collectives
from . import launch, low_latency
from .product import Right, product

if TYPE_CHECKING:
    from .plan import EnginePlan


class AllGatherGemm:
    """x [M, K] on its way: row block s comes from rank s."""

    def matmul(self, b_kn: Right, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, K] @ b_kn [K, N] + bias [N] -> [M, N]; called once."""
        return product(bias, self.gathered_view(), b_kn)

    def keep_own(self, beside: EnginePlan) -> None:
        """Start to copy this rank's shard to its place among the others, which gathered_view wants, if the kernel of the plan
        `beside`, which was launched last, hides that. Not here: who has gathered x by itself has done so."""

    def gathered_view(self) -> torch.Tensor:
        """x [M, K], complete; valid until the operator ends (the slot is then free for others)."""
        raise NotImplementedError

    def gathered_copy(self) -> torch.Tensor:
        """x [M, K], complete, in memory of its own."""
        return self.gathered_view()

    def gathered(self, stays: bool) -> torch.Tensor:
        """x [M, K], complete; stays: longer than the operator."""
        return self.gathered_copy() if stays else self.gathered_view()


class CollectiveAllGatherGemm(AllGatherGemm):
    """NCCL or gloo, then one GEMM: nothing overlaps inside the operator."""

    def __init__(self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, x_shard_m: torch.Tensor) -> None:
        self._x = x_shard_m.new_empty(x_shard_m.shape[0] * domain.world_size, x_shard_m.shape[1])
        domain.collective_calls.enter(tag)
        self._work = collectives.all_gather(self._x, x_shard_m.contiguous(), domain.group)

    def gathered_view(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
        return self._x


class ChunkedAllGatherGemm(AllGatherGemm):
    """Library GEMMs on shards, each after a wait for its shard."""

    _sends = False  # whether a kernel stores the own rows at the peers, and no copy
    _arrived = False  # whether all blocks have been waited for
    _keeps = False  # whether the own shard is on its way into the slot

    def __init__(self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, x_shard_m: torch.Tensor) -> None:
        self._domain, self._plan, self._tag, self._own = domain, plan, tag, x_shard_m.contiguous()
        self._call = domain.workspace.open(x_shard_m.shape, x_shard_m.dtype, tag, plan.chunks)
        if not self._sends:
            self._push()

    def _push(self) -> None:
        self._call.next_epoch()
        self._domain.engine.push(self._own, self._call.routes(self._plan.transfers))

    def matmul(self, b_kn: Right, bias: torch.Tensor | None = None) -> torch.Tensor:
        # Returned whole and not as a view: callers may write into the result (Megatron's cross entropy does), which autograd
        # refuses for views that were made inside an autograd function.
        world, m_shard, n = self._domain.world_size, self._own.shape[0], b_kn.shape[1]
        y = self._own.new_empty(world * m_shard, n, dtype=self._plan.dtype)
        blocks = y.view(world, m_shard, n)  # unflatten takes 2 us more
        multiply = torch.mm if bias is None and isinstance(b_kn, torch.Tensor) else partial(product, bias)
        multiply(self._own, b_kn, out=blocks[self._domain.rank])
        for source in self._plan.sources:
            self._call.wait(source)
            multiply(self._call.blocks[source], b_kn, out=blocks[source])
        self._arrived = True
        return y

    def keep_own(self, beside: EnginePlan) -> None:
        self._keeps = beside.hides_copies
        if self._keeps:
            self._domain.engine.keep(self._own, self._call.own_block)

    def gathered_view(self) -> torch.Tensor:
        if self._arrived:
            self._call.keep(self._own)
        elif self._keeps:
            # The product has waited for the same rows, so this finds them here. It lets a wait that failed show in dw: it writes
            # NaN into a peer's block, which the copy leaves alone. Behind the copy, which ends last, it would cost 4 to 5 us.
            self._call.wait_for_all()
            self._domain.engine.wait_kept()
        else:
            self._call.receive(self._own)
        return self._call.gathered

    def gathered_copy(self) -> torch.Tensor:
        return self.gathered_view().clone()


class FusedAllGatherGemm(ChunkedAllGatherGemm):
    """One persistent kernel whose tiles wait for their chunk."""

    def matmul(self, b_kn: Right, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = self._own.shape[0] * self._domain.world_size
        y = self._own.new_empty(rows, b_kn.shape[1], dtype=self._plan.dtype)
        # _arrived stays False: gathered_view, which the weight gradient calls later, waits once more. That takes 3 us if all
        # waits of this kernel were met. If one failed, the second wait fails at once and writes NaN into x: dw then shows it.
        self._multiply(b_kn, y, bias)
        return y

    def _multiply(self, b_kn: Right, y: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Fill y."""
        launch.receive_and_multiply(self._domain, self._call, self._plan, self._own, b_kn, y, bias)


class DirectAllGatherGemm(FusedAllGatherGemm):
    """The FusedAllGatherGemm whose kernel also sends the own rows to the peers: there are no copies, and no host time for
    them."""

    _sends = True  # and not before it is known whether there is a product
    _is_over = False  # whether the kernel has run, or copies have sent what it would have

    def matmul(self, b_kn: Right, bias: torch.Tensor | None = None) -> torch.Tensor:
        self._is_over = True
        return super().matmul(b_kn, bias)

    def gathered_view(self) -> torch.Tensor:
        if not self._is_over:  # no product (a frozen input): the peers need the rows all the same
            self._push()
            self._is_over = True
        return super().gathered_view()


class LowLatencyAllGatherGemm(AllGatherGemm):
    """One kernel sends the own rows, and writes them and what arrives into one tensor [M, K]; then one library GEMM."""

    def __init__(self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, x_shard_m: torch.Tensor) -> None:
        self._x = low_latency.gather(domain, tag, x_shard_m.contiguous(), plan.sm_margin)

    def gathered_view(self) -> torch.Tensor:
        return self._x


METHODS: dict[str, Callable[..., AllGatherGemm]] = {
    "collective": CollectiveAllGatherGemm,
    "chunked": ChunkedAllGatherGemm,
    "fused": FusedAllGatherGemm,
    "direct": DirectAllGatherGemm,
    "low_latency": LowLatencyAllGatherGemm,
}
