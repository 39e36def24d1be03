"""What every persistent kernel is told about the protocol, whichever family it is of."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from ..planning.engine_plan import EnginePlan
from ..planning.schedule.kinds import GEMM_A2A
from ..protocol.slot import Call
from ..runtime.domain import OverlapDomain

# A poll in Triton's interpreter takes about 0.1 ms, and the interpreter has no clock: its time-out is a number of polls.
_INTERPRETER_POLLS_PER_SECOND = 10_000


@dataclass(slots=True)  # made at each call: frozen it would take 0.4 microseconds more
class GatherOperands:
    """What a product of what arrives is made of.

    sends: the kernel stores own at the peers. leaves: it multiplies the chunks that are counted so far; the next launch goes on
    from there (kernels/arrivals.py).

    AG + GEMM    own [M/W, K]        y [M, N] = own and the peers' shards @ b_kn [K, N]
    A2A + GEMM   own [W, M/W, K/W]   y [M/W, N] = own and the peers' blocks, side by side, @ b_kn [K, N]

    Blocks of own may lie apart where the kernel reads its own one alone: Hopper's, where it sends nothing.
    """

    own: torch.Tensor
    b_kn: torch.Tensor
    y: torch.Tensor
    sends: bool
    leaves: bool = False


@dataclass(slots=True)
class ScatterOperands:
    """What a product that leaves is made of.

    GEMM + RS    y [M/W, N] from a_mk [M, K] @ b_kn [K, N] and what the peers send
    GEMM + A2A   y [M/W, N/W], the own block of a_mk [M/W, K] @ b_kn [K, N]

    staging: [W, *y.shape], where what the peers get is written; None: at the peers.
    """

    a_mk: torch.Tensor
    b_kn: torch.Tensor
    staging: torch.Tensor | None
    y: torch.Tensor


@dataclass(frozen=True)
class KernelArguments:
    """What all kernels are told by the same name."""

    arguments: dict[str, Any]
    constants: dict[str, Any]


def on_a_gpu(domain: OverlapDomain) -> bool:
    """Whether kernels are compiled for a GPU, and not run by the interpreter, which has no clock and takes small pieces."""
    return domain.device.type == "cuda"


def protocol_arguments(domain: OverlapDomain, call: Call, direct: bool) -> KernelArguments:
    """The arguments and constants that tell a kernel of one call the protocol: rank, signals, epoch, counters, time limit, tag.
    direct: the kernel stores at the peers itself, and advances the epoch."""
    counters = call.slot.direct_counters if direct else call.slot.counters
    timeout_s, on_gpu = domain.config.timeout_s, on_a_gpu(domain)
    arguments = dict(
        rank=domain.rank, signals_ptr=call.slot.signals, epoch_ptr=call.slot.epoch, outgoing_at_ptr=call.slot.outgoing_at,
        counter_ptr=counters.claimed, complete_ptr=counters.complete, left_ptr=counters.left,
        abort_ptr=domain.fault.abort, record_ptr=domain.fault.record, tag=call.tag.word,
        limit=int(timeout_s * (1e9 if on_gpu else _INTERPRETER_POLLS_PER_SECOND)),
    )  # fmt: skip
    return KernelArguments(arguments, dict(WORLD=domain.world_size, LOCAL=domain.topology.local, CHUNKS=call.chunks))


def receiving_arguments(domain: OverlapDomain, call: Call, operands: GatherOperands) -> KernelArguments:
    """What a kernel that multiplies what arrives is told besides: whether it leaves, and whether it stores the own rows at the
    peers, and in which pieces.

    A chunk must have fewer than 2^31 elements, 4 GiB in bf16.

    PIECE: elements that are claimed and counted at once: 32 KB in bf16, which take a CTA a few microseconds; two or more of a
    chunk in the tests.
    """
    slot = call.slot
    arguments = dict(
        sent_ptr=slot.direct_counters.sent, memory_at_ptr=slot.memory_at, leaves=int(operands.leaves),
        here_ptr=slot.counters.here,
    )  # fmt: skip
    return KernelArguments(arguments, dict(DIRECT=operands.sends, PIECE=16384 if on_a_gpu(domain) else 64))


def sending_constants(plan: EnginePlan, direct: bool) -> dict[str, Any]:
    """Which form of the kernel that multiplies and sends a plan takes. direct: it stores at the peers itself."""
    exchange = plan.kind == GEMM_A2A
    return dict(DIRECT=direct, REDUCE=not exchange and not plan.reduces_later, EXCHANGE=exchange)


def grid_size(programs: int, device: torch.device, spared_sms: int) -> tuple[int]:
    """One CTA per SM but those that are spared, or per program if there are fewer, and at least one. One in the interpreter,
    which runs them in turn."""
    if device.type != "cuda":
        return (1,)
    return (max(1, min(programs, multiprocessors(device) - spared_sms)),)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU; 132 on H100 and H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count
