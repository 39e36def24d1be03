"""How the persistent kernels are cut into tiles and chunks, and what every kernel is told about the protocol."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from ..domain import OverlapDomain
from ..protocol.slot import Call

# A poll in Triton's interpreter takes about 0.1 ms, and the interpreter has no clock: its time-out is a number of polls.
_INTERPRETER_POLLS_PER_SECOND = 10_000
# A push takes the copy engine about 5 microseconds beside the copy itself, in which it would move 2 MB. Chunks shorten the end:
# of a gather the last GEMM, of a scatter what the own rows wait for. AG + GEMM of 8192 x 14336 x 4096 reached 0.95 of its bound
# with 8 MiB and 0.93 with 16 (4 x H200); where copies outweigh the GEMM 16 are 9 % faster (choice.py: blocks are sent whole).
_SHORTEST_COPY = 8 << 20
# A chunk that kernels store themselves costs no host time, but its rows read all of b: 8 rows of tiles share that in L2. A gather
# of 8192 x 14336 x 4096 took 0.672 ms so and 0.689 with chunks half as long (2 x H200).
_SHORTEST_STORED = 1024
# NCCL on a stream of its own costs 10 microseconds of host time for the events, as long as it takes for 4 MB.
_SHORTEST_ASIDE = 8 << 20
# Tiles of every kernel are at most this tall, so that chunks of whole multiples hold whole tiles.
_TALLEST_TILE = 128


@functools.cache
def chunk_count(m_shard: int, row_bytes: int, device: torch.device) -> int:
    """Into how many equal chunks a fused operator cuts each block of m_shard rows: the more, the shorter the exposed tail.

    On GPUs 1, 2 or 4, of whole tiles, none shorter than _SHORTEST_COPY; on the CPU 2 where the rows are even.
    """
    if device.type != "cuda":
        return 2 if m_shard % 2 == 0 else 1
    fits = [c for c in (1, 2, 4) if m_shard % (c * _TALLEST_TILE) == 0 and m_shard * row_bytes >= c * _SHORTEST_COPY]
    return max(fits, default=1)


@functools.cache
def stored_chunk_count(m_shard: int, device: torch.device) -> int:
    """As chunk_count, for chunks that a kernel stores at the peers and signals itself."""
    if device.type != "cuda":
        return 2 if m_shard % 2 == 0 else 1
    fits = [c for c in (1, 2, 4, 8) if m_shard % (c * _TALLEST_TILE) == 0 and m_shard >= c * _SHORTEST_STORED]
    return max(fits, default=1)


def worth_a_stream(whole: torch.Tensor) -> bool:
    """Whether a collective that gathers or scatters `whole` shall run beside the caller's stream and not in it."""
    return whole.nbytes > _SHORTEST_ASIDE


@dataclass(frozen=True)
class Words:
    """What all kernels are told by the same name about the protocol."""

    arguments: dict[str, Any]
    constants: dict[str, Any]


def protocol_arguments(domain: OverlapDomain, call: Call, stores: bool) -> Words:
    """Of one call. stores: the kernel stores at the peers itself, and counts the epoch."""
    counters = call.slot.direct_counters if stores else call.slot.counters
    timeout_s, on_gpu = domain.config.timeout_s, domain.device.type == "cuda"
    arguments = dict(
        rank=domain.rank, signals_ptr=call.slot.signals, epoch_ptr=call.slot.epoch, outgoing_at_ptr=call.slot.outgoing_at,
        counter_ptr=counters.claimed, complete_ptr=counters.complete, left_ptr=counters.left,
        abort_ptr=domain.fault.abort, record_ptr=domain.fault.record, tag=domain.fault.tag(call.waiting(domain.rank)),
        limit=int(timeout_s * (1e9 if on_gpu else _INTERPRETER_POLLS_PER_SECOND)),
    )  # fmt: skip
    return Words(arguments, dict(WORLD=domain.world_size, CHUNKS=call.chunks))


def sending(domain: OverlapDomain, call: Call, sends: bool) -> Words:
    """What a gathering kernel is told besides: whether it sends the own rows, that is, stores them at the peers, and how.

    A chunk must have fewer than 2^31 elements, 4 GiB in bf16.

    PIECE: elements that are claimed and counted at once: 32 KB in bf16, which take a CTA a few microseconds; two or more of a
    chunk in the tests.
    """
    arguments = dict(sent_ptr=call.slot.direct_counters.sent, memory_at_ptr=call.slot.memory_at)
    return Words(arguments, dict(DIRECT=sends, PIECE=16384 if domain.device.type == "cuda" else 64))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU; 132 on H100 and H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count
