"""NCCL's, or gloo's, all-gather, reduce-scatter and all-reduce of whole tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions

# torch 2.14 has other names, and warns in each call by the older ones.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

# NCCL on a stream of its own costs 10 microseconds of host time for the events, as long as it takes for 4 MB.
_SHORTEST_ASYNC = 8 << 20


def should_run_async(whole: torch.Tensor) -> bool:
    """Whether a collective that gathers or scatters `whole` runs beside the caller's stream and not in it."""
    return whole.nbytes > _SHORTEST_ASYNC


def all_gather(whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """own [M/W, K] of every rank -> whole [M, K], complete after `wait` of what is returned, if that is something.

    As all_gather_single, which checks in Python what engines know: 2.3 microseconds.
    """
    if whole.itemsize == 1:  # backends know no fp8
        whole, own = whole.view(torch.uint8), own.view(torch.uint8)
    return _run(group._allgather_base, AllgatherOptions, whole, own, should_run_async(whole))


def reduce_scatter(y: torch.Tensor, partials: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """partials [M, N] of every rank -> y [M/W, N], the own rows of their sum. Otherwise as all_gather."""
    return _run(group._reduce_scatter_base, ReduceScatterOptions, y, partials, should_run_async(partials))


def all_reduce(y: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """y [M, N] of every rank -> their sum, in place. Otherwise as all_gather."""

    def in_place(y: torch.Tensor, same: torch.Tensor, options: Any) -> Any:
        return group.allreduce([y], options)

    return _run(in_place, AllreduceOptions, y, y, should_run_async(y))


def _run(collective: Any, kind: type, into: torch.Tensor, source: torch.Tensor, aside: bool) -> dist.Work | None:
    """Backends put what is not aside in order with the caller's stream, or return what to wait for."""
    work: dist.Work | None = collective(into, source, _options(kind, aside))
    if not aside and work is not None:
        work.wait()
    return work if aside else None


@functools.cache
def _options(of: type, aside: bool) -> Any:
    options = of()  # a reduction's sums
    options.asyncOp = aside
    return options
