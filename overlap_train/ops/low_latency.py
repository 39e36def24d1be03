"""Few rows are gathered, scattered or all-reduced by one kernel, beside library GEMMs: by words that carry their flag
(kernels/low_latency.py), longer all-reduces by stores and signals (kernels/all_reduce.py)."""

from __future__ import annotations

from typing import Any

import torch

from ..gpu.launch import Launch
from ..group.domain import OverlapDomain
from ..group.signals import Tag
from ..group.slots import Call
from ..select.method import TWO_SHOTS, WORDS, flagged_bytes, share_bytes
from .launch import aligned, bias_argument, grid_size, protocol_arguments

_WARPS = 4
_PART = 1024  # words that a CTA sends or waits for at once: eight a thread, each 32 of which leave as one packet of 256 bytes
# Elements that a CTA stores, or adds up, at once; its warps; CTAs of an SM, of which one stores while the other signals: 8 MiB
# take 37 us on two H200, by one CTA of 16 warps 42, as words 70.
_STORED, _STORING_WARPS, _STORING_CTAS = 8192, 8, 2
_TOLD = ("rank", "signals_ptr", "epoch_ptr", "outgoing_at_ptr", "left_ptr", "abort_ptr", "record_ptr", "tag", "limit")


def gather(domain: OverlapDomain, tag: Tag, own: torch.Tensor, sm_margin: int) -> torch.Tensor:
    """own [M/W, K] of every rank -> [M, K]. sm_margin: left to what another group sends meanwhile."""
    gathered = own.new_empty(domain.world_size * own.shape[0], own.shape[1])
    _run("gather", domain, tag, own, own, gathered, sm_margin)
    return gathered


def scatter(
    domain: OverlapDomain, tag: Tag, partials: torch.Tensor, sm_margin: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """partials [M, N] of every rank -> y [M/W, N], the own rows of their sum in fp32: own first, then in rank order, then bias
    [N]. sm_margin: see gather."""
    y = partials.new_empty(partials.shape[0] // domain.world_size, partials.shape[1])
    _run("scatter", domain, tag, y, partials, y, sm_margin, bias)
    return y


def all_reduce(
    domain: OverlapDomain, tag: Tag, partial: torch.Tensor, shots: str, sm_margin: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """partial [M, N] of every rank -> y [M, N], their sum in fp32, in rank order, then bias [N]: the same bits on every rank.
    shots: see select/method.py. sm_margin: see gather."""
    y = torch.empty_like(partial)  # new_empty takes 2 microseconds more
    if shots == WORDS:
        _run("all_reduce", domain, tag, partial, partial, y, sm_margin, bias)
        return y
    elements, shape = partial.numel(), partial.shape  # of a block
    if shots == TWO_SHOTS:  # which has a block of partials, and one of sums
        elements = share_bytes(partial.nbytes, domain.world_size) // partial.itemsize
        shape = torch.Size((2, elements))
    # The interpreter takes long for each piece.
    piece = _STORED if domain.on_gpu else 1 << max(4, (elements // 32).bit_length())
    call = domain.workspace.open(shape, partial.dtype, tag)
    values = (partial.data_ptr(), y.data_ptr(), 0 if bias is None else bias.data_ptr())
    key = (shots, partial.shape, sm_margin, bias is None, aligned(*values))
    told = (shots, domain, call, partial, y, sm_margin, bias, piece, -(-elements // piece))
    call.launches.run(key, (*values, tag.word), _storing_launch, *told)
    return y


def _storing_launch(
    shots: str, domain: OverlapDomain, call: Call, partial: torch.Tensor, y: torch.Tensor, sm_margin: int,
    bias: torch.Tensor | None, piece: int, pieces: int,
) -> Launch:  # fmt: skip
    """piece: elements. pieces: of a block."""
    from ..kernels import all_reduce as kernels

    protocol = protocol_arguments(domain, call, direct=True)
    arguments: dict[str, Any] = dict(
        partial_ptr=partial, bias_ptr=bias, y_ptr=y, blocks_ptr=call.blocks, memory_at_ptr=call.slot.memory_at,
        size=partial.numel(), n=partial.shape[1], sent_ptr=call.slot.direct_counters.sent,
        **{name: protocol[name] for name in (*_TOLD, "complete_ptr")},
    )  # fmt: skip
    kernel, programs = kernels.all_reduce_kernel, pieces
    if shots == TWO_SHOTS:
        kernel, programs = kernels.two_shot_all_reduce_kernel, pieces * max(1, domain.world_size - 1)
        arguments |= dict(share=call.blocks[0, 0].numel(), counter_ptr=protocol["counter_ptr"])
    constants = dict(WORLD=domain.world_size, BLOCK=piece, TIMED=domain.on_gpu, num_warps=_STORING_WARPS)
    replaced = (("partial_ptr",), ("y_ptr",), bias_argument(bias), ("tag",))
    grid = grid_size(programs, domain.device, sm_margin, 1 if sm_margin else _STORING_CTAS)  # several would spare no SM
    return Launch(kernel, grid, arguments, constants, replaced)


def _run(
    what: str, domain: OverlapDomain, tag: Tag, block: torch.Tensor, source: torch.Tensor, result: torch.Tensor,
    sm_margin: int, bias: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Launch a kernel that fills `result`. block: shaped as those that ranks send."""
    call = domain.workspace.open(block.shape, block.dtype, tag)
    source_at, result_at = source.data_ptr(), result.data_ptr()
    # What the kernels load and store at once: 4 bytes, or 2 where some block of 16-bit numbers does not begin on 4.
    unit = torch.int32 if (block.nbytes | source_at | result_at) % 4 == 0 else torch.int16
    told = (what, domain, call, block.nbytes, source, result, unit, sm_margin, bias)
    values = (source_at, result_at, 0 if bias is None else bias.data_ptr(), tag.word)
    call.launches.run((what, unit, sm_margin, bias is None), values, _launch, *told)


def _launch(
    what: str, domain: OverlapDomain, call: Call, block_bytes: int, source: torch.Tensor, result: torch.Tensor,
    unit: torch.dtype, sm_margin: int, bias: torch.Tensor | None,
) -> Launch:  # fmt: skip
    """The Launch of a kernel of the low-latency protocol. block_bytes: of one rank's block."""
    import triton.language as tl

    from ..kernels import low_latency as kernels

    kernel, parts = getattr(kernels, f"low_latency_{what}_kernel"), -(-block_bytes // (4 * _PART))
    if what == "gather":
        names, added, constants = ("own_ptr", "gathered_ptr"), dict[str, Any](), dict[str, Any]()
    else:
        dtypes = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
        names, constants = ("partial_ptr", "y_ptr"), {"DTYPE": dtypes[result.dtype]}
        added = dict(bias_ptr=bias, n=result.shape[1])
    needed = flagged_bytes(block_bytes * domain.world_size, domain.world_size)
    assert needed <= call.slot.flagged.nbytes, "its plan has asked for that memory"
    protocol = protocol_arguments(domain, call, direct=True)
    tensors = {name: tensor.view(-1).view(unit) for name, tensor in zip(names, (source, result), strict=True)}
    arguments = tensors | added | dict(
        words_ptr=call.slot.flagged, words_at_ptr=call.slot.flagged_at, size=block_bytes // unit.itemsize,
        sent_ptr=call.slot.direct_counters.sent, **{name: protocol[name] for name in _TOLD},
    )  # fmt: skip
    constants |= dict(
        WORLD=domain.world_size, PER_WORD=4 // unit.itemsize, BLOCK=_PART, TIMED=domain.on_gpu, num_warps=_WARPS
    )
    # A CTA for each part that is sent, or waited for, at once: by an all-reduce to and from all peers together.
    at_once = parts if what == "all_reduce" else parts * max(1, domain.world_size - 1)
    grid = grid_size(at_once, domain.device, sm_margin)
    return Launch(kernel, grid, arguments, constants, (*((name,) for name in names), bias_argument(bias), ("tag",)))
