"""GEMM + ReduceScatter: y_shard_m [M/W, N] = this rank's rows of the sum over ranks of a_mk [M, K/W] @ b_kn [K/W, N].

The GEMM computes the peers' rows first and its own last (schedule/ has the order). A destination's rows leave as soon as they
are complete. The own rows then add the partials that have arrived, and the bias, if there is one, in fp32 and in a fixed order:
the same bits on every run. The last tiles of a persistent kernel do that, or a kernel of its own in `finish` (chunked, and
fused with `Variant.split_reduction`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..gpu.launch import Launch
from ..group.domain import OverlapDomain
from ..group.signals import Tag
from ..group.slots import Call
from . import collective as collectives
from . import launch, low_latency
from .launch import aligned, bias_argument
from .product import BlockMatrix, Right, product

if TYPE_CHECKING:
    from .plan import EnginePlan


class GemmReduceScatter(ABC):
    """y_shard_m [M/W, N] on its way: made, it has started GEMM and sends; across nodes some sends may start in `finish`."""

    @abstractmethod
    def finish(self) -> torch.Tensor:
        """Wait for the peers' partials; y_shard_m, complete."""


class CollectiveGemmReduceScatter(GemmReduceScatter):
    """One GEMM, then NCCL or gloo; a long one (`should_run_async`) runs beside what the caller does before `finish`."""

    def __init__(
        self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, a_mk: torch.Tensor, b_kn: Right,
        bias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        domain.collective_calls.enter(tag)
        self._partial, self._bias = product(None, a_mk, b_kn), bias
        self._y = self._partial.new_empty(a_mk.shape[0] // domain.world_size, b_kn.shape[1])
        self._work = collectives.reduce_scatter(self._y, self._partial, domain.group)

    def finish(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
        return self._y if self._bias is None else self._y.add_(self._bias)


class ChunkedGemmReduceScatter(GemmReduceScatter):
    """A library GEMM for each destination's rows, pushed as it ends; the reduction is a pass of its own."""

    def __init__(
        self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, a_mk: torch.Tensor, b_kn: Right,
        bias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._domain, self._plan, self._tag, self._a, self._b, self._bias = domain, plan, tag, a_mk, b_kn, bias
        self._start()

    def _start(self) -> None:
        domain, world, (m, k) = self._domain, self._domain.world_size, self._a.shape
        dtype = self._plan.dtype
        self._partials = self._a.new_empty(world, m // world, self._b.shape[1], dtype=dtype)  # block d: rows of rank d
        self._call = domain.workspace.open(self._partials.shape[1:], dtype, self._tag)
        self._call.next_epoch()
        multiply = torch.mm if isinstance(self._b, torch.Tensor) else partial(product, None)
        rows = self._a.view(world, m // world, k)  # strided or expanded, too; unflatten takes 2 us more
        for target, transfers in self._plan.transfers.by_target:
            multiply(rows[target], self._right(target), out=self._partials[target])
            domain.engine.push(self._partials, self._call.routes(transfers))
        multiply(rows[domain.rank], self._right(domain.rank), out=self._partials[domain.rank])

    def _right(self, target: int) -> Any:
        return self._b.of_rank(target) if isinstance(self._b, BlockMatrix) else self._b

    def finish(self) -> torch.Tensor:
        return reduce_partials(self._domain, self._call, self._partials[self._domain.rank], self._bias)


class FusedGemmReduceScatter(ChunkedGemmReduceScatter):
    """One persistent kernel. A counter per destination and chunk releases its push by the copy engine."""

    def _start(self) -> None:
        self._open()
        staging = self._y.new_empty(self._domain.world_size, *self._y.shape)
        launch.multiply_and_push(self._domain, self._call, self._plan, self._a, self._b, staging, self._y, self._bias)

    def _open(self) -> None:
        shape, dtype = (self._a.shape[0] // self._domain.world_size, self._b.shape[1]), self._plan.dtype
        self._y = self._a.new_empty(shape, dtype=dtype)  # perhaps a partial
        self._call = self._domain.workspace.open(self._y.shape, dtype, self._tag, self._plan.chunks)

    def finish(self) -> torch.Tensor:
        if self._plan.reduces_later:
            return reduce_partials(self._domain, self._call, self._y, self._bias)
        return self._y


class DirectGemmReduceScatter(FusedGemmReduceScatter):
    """The epilogue stores tiles at the peers and sends the signals: nothing is staged or pushed, which takes no host time."""

    def _start(self) -> None:
        self._open()
        launch.multiply_and_send(self._domain, self._call, self._plan, self._a, self._b, None, self._y, self._bias)


class LowLatencyGemmReduceScatter(ChunkedGemmReduceScatter):
    """One library GEMM; then, after what the caller does meanwhile, one kernel that sends and adds."""

    def _start(self) -> None:
        self._partial = product(None, self._a, self._b)

    def finish(self) -> torch.Tensor:
        return low_latency.scatter(self._domain, self._tag, self._partial, self._plan.sm_margin, self._bias)


METHODS: dict[str, Callable[..., GemmReduceScatter]] = {
    "collective": CollectiveGemmReduceScatter,
    "chunked": ChunkedGemmReduceScatter,
    "fused": FusedGemmReduceScatter,
    "direct": DirectGemmReduceScatter,
    "low_latency": LowLatencyGemmReduceScatter,
}


def reduce_partials(
    domain: OverlapDomain, call: Call, own: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """own [M/W, N] + what the peers send [W, M/W, N] in rank order, the own block left out, + bias [N], summed in fp32 -> own's
    dtype."""
    call.wait_for_all()
    if domain.on_gpu:
        y = torch.empty_like(own)
        values = (own.data_ptr(), y.data_ptr(), 0 if bias is None else bias.data_ptr())
        key = ("reduce", aligned(*values), bias is None)
        call.launches.run(key, values, _reduce_launch, domain, call, own, y, bias)
        return y
    total = own.to(torch.float32, copy=True)  # not a view, which autograd would refuse to have written into
    for source in range(call.world_size):
        if source != call.rank:
            total = total + call.blocks[source]
    return (total if bias is None else total + bias).to(own.dtype)


def _reduce_launch(
    domain: OverlapDomain, call: Call, own: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None
) -> Launch:
    from ..kernels.gemm_reduce_scatter import reduce_partials_kernel

    block = 1024
    arguments = dict(
        own_ptr=own, received_ptr=call.blocks, bias_ptr=bias, y_ptr=y, size=own.numel(), n=own.shape[1], rank=call.rank,
        abort_ptr=domain.fault.abort,
    )  # fmt: skip
    constants = dict(WORLD=call.world_size, BLOCK=block)
    grid = (-(-own.numel() // block),)
    return Launch(reduce_partials_kernel, grid, arguments, constants, (("own_ptr",), ("y_ptr",), bias_argument(bias)))
