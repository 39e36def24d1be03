"""Puts together what each rank has a part of. torch.distributed would wait without naming anybody; here the wait is bounded."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from overlap_train import OverlapTimeoutError
from overlap_train.group.signals import poll
from overlap_train.integrations.megatron.linears.exchange import Exchange
from overlap_train.warn import warn_user


@torch.no_grad()
def gathered(x: torch.Tensor, dim: int, exchange: Exchange, timeout_s: float) -> torch.Tensor:
    """The parts of all ranks along `dim`, in the order of the sequence.

    Raises:
        OverlapTimeoutError: they were not here within timeout_s. While a CUDA graph is captured nothing waits.
    """
    part = x.movedim(dim, 0).contiguous()
    sent = part.view(torch.uint8) if part.dtype == torch.bool else part
    whole = torch.empty(exchange.ranks * len(sent), *sent.shape[1:], dtype=sent.dtype, device=sent.device)
    assert exchange.group is not None
    if sent.is_cuda and torch.cuda.is_current_stream_capturing():
        dist.all_gather_into_tensor(whole, sent, group=exchange.group)
    else:
        _gather_in_time(whole, sent, exchange.group, timeout_s)
    return whole.index_select(0, exchange.places).view(part.dtype).movedim(0, dim)


def _gather_in_time(whole: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup, timeout_s: float) -> None:
    """Gather, or give up. The host waits, because nothing else can give up on a collective of torch's: for frequencies once for
    each new length, for a mask in each micro-batch that brings one."""
    if sent.is_cuda:
        torch.cuda.current_stream().synchronize()  # what comes before is not this wait's
    work = dist.all_gather_into_tensor(whole, sent, group=group, async_op=True)
    late = partial(_say_late, group, timeout_s)
    if not poll(work.is_completed, timeout_s, late=late):
        raise OverlapTimeoutError(
            f"Ulysses attention: rank {dist.get_rank()} waited {timeout_s:g} s for the rotary frequencies or the mask of ranks "
            f"{_ranks(group)} of the job. One of them is dead, stopped, or in another call; if it is only slow, raise timeout_s "
            f"(--overlap-train-timeout-s)."
        )
    work.wait()


def _say_late(group: dist.ProcessGroup, timeout_s: float) -> None:
    warn_user(
        f"Ulysses attention: rank {dist.get_rank()} has waited {timeout_s / 10:.3g} s for the rotary frequencies or the mask of "
        f"ranks {_ranks(group)} of the job; it gives up after timeout_s={timeout_s:g}"
    )


def _ranks(group: dist.ProcessGroup) -> str:
    return ", ".join(map(str, dist.get_process_group_ranks(group)))
