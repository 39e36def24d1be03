"""Runs the persistent kernels of a plan, of either family, through the launches that their call remembers."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..planning.engine_plan import EnginePlan
from ..planning.schedule.kinds import A2A_GEMM
from ..planning.tiling import HOPPER
from ..protocol.slot import Call
from ..runtime.domain import OverlapDomain
from . import hopper, portable
from .kernel_args import GatherOperands, ScatterOperands

# NCCL on a stream of its own costs 10 microseconds of host time for the events, as long as it takes for 4 MB.
_SHORTEST_ASYNC = 8 << 20


def receive_and_multiply(domain: OverlapDomain, call: Call, plan: EnginePlan, operands: GatherOperands) -> None:
    """Launch the kernel of AG + GEMM or A2A + GEMM that fills `operands.y`."""
    operands = readable(plan, operands)
    own, b_kn, y = operands.own, operands.b_kn, operands.y
    own_at = own.data_ptr()
    block = own[domain.rank] if plan.kind == A2A_GEMM else own
    addresses = (own_at if block is own else block.data_ptr(), own_at, b_kn.data_ptr(), y.data_ptr())
    # The call's launches are of one shape of blocks: with b's shape it gives those of own and y.
    how = (plan.kernels, operands.sends, operands.leaves)
    key = (plan.kind, how, plan.spared_sms, b_kn.shape, b_kn.stride(), _compiled_for(plan, addresses))
    call.launches.run(
        key,
        (*addresses, call.tag.word),
        lambda: _family(plan).gather_launch(domain, call, plan, operands, block),
    )


def readable(plan: EnginePlan, operands: GatherOperands) -> GatherOperands:
    """`operands`, with a copy of own where TMA could not read it: it wants its start aligned."""
    if plan.kernels != HOPPER or operands.own.data_ptr() % 16 == 0:
        return operands
    return replace(operands, own=operands.own.clone(memory_format=torch.contiguous_format))


def multiply_and_send(domain: OverlapDomain, call: Call, plan: EnginePlan, operands: ScatterOperands) -> None:
    """Launch the kernel of GEMM + RS or GEMM + A2A that fills `operands.y`, and `operands.staging` or, where that is None, the
    peers' slots.

    GEMM + RS with `EnginePlan.reduces_later` leaves the own partial there, GEMM + A2A the own block.
    """
    a_mk, b_kn, staging, y = operands.a_mk, operands.b_kn, operands.staging, operands.y
    written = y if staging is None else staging
    addresses = (a_mk.data_ptr(), b_kn.data_ptr(), written.data_ptr(), y.data_ptr())
    layout = (a_mk.stride(), b_kn.shape, b_kn.stride())  # a's shape follows, as above
    how = (plan.kernels, staging is None, plan.reduces_later)
    key = (plan.kind, how, plan.spared_sms, layout, _compiled_for(plan, addresses))
    call.launches.run(
        key,
        (*addresses, call.tag.word),
        lambda: _family(plan).scatter_launch(domain, call, plan, operands),
    )


def multiply_and_push(domain: OverlapDomain, call: Call, plan: EnginePlan, operands: ScatterOperands) -> None:
    """multiply_and_send into `operands.staging`, whose chunks the copy engine pushes as soon as their tiles are counted."""
    assert operands.staging is not None
    routes = call.routes(plan.legs, tiles=tiles_of_chunk(plan, operands.y))
    call.next_epoch()
    domain.engine.launch(lambda: multiply_and_send(domain, call, plan, operands), operands.staging, routes)


def tiles_of_chunk(plan: EnginePlan, y: torch.Tensor) -> int:
    """What a kernel has counted when it has stored a chunk of a block shaped as y."""
    rows, cols = y.shape
    return plan.tile.counted(rows // plan.chunks, cols)


def operand(plan: EnginePlan, a_mk: torch.Tensor) -> torch.Tensor:
    """a_mk, or a copy where TMA could not read it: an expanded gradient, a slice that starts between 16-byte words."""
    if plan.kernels != HOPPER:
        return a_mk
    pitch, step = a_mk.stride()
    nbytes = pitch * a_mk.itemsize
    readable = step == 1 and nbytes > 0 and nbytes % 16 == 0 and a_mk.data_ptr() % 16 == 0
    return a_mk if readable else a_mk.clone(memory_format=torch.contiguous_format)


def should_run_async(whole: torch.Tensor) -> bool:
    """Whether a collective that gathers or scatters `whole` runs beside the caller's stream and not in it."""
    return whole.nbytes > _SHORTEST_ASYNC


def aligned(*addresses: int) -> tuple[bool, ...]:
    """What Triton compiles a kernel for: which pointers are on 16 bytes."""
    return tuple(address % 16 == 0 for address in addresses)


def _compiled_for(plan: EnginePlan, addresses: tuple[int, ...]) -> tuple[bool, ...] | None:
    """Which addresses are aligned, for the key of a launch; None for the Hopper kernels, which take aligned operands only."""
    return None if plan.kernels == HOPPER else aligned(*addresses)


def _family(plan: EnginePlan):  # type: ignore[no-untyped-def]  # a module: mypy has no type for that
    return hopper if plan.kernels == HOPPER else portable
