"""What a pass takes by a method on a system, in closed form: GEMMs in waves of tiles, copies, launches.

A pass inside a node that overlaps takes the longest of these, where G is the GEMM, C what is sent, W the ranks, N the chunks
of a block:

    G                             the GEMM
    C/(W - 1)/N + (1 - 1/W) G     arriving: own rows take G/W, the others follow the first chunk; leaving: own rows come last
    C + G/W/N                     the last chunk is multiplied when it is there; or the first one, and then all are sent
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

import torch

from .method import ONE_SHOT, TWO_SHOTS, WORDS, Method, Pass
from .system import System
from .tiles import HOPPER_TILE, chunks_of, count_waves, on_hopper

_LIBRARY_TILES = ((128, 256, 1.0), (128, 192, 0.95), (128, 128, 0.88))  # rows, columns, and their speed
# More than two measurements of one thing differ by in a burst (SAME), since in a layer the order may change.
NOISE = 0.05
_BURST_US = 60.0  # that a GEMM saves before its clock falls
_PORTABLE_SLOWER = 1.2  # than the library's: our plain Triton kernels
_UNFILLED = 2.0  # times as long as other tiles: one whose rows are of several ranks
_BARRIER_US = 11.5
_WAY_US = 6.0  # of a store to a peer, and of the poll that sees it
_SIGNAL_US = 3.0  # until stores are counted and signalled (2 x H200)
_PACKED = 0.42  # the part of the memory's pace that torch's copies of blocks apart reach
# Longer sequences come to A2A + GEMM in parts whose blocks lie apart, and `direct` copies them first.
_MOST_SENT = 60 << 20
_FP32, _BF16 = 4, 2  # bytes
_CALLS = {"collective": 15, "low_latency": 8, "direct": 6, "fused": 8, "chunked": 8}  # host work of a forward pass


@dataclass(frozen=True)
class Estimate:
    """Microseconds of one pass by one method. device_us: what the GPU needs; host_us: until the call has returned."""

    device_us: float
    host_us: float = 0.0

    @property
    def us(self) -> float:
        """Of a call where calls follow each other, as the benchmark measures them."""
        return max(self.device_us, self.host_us)


class Reach:
    """A group inside one node; nodes/plan.py has those that span several. nodes: that it spans. has_rules: whether rules say
    how a method runs (choose._by_rules); else it runs plainly, or as measured."""

    nodes = 1
    has_rules = True

    def may_choose(self, method: str) -> bool:
        """Whether `auto` and the tuner may choose a method here."""
        return True

    def key_fields(self, device: torch.device, network: str) -> dict[str, Any]:
        """What measurements depend on here besides the fields of table.Key that hold everywhere. network: of OverlapConfig."""
        return {}

    def collective_us(self, pass_: Pass, system: System) -> float:
        """NCCL's exchange of a pass."""
        gbs = system.nccl_pair_gbs if pass_.world == 2 and not pass_.kind.exchanges else system.nccl_ring_gbs
        return 0.0 if pass_.world == 1 else system.nccl_us + pass_.sent_bytes / (gbs * 1e3)

    def estimate(self, pass_: Pass, how: Method, system: System, backward: bool = False) -> Estimate:
        """What a pass takes by a method. backward: the whole backward of its linear: also the weight gradient, under which a
        column linear's partial sums leave, and for which it gathers its input again."""
        alone, finish = _alone_us(pass_, how, system), _finish_us(pass_, how, system)
        us = _backward_us(pass_, how, system, alone, finish) if backward else alone + finish
        return Estimate(us + how.barrier_first * _BARRIER_US, host_us(pass_, how, system, backward))

    def all_reduce(self, pass_: Pass, how: Method, system: System, in_forward: bool) -> Estimate:
        """A scatter, and what shows of the gather of its sums. NCCL does both in one call, low_latency in one kernel; the others
        copy. By `fused` in a forward pass only the last chunk shows."""
        sent_on = in_forward and how.name == "fused" and self.nodes == 1
        how = replace(how, split_reduction=False) if sent_on else how  # as it is planned
        scatter = self.estimate(pass_, how, system)
        received, nccl_us = pass_.m * pass_.n * pass_.dtype.itemsize, self.collective_us(pass_, system) - system.nccl_us
        if how.name == "collective":
            calls, us = 0, nccl_us
        elif how.name == "low_latency":
            calls, us = 0, min(all_reduce_us(received, pass_.world, system).values()) - _words_us(pass_, system)
        else:
            chunks = chunks_of(how, pass_, system) if sent_on else 1
            calls = _CALLS["chunked"] + 2 * (pass_.world - 1) * chunks
            us = max(_push_us(pass_, system, 1), nccl_us) / chunks + system.wait_us + sum_us(system, 2 * received)
        return Estimate(scatter.device_us + us, scatter.host_us + calls * system.host_call_us)


@cache
def reach_of(nodes: int) -> Reach:
    """The Reach of groups that span so many nodes."""
    if nodes == 1:
        return Reach()
    across: Reach = import_module("...nodes.plan", __name__).AcrossNodes(nodes)
    return across


def library_us(system: System, m: int, n: int, k: int, sm_margin: int = 0, parts: int = 1) -> float:
    """One of `parts` library GEMMs [m, k] @ [k, n] in a row: waves of tiles, or what power or memory allows. sm_margin: SMs that
    others hold."""
    sms = system.sms - sm_margin
    waves_us = min(
        math.ceil(-(-m // rows) * -(-n // columns) / sms) * _tile_us(system, rows, columns, k) / speed
        for rows, columns, speed in _LIBRARY_TILES
    )
    return max(waves_us, _power_us(system, m * parts, n, k) / parts, sum_us(system, (m * k + k * n + m * n) * _BF16))


def _tile_us(system: System, rows: int, columns: int, k: int) -> float:
    return 2 * rows * columns * k * system.sms / (system.tile_tflops * 1e6)


def _power_us(system: System, m: int, n: int, k: int) -> float:
    """What power allows: a long GEMM begins at the rate of a short one."""
    work = 2 * m * n * k * 1e-6
    return max(work / system.burst_tflops, work / system.sustained_tflops - _BURST_US)


def sum_us(system: System, nbytes: float) -> float:
    """Reading and writing so many bytes of local memory."""
    return nbytes / (system.memory_gbs * 1e3)


def by_nccl_us(p: Pass, system: System, exchange_us: float) -> float:
    """An exchange and the library's GEMM, one after the other; of an all-to-all also a copy that brings columns together."""
    copies = _packed_us(p, system) if p.kind.exchanges else 0.0
    return exchange_us + library_us(system, p.rows, p.n, p.k) + copies + 2 * system.gap_us


def _push_us(p: Pass, system: System, chunks: int) -> float:
    """What the copy engine takes for all that a rank sends, each block in so many chunks."""
    return p.sent_bytes / (system.copy_gbs * 1e3) + (p.world - 1) * chunks * system.push_us


def _packed_us(p: Pass, system: System) -> float:
    """torch's copy of the blocks of an all-to-all."""
    return sum_us(system, 2 * p.rows * p.row_features * p.world * _BF16 / _PACKED)


def _words_us(p: Pass, system: System) -> float:
    """The exchange of low_latency, which sends a flag with every 4 bytes."""
    return _WAY_US + 2 * p.sent_bytes / (system.store_gbs * 1e3)


def all_reduce_us(received: int, world: int, system: System) -> dict[str, float]:
    """The exchange of low_latency by which so many bytes of each rank are all-reduced, by how."""
    to_all, signalled = (world - 1) * received / 1e3, _WAY_US + _SIGNAL_US
    return {
        WORDS: _WAY_US + 2 * to_all / system.store_gbs,
        ONE_SHOT: signalled + to_all / system.tile_store_gbs + sum_us(system, (world + 1) * received),
        TWO_SHOTS: 2 * (_WAY_US + to_all / world / system.tile_store_gbs) + sum_us(system, 2 * received),
    }


def in_parts_us(p: Pass, system: System, chunks: int = 1, sm_margin: int = 0) -> float:
    """Library GEMMs for each block, in so many chunks."""
    count = p.world * chunks
    depth, columns = p.k // (p.world if p.kind.sums_blocks else 1), p.n // (p.world if p.kind.splits_columns else 1)
    one = library_us(system, max(1, p.m // count), columns, depth, sm_margin, count)
    return count * (one + (1 + p.kind.receives) * system.gap_us)


def host_us(p: Pass, how: Method, system: System, backward: bool) -> float:
    """Driver calls of a call. backward: with the weight gradient."""
    calls = _CALLS[how.name] + (2 if how.name in ("collective", "low_latency") else 6) * backward
    if backward and not p.kind.receives and p.world > 1:  # what forward has sent is sent again
        calls += {"collective": 9, "low_latency": 2}.get(how.name, 2 * (p.world - 1))
    if how.name == "chunked":
        calls += 6 * p.world
    if how.pushes:
        calls += (2 if p.kind.receives else 3) * (p.world - 1) * chunks_of(how, p, system)
    return system.host_call_us * calls


def _alone_us(p: Pass, how: Method, system: System) -> float:
    """A pass without what may follow later (_finish_us)."""
    kind = p.kind
    if p.world == 1 or how.name == "collective":
        return by_nccl_us(p, system, Reach().collective_us(p, system))
    if how.name == "low_latency":
        return _words_us(p, system) + library_us(system, p.rows, p.n, p.k) + 2 * system.gap_us
    if how.name == "chunked":
        sums = sum_us(system, 2 * _FP32 * p.m * p.n) if kind.sums_blocks else 0.0
        return system.wait_us + _longest(p, in_parts_us(p, system) + sums, _push_us(p, system, 1))
    (waves, tile, power), chunks = _kernel_us(p, how, system), chunks_of(how, p, system)
    adds = sum_us(system, p.sent_bytes) if kind.reduces and not how.split_reduction else 0.0
    if how.name == "fused":
        return system.ramp_us + _longest(p, max(waves, power), _push_us(p, system, chunks), chunks, tile, adds)
    if kind.receives:
        copies = _packed_us(p, system) if kind.sums_blocks and p.sent_bytes > _MOST_SENT else 0.0
        stored = p.sent_bytes / (system.store_gbs * 1e3) + _WAY_US
        return system.ramp_us + _longest(p, max(waves, power), stored, chunks, tile) + copies
    held = (1 - 1 / p.world) * waves / tile * system.peer_tile_us
    return system.ramp_us + max(waves + held, power, p.sent_bytes / (system.tile_store_gbs * 1e3) + tile) + adds


def _longest(p: Pass, gemm: float, sent: float, chunks: int = 1, tile: float = 0.0, adds: float = 0.0) -> float:
    """What overlaps; see the top. tile: what a chunk that arrives takes at least, 0 for the library. adds: own rows and partials.
    A tile of A2A + GEMM needs a chunk of every rank."""
    theirs = (1 - 1 / p.world) * gemm
    if p.kind.sums_blocks and tile:
        return max(gemm, sent / chunks + gemm - gemm / chunks / p.world, sent + theirs / chunks)
    one = max(tile * p.kind.receives, (gemm - theirs) / chunks)
    return max(gemm, sent / (p.world - 1) / chunks + theirs, sent + one + adds / chunks)


def _kernel_us(p: Pass, how: Method, system: System) -> tuple[float, float, float]:
    """The GEMM by our kernels: waves of tiles, one tile, and what power allows. A tile takes longer where rows of several ranks
    fill it, and the rows of each block that is gathered read b again."""
    kind, tile, chunks = p.kind, HOPPER_TILE, chunks_of(how, p, system)
    # At least one each: also calls with too few are planned, before all ranks hear what is wrong with them.
    rows, columns = max(1, p.m // p.world // chunks), max(1, p.n // (p.world if kind.splits_columns else 1))
    blocks = chunks * (1 if kind.sums_blocks else p.world)
    tiles = tile.count(rows, columns, blocks)
    tile_us = _tile_us(system, tile.block_m, tile.block_n, max(1, p.k)) * (_UNFILLED if rows < tile.block_m else 1.0)
    waves = count_waves(tiles, system.sms, tiles if kind.receives else tile.pairs(rows, columns, chunks))
    waves_us = max(waves * tile_us, sum_us(system, (blocks if kind.gathers else 1) * columns * p.k * _BF16))
    slower = 1.0 if on_hopper(p, system) else _PORTABLE_SLOWER
    return slower * waves_us, slower * min(waves_us, tile_us), slower * _power_us(system, p.rows, p.n, p.k)


def _finish_us(p: Pass, how: Method, system: System) -> float:
    """What may follow after all that the caller does meanwhile: a kernel that adds partial sums, or takes blocks out of the
    slot."""
    kind, in_kernel = p.kind, how.multiplies and not how.split_reduction
    if p.world == 1 or kind.receives or not (how.multiplies or how.pushes) or (kind.reduces and in_kernel):
        return 0.0
    blocks = (p.world + 1) / (p.world - 1) if kind.reduces else 2
    return sum_us(system, blocks * p.sent_bytes) + 2 * system.gap_us + system.wait_us


def _backward_us(p: Pass, how: Method, system: System, alone: float, finish: float) -> float:
    """With the weight gradient. A column linear gathers x again beside the GEMM for dx, whose partials leave under the other
    GEMM."""
    wgrad = library_us(system, p.k, p.n, p.rows) + 2 * system.gap_us + system.wait_us
    if p.world == 1 or not p.kind.reduces:
        return alone + finish + wgrad
    if how.name == "low_latency":
        return alone + wgrad + _words_us(p, system)
    if how.name == "collective":  # a GEMM beside NCCL is longer
        nccl = Reach().collective_us(p, system)
        dgrad, wgrad = (us + min(nccl / 2, us) for us in (alone - nccl, wgrad))
        return max(dgrad, nccl) + max(wgrad, nccl)
    again, sent = _push_us(p, system, 1), _push_us(p, system, chunks_of(how, p, system)) if how.pushes else 0.0
    if how.name == "direct":  # its stores share the links with the blocks of x
        alone = max(alone, again + p.sent_bytes / (system.tile_store_gbs * 1e3))
    wgrad += sum_us(system, 2 * p.sent_bytes / (p.world - 1))  # its own rows are copied to the others
    if how.name == "fused" and not how.split_reduction:  # own tiles wait for partials behind the blocks of x
        return max(alone, again + sent) + wgrad
    return max(max(alone, again) + wgrad, again + sent) + finish
