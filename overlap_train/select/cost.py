"""What a pass takes by a method on a system, in closed form: GEMMs in waves of tiles, copies, launches.

A pass inside a node takes the longest of these, where G is the GEMM, W the ranks, N the chunks that arrive, C what they take:

    by compute              G
    by the first chunk      C/N + (1 - 1/W) G            inbound: own rows take G/W, the others follow the copies
    by the last chunk       C + G/N                      inbound: its rows are multiplied when it is there
                            G/N + C, (1 - 1/W) G + C/N   outbound: the first chunk is multiplied, then all are sent; or the last
                            is sent
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..schedule.kinds import Kind
from .method import Method
from .passes import Pass
from .system import System
from .tiles import chunks_of, on_hopper, sent_bytes
from .tiling import HOPPER_TILE, count_waves

# Output tiles that a library chooses from: 128 x 256 and the like, and 128 x 128 where larger ones leave SMs idle.
_LARGE_TILES, _SMALL_TILE = ((128, 256), (256, 128)), (128, 128)
# Beside stores to peers: the way there, and the poll that sees them.
_WAY_US = 6.0
_BARRIER_US = 10.0
# How many times as long a tile takes whose rows are of several ranks that have fewer than it has.
_UNFILLED = 2.0
# Of what an A2A + GEMM receives. Longer sequences come in parts whose blocks lie apart, and `direct` copies them first.
_MOST_RECEIVED = 80 << 20
_FP32, _BF16 = 4, 2  # bytes
# Host work in driver calls: a kernel launch with its preparation, a library GEMM, a collective, a push, what each call has
# besides.
_LAUNCH, _MM, _GEMM, _COLLECTIVE, _PUSH, _PUSH_AFTER_TILES, _OTHER = 2, 2, 5, 9, 2, 3, 4


@dataclass(frozen=True)
class Estimate:
    """Microseconds of one pass by one method. device_us: what the GPU needs; host_us: until the call has returned."""

    device_us: float
    host_us: float = 0.0

    @property
    def us(self) -> float:
        """Microseconds of a call where calls follow each other, as the benchmark measures them."""
        return max(self.device_us, self.host_us)


def power_us(system: System, flops: float) -> float:
    """What power allows for a GEMM of so many operations: the rate falls from burst_tflops to sustained_tflops."""
    work = max(1.0, flops * 1e-6)
    us = work / system.burst_tflops
    for _ in range(8):  # the rate depends on the time, and the time on the rate
        settled = system.settle_us / us * -math.expm1(-us / system.settle_us)
        us = work / (system.sustained_tflops + (system.burst_tflops - system.sustained_tflops) * settled)
    return us


def library_us(system: System, m: int, n: int, k: int, parts: int = 1, sm_margin: int = 0) -> float:
    """One of `parts` library GEMMs [m, k] @ [k, n] that run one after the other: waves of tiles, or what power or memory allows.
    sm_margin: that others hold."""
    sms = system.sms - sm_margin
    tiles = [(rows, cols, 1.0) for rows, cols in _LARGE_TILES] + [
        (*_SMALL_TILE, system.small_tile),
        (128, 192, 0.95),
        (192, 128, 0.95),
    ]
    us = min(
        math.ceil(-(-m // rows) * -(-n // cols) / sms) * _tile_us(system, rows, cols, k) / speed for rows, cols, speed in tiles
    )  # fmt: skip
    read_us = (m * k + k * n + m * n) * _BF16 / (system.memory_gbs * 1e3)
    return max(us, power_us(system, 2.0 * m * n * k * parts) / parts, read_us)


def _tile_us(system: System, rows: int, cols: int, k: int) -> float:
    """A tile [rows, cols] on one SM, at the highest clock."""
    return 2 * rows * cols * k * system.sms / (system.tile_tflops * 1e6)


def sum_us(system: System, nbytes: float, sms: int = 0) -> float:
    """Reading and writing so many bytes of local memory by so many SMs; 0: by all."""
    return nbytes / (min(system.memory_gbs, sms * system.sum_sm_gbs or math.inf) * 1e3)


def nccl_us(pass_: Pass, system: System) -> float:
    """NCCL's exchange of a pass inside a node."""
    is_pair = pass_.world == 2 and not pass_.kind.exchanges
    gbs = system.nccl_pair_gbs if is_pair else system.nccl_ring_gbs
    return 0.0 if pass_.world == 1 else system.nccl_us + sent_bytes(pass_) / (gbs * 1e3)


@dataclass(frozen=True)
class Work:
    """A pass inside a node."""

    pass_: Pass
    how: Method
    system: System

    @property
    def kind(self) -> Kind:
        return self.pass_.kind.engine

    @property
    def chunks(self) -> int:
        return chunks_of(self.how, self.pass_, self.system)

    @property
    def peers(self) -> int:
        return self.pass_.world - 1

    @property
    def block_bytes(self) -> float:
        """Of one block that a peer sends."""
        return sent_bytes(self.pass_) / max(1, self.peers)

    @property
    def gemm_us(self) -> float:
        """The whole GEMM by the library."""
        return library_us(self.system, self.pass_.rows, self.pass_.n, self.pass_.k)

    @property
    def start_us(self) -> float:
        """The kernel that advances the epoch, before copies."""
        return self.system.gap_us + self.system.wait_us

    @property
    def words_us(self) -> float:
        """The low-latency protocol, which sends a flag with every 4 bytes."""
        return _WAY_US + 2 * sent_bytes(self.pass_) / (self.system.store_gbs * 1e3)

    @property
    def add_us(self) -> float:
        """Own tiles of a scatter that add the peers' partials."""
        return sum_us(self.system, self.peers * self.block_bytes)

    @property
    def finish_us(self) -> float:
        """What may follow after all that the caller does meanwhile: a kernel that adds partial sums, or takes blocks out of the
        slot."""
        if self.kind.reduces and self.how.name != "chunked" and not self.how.split_reduction:
            return 0.0
        blocks = self.pass_.world + 1 if self.kind.reduces else 2 * self.peers
        return sum_us(self.system, blocks * self.block_bytes) + 2 * self.system.gap_us + self.system.wait_us

    def push_us(self, chunks: int) -> float:
        """One of `chunks` of a block, by the copy engine."""
        return self.block_bytes / chunks / (self.system.copy_gbs * 1e3) + self.system.push_us

    def put_together(self) -> float:
        """torch's copy of the blocks of an all-to-all: columns rank after rank before NCCL sends them, or what it has brought."""
        if not self.kind.exchanges:
            return 0.0
        nbytes = 2 * self.pass_.world * self.block_bytes
        return nbytes / (self.system.memory_gbs * self.system.torch_copy * 1e3) + self.system.gap_us

    def estimate(self, backward: bool = False) -> Estimate:
        """backward: as Reach.estimate."""
        barrier = self.how.barrier_first * (_BARRIER_US + self.system.gap_us)
        return Estimate((self.backward_us() if backward else self.device_us()) + barrier, self.host_us(backward))

    def device_us(self) -> float:
        """Alone, with nothing after it."""
        gap, name = self.system.gap_us, self.how.name
        if self.peers == 0:
            return self.gemm_us + gap
        if name == "collective":
            return nccl_us(self.pass_, self.system) + self.gemm_us + 2 * gap + self.put_together()
        if name == "low_latency":
            return self.words_us + self.gemm_us + 2 * gap
        by = {"chunked": self._chunked_us, "fused": self._fused_us, "direct": self._direct_us}[name]
        return by() + (0.0 if self.kind.receives else self.finish_us)

    def _chunked_us(self) -> float:
        """A GEMM by the library for each block."""
        p, system, one, after = self.pass_, self.system, self.push_us(1), 0.0
        world, gap = p.world, system.gap_us
        if self.kind.sums_blocks:  # each adds to the sum, in fp32
            gemm = library_us(system, p.rows, p.n, p.k // world, world)
            gemm, own = gemm + sum_us(system, (2 * _FP32 - _BF16) * p.rows * p.n), gemm
            after = sum_us(system, (_FP32 + _BF16) * p.rows * p.n) + gap
        else:
            own = gemm = library_us(
                system, max(1, p.m // world), p.n // (world if self.kind.splits_columns else 1), p.k, world
            )
        if self.kind.receives:
            step = gemm + 2 * gap + system.wait_us
            waits = max(own + gap + self.peers * step, one + self.peers * step, self.peers * one + step)
            return self.start_us + waits + after
        step = gemm + gap
        return self.start_us + max(world * step, step + self.peers * one, self.peers * step + one)

    def _fused_us(self) -> float:
        """One kernel, beside copies of chunks."""
        tiles, world, chunks, one = self._tiled(), self.pass_.world, self.chunks, self.push_us(self.chunks)
        count, full = self.peers * chunks, tiles.full
        start, least = self.start_us + self.system.ramp_us, max(full, tiles.allowed)
        if self.kind.gathers:
            last = count * one + max(tiles.one, full / (world * chunks))
            return start + max(least, one + (1 - 1 / world) * full, last)
        if self.kind.sums_blocks:  # each tile needs a chunk of every peer
            per = full / chunks
            return start + max(least, self.peers * one + full - per / world, count * one + per * (1 - 1 / world))
        peers_us = (1 - 1 / world) * full
        arrived = max(peers_us / count + count * one, peers_us + one)
        if self.finish_us:
            return start + max(least, arrived)
        return start + max(full + self.add_us, tiles.allowed, arrived + self.add_us / chunks)

    def _direct_us(self) -> float:
        """One kernel that stores at the peers itself."""
        tiles, system, world, nbytes = self._tiled(), self.system, self.pass_.world, sent_bytes(self.pass_)
        start, full = system.gap_us + system.ramp_us, tiles.full
        if self.kind.receives:
            parts = self.chunks * (world if self.kind.gathers else 1)
            is_long = self.kind.sums_blocks and world * self.block_bytes > _MOST_RECEIVED
            stored = nbytes / (system.store_gbs * 1e3) + _WAY_US + max(tiles.one, full / parts)
            return start + max(full, tiles.allowed, stored) + (self.put_together() if is_long else 0.0)
        held = (1 - 1 / world) * full / tiles.one * system.peer_tile_us
        wire = nbytes / (system.tile_store_gbs * 1e3)
        add = self.add_us if self.kind.reduces else 0.0
        return start + max(full + held, tiles.allowed, tiles.one + wire) + add

    def _tiled(self) -> _Tiled:
        """The GEMM by our kernels."""
        p, system, tile, chunks = self.pass_, self.system, HOPPER_TILE, self.chunks
        served = on_hopper(p, system)
        columns = p.n // (p.world if self.kind.splits_columns else 1)
        blocks = chunks * (1 if self.kind.sums_blocks else p.world)
        rows = max(1, p.m // p.world // chunks)
        tiles, lines = tile.count(rows, columns, blocks), tile.count(rows, 1, blocks)
        cut = tiles if self.kind.receives else tile.pairs(rows, columns, chunks)
        waves = count_waves(tiles, system.sms, cut if served else 0)
        one = _tile_us(system, tile.block_m, tile.block_n, p.k) * (_UNFILLED if rows < tile.block_m else 1.0)
        # The rows of each block of a gather read the weight again, since they follow their copies; else a wave shares what it
        # reads.
        again = self.kind.gathers or (not self.kind.sums_blocks and tiles > system.sms)
        reads = min(lines, blocks * -(-tile.count(rows, 1) // tile.group_m)) if again else 1
        speed = 1.0 if served else system.portable
        full = max(waves * one / speed, sum_us(system, reads * p.n * p.k * p.dtype.itemsize))
        return _Tiled(full, power_us(system, 2.0 * p.rows * p.n * p.k) / speed, min(full, one / speed))

    def backward_us(self) -> float:
        """With the weight gradient."""
        p, system, name = self.pass_, self.system, self.how.name
        wgrad, own = library_us(system, p.k, p.n, p.rows) + system.gap_us, sum_us(system, 2 * self.block_bytes)
        if self.peers == 0:
            return self.device_us() + wgrad
        if self.kind.receives:  # of what was gathered; its own block is copied beside it, but by `fused` under the GEMM
            is_there = name in ("collective", "low_latency") or (name == "fused" and self.kind.gathers)
            return self.device_us() + (0.0 if is_there else own) + self.start_us + wgrad
        if name == "collective":
            return self._backward_by_nccl(wgrad) if self.kind.reduces else self.device_us() + wgrad
        if name == "low_latency":
            return self.device_us() + wgrad + self.words_us
        return self._column_us(wgrad, own + self.start_us)

    def _column_us(self, wgrad: float, own: float) -> float:
        """A column linear gathers x again beside the GEMM for dx, whose partials leave under the other one."""
        again = self.start_us + self.peers * self.push_us(1)  # which leaves first
        partials = 0.0 if self.how.name == "direct" else self.peers * self.push_us(self.chunks) * self.chunks
        dgrad = self.device_us() - self.finish_us
        if self.how.name == "direct":  # its stores share the links with the blocks of x
            dgrad = max(dgrad, again + sent_bytes(self.pass_) / (self.system.tile_store_gbs * 1e3))
        if (
            self.how.name == "fused" and not self.how.split_reduction
        ):  # own tiles wait for partials behind the blocks of x
            return max(self.device_us(), again + partials + self.add_us / self.chunks) + own + wgrad
        return max(max(dgrad, again) + own + wgrad, again + partials) + self.finish_us

    def _backward_by_nccl(self, wgrad: float) -> float:
        """NCCL in a stream of its own: the gather beside the GEMM for dx, the reduce-scatter beside the other. A GEMM beside it
        is longer."""
        nccl, beside = nccl_us(self.pass_, self.system) + self.system.gap_us, self.system.nccl_beside
        dgrad = self.gemm_us + self.system.gap_us
        dgrad, wgrad = (us + min(beside * nccl, us * beside / (1 - beside)) for us in (dgrad, wgrad))
        return max(max(dgrad, nccl) + wgrad, max(dgrad, nccl) + nccl)

    def host_us(self, backward: bool) -> float:
        """Driver calls of a call."""
        name, peers = self.how.name, self.peers
        again = backward and not self.kind.receives and peers > 0  # gathers again
        calls = _OTHER + _MM * (backward + (not peers or name in ("collective", "low_latency")))
        if not peers:
            pass
        elif name == "collective":
            calls += _COLLECTIVE * (1 + (again and self.kind.reduces)) + _LAUNCH * self.kind.exchanges
        elif name == "low_latency":
            calls += _LAUNCH * (1 + again)
        else:
            later = not self.kind.receives and self.finish_us > 0
            calls += _LAUNCH * ((name != "direct" or again) + 2 * later + 2 * backward) + _PUSH * peers * again
            calls += self._multiplying_calls()
        return self.system.host_call_us * calls

    def _multiplying_calls(self) -> int:
        """GEMMs, or the kernel, and pushes."""
        if self.how.name == "chunked":
            waits = self.peers if self.kind.receives else 0
            return _GEMM * self.pass_.world + _LAUNCH * (waits + self.kind.sums_blocks) + _PUSH * self.peers
        pushes = self.peers * self.chunks if self.how.pushes else 0
        return _LAUNCH + pushes * (_PUSH if self.kind.receives else _PUSH_AFTER_TILES)


@dataclass(frozen=True)
class _Tiled:
    """A GEMM by our kernels, in microseconds: at the highest clock, as power allows it, and one tile."""

    full: float
    allowed: float
    one: float
