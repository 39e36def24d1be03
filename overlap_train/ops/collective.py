"""NCCL's, or gloo's, all-gather and reduce-scatter of whole tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions


def all_gather(whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, aside: bool) -> dist.Work | None:
    """own [M/W, K] of every rank -> whole [M, K].

    aside: on a stream of its own; whole is complete after `wait` of what is returned. Else in the caller's.

    As dist.all_gather_into_tensor, which checks in Python what engines know: 2.3 microseconds.
    """
    return _placed(group._allgather_base(whole, own, _options(AllgatherOptions, aside)), aside)


def reduce_scatter(y: torch.Tensor, partials: torch.Tensor, group: dist.ProcessGroup, aside: bool) -> dist.Work | None:
    """partials [M, N] of every rank -> y [M/W, N], the own rows of their sum. Otherwise as all_gather."""
    return _placed(group._reduce_scatter_base(y, partials, _options(ReduceScatterOptions, aside)), aside)


def _placed(work: dist.Work | None, aside: bool) -> dist.Work | None:
    """Backends put what is not aside in order with the caller's stream, or return what to wait for."""
    if not aside and work is not None:
        work.wait()
    return work if aside else None


@functools.cache
def _options(of: type, aside: bool) -> Any:
    options = of()  # a reduction's sums
    options.asyncOp = aside
    return options
