"""The two kernels of the low-latency protocol, as calls (kernels/low_latency.py): gather and reduce-scatter of few rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..gpu.launch import Launch
from ..group.domain import OverlapDomain
from ..group.signals import Tag
from ..group.slots import Call
from ..select.method import flagged_bytes
from .launch import grid_size, on_a_gpu, protocol_arguments

_WARPS = 4
_PART = 1024  # words that a CTA sends or waits for at once: eight a thread, each 32 of which leave as one packet of 256 bytes
_TOLD = ("rank", "signals_ptr", "epoch_ptr", "outgoing_at_ptr", "left_ptr", "abort_ptr", "record_ptr", "tag", "limit")


def gather(domain: OverlapDomain, tag: Tag, own: torch.Tensor, sm_margin: int) -> torch.Tensor:
    """own [M/W, K] of every rank -> [M, K]. sm_margin: left to what another group sends meanwhile."""
    gathered = own.new_empty(domain.world_size * own.shape[0], own.shape[1])
    call = domain.workspace.open(own.shape, own.dtype, tag)
    own_at, gathered_at = own.data_ptr(), gathered.data_ptr()
    unit = _unit(own.nbytes, own_at, gathered_at)
    launch = partial(_gather_launch, domain, call, own, gathered, unit, sm_margin)
    call.launches.run(("low latency gather", unit, sm_margin), (own_at, gathered_at, tag.word), launch)
    return gathered


def scatter(domain: OverlapDomain, tag: Tag, partials: torch.Tensor, sm_margin: int) -> torch.Tensor:
    """partials [M, N] of every rank -> y [M/W, N], the own rows of their sum in fp32: own first, then in rank order. sm_margin:
    see gather."""
    y = partials.new_empty(partials.shape[0] // domain.world_size, partials.shape[1])
    call = domain.workspace.open(y.shape, y.dtype, tag)
    partials_at, y_at = partials.data_ptr(), y.data_ptr()
    unit = _unit(y.nbytes, partials_at, y_at)
    launch = partial(_scatter_launch, domain, call, partials, y, unit, sm_margin)
    call.launches.run(("low latency scatter", unit, sm_margin), (partials_at, y_at, tag.word), launch)
    return y


def _unit(block_bytes: int, first_at: int, second_at: int) -> torch.dtype:
    """What the kernels load and store at once: 4 bytes, or 2 where some block of 16-bit numbers does not begin on 4."""
    return torch.int32 if (block_bytes | first_at | second_at) % 4 == 0 else torch.int16


def _gather_launch(
    domain: OverlapDomain, call: Call, own: torch.Tensor, gathered: torch.Tensor, unit: torch.dtype, sm_margin: int
) -> Launch:
    from ..kernels.low_latency import low_latency_gather_kernel

    arguments = dict(own_ptr=own.view(-1).view(unit), gathered_ptr=gathered.view(-1).view(unit))
    return _launch(low_latency_gather_kernel, domain, call, arguments, own.nbytes, sm_margin)


def _scatter_launch(
    domain: OverlapDomain, call: Call, partials: torch.Tensor, y: torch.Tensor, unit: torch.dtype, sm_margin: int
) -> Launch:
    import triton.language as tl

    from ..kernels.low_latency import low_latency_scatter_kernel

    kinds = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    arguments = dict(partial_ptr=partials.view(-1).view(unit), y_ptr=y.view(-1).view(unit))
    return _launch(low_latency_scatter_kernel, domain, call, arguments, y.nbytes, sm_margin, DTYPE=kinds[y.dtype])


def _launch(
    kernel: Any, domain: OverlapDomain, call: Call, tensors: dict[str, torch.Tensor], block_bytes: int, sm_margin: int,
    **constants: Any,
) -> Launch:  # fmt: skip
    """The Launch of a kernel of the low-latency protocol. tensors: two, by name, which are replaced from call to call.
    block_bytes: of one rank's block."""
    unit, blocks = next(iter(tensors.values())).element_size(), call.slot.flagged.nbytes
    assert flagged_bytes(block_bytes * domain.world_size, domain.world_size) <= blocks, (
        "its plan has asked for that memory"
    )
    protocol = protocol_arguments(domain, call, direct=True)
    arguments = tensors | dict(
        words_ptr=call.slot.flagged, words_at_ptr=call.slot.flagged_at, size=block_bytes // unit,
        sent_ptr=call.slot.direct_counters.sent, **{name: protocol[name] for name in _TOLD},
    )  # fmt: skip
    constants = constants | dict(
        WORLD=domain.world_size, PER_WORD=4 // unit, BLOCK=_PART, TIMED=on_a_gpu(domain), num_warps=_WARPS
    )
    parts = -(-block_bytes // (4 * _PART)) * max(1, domain.world_size - 1)
    grid = grid_size(parts, domain.device, sm_margin)  # a CTA for each part that is waited for
    return Launch(kernel, grid, arguments, constants, (*((name,) for name in tensors), ("tag",)))
