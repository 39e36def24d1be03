"""How a product is cut: which kernels multiply it, with which tiles, and into how many chunks each block is sent."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .method import CHUNK_COUNTS

HOPPER, PORTABLE, LIBRARY = "hopper", "portable", "library"  # whose kernels multiply: Gluon's, plain Triton's, cuBLAS'

# A push takes the copy engine about 5 microseconds beside the copy itself, in which it would move 2 MB. Chunks shorten the end:
# of a gather the last GEMM, of a scatter what the own rows wait for. AG + GEMM of 8192 x 14336 x 4096 reached 0.95 of its bound
# with 8 MiB and 0.93 with 16 (4 x H200); where copies outweigh the GEMM 16 are 9 % faster (select/choose.py: sent whole).
_SHORTEST_COPY = 8 << 20
# Between nodes of one rank nothing is passed on by such copies, and exchanges in a row cost no more than one: 32 MiB took 13.7 to
# 14.8 ms in 4, 8, 16 and 32 of them, and 15.1 in one (2 x H200, sockets, 2.5 GB/s). But each keeps the host for 0.2 to 0.4 ms. A
# network that carries 4 MiB in less than that would wait for the host.
_SHORTEST_EXCHANGE, _SLOW_GBS = 4 << 20, 10.0
# A chunk that kernels store themselves costs no host time, but its rows read all of b: 8 rows of tiles share that in L2. A gather
# of 8192 x 14336 x 4096 took 0.672 ms so and 0.689 with chunks half as long (2 x H200).
_SHORTEST_DIRECT = 1024


@dataclass(frozen=True, kw_only=True)
class Target:
    """A GPU that need not be here, where plans ask for a device. sms: streaming multiprocessors."""

    capability: tuple[int, int]
    sms: int
    type: str = "cuda"


@dataclass(frozen=True)
class TileConfig:
    """How a kernel is cut: output tile, depth of a step, rows of tiles that share columns in L2, warps, stages.

    parts: strips of rows of a tile, each of which may be of another chunk.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    parts: int = 1

    def count(self, rows: int, cols: int, chunks: int = 1) -> int:
        """Tiles of `chunks` outputs [rows, cols], one after the other."""
        return -(-chunks * self.strips(rows) // self.parts) * self.columns(cols)

    def strips(self, rows: int) -> int:
        """Strips, or tiles where they are not cut into any, of so many rows."""
        return -(-rows * self.parts // self.block_m)

    def columns(self, cols: int) -> int:
        """Columns of tiles."""
        return -(-cols // self.block_n)

    def pairs(self, rows: int, cols: int, chunks: int = 1) -> int:
        """Pairs of strips of `chunks` outputs [rows, cols], in each column of tiles. Of own rows a scatter's last wave may cut so
        many tiles: at least as many have no other rows (kernels/tiles.py: first_cut_of_scatter)."""
        return self.strips(rows) * chunks // self.parts * self.columns(cols)

    def counted(self, rows: int, cols: int) -> int:
        """What a kernel has counted when a chunk [rows, cols] is stored: each strip in each column of tiles."""
        return self.strips(rows) * self.columns(cols)


def count_waves(tiles: int, sms: int, may_cut: int) -> float:
    """Waves that so many tiles take on `sms` SMs. The last one takes half a wave where at most half of the SMs have a tile in it,
    and it has at most `may_cut` tiles (kernels/tiles.py: first_cut, first_cut_of_scatter)."""
    full, rest = divmod(tiles, sms)
    return full + (0.5 if rest and 2 * rest <= sms and rest <= may_cut else float(rest > 0))


HOPPER_TILE = TileConfig(128, 256, 64, num_warps=4, num_stages=4, parts=2)
_HALF = TileConfig(128, 256, 64)
_FULL = TileConfig(64, 64, 32, num_warps=4)  # fp32 has no tensor-core path
_INTERPRETED = TileConfig(32, 32, 32, num_warps=4)
_DEEP = 1024  # features of a product that outweighs its sum in fp32


def portable_tile(dtype: torch.dtype, device: torch.device | Target) -> TileConfig:
    """The tile of the plain Triton kernels. The interpreter pays per operation, not per element."""
    if device.type != "cuda":
        return _INTERPRETED
    return _FULL if dtype == torch.float32 else _HALF


@functools.cache
def chunk_count(
    m_shard: int, row_bytes: int, on_gpu: bool, most: int = 4, shortest: int = _SHORTEST_COPY, may_cost: int = 0
) -> int:
    """Into how many equal chunks a fused operator cuts each block of m_shard rows: the more, the shorter the exposed tail.

    On GPUs the largest of 1, 2, 4 and 8, up to `most`, that costs no tile, or no more than `may_cost` strips (select/tiles.py:
    strips_to_spare), and leaves no chunk of less than `shortest` bytes; on the CPU 2 where the rows are even.
    """
    if not on_gpu:
        return 2 if m_shard % 2 == 0 else 1
    fits = [
        c for c in (1, 2, 4, 8)
        if c <= most and _is_cheap(m_shard, c, may_cost) and m_shard * row_bytes >= c * shortest
    ]  # fmt: skip
    return max(fits, default=1)


def pays_in_short_chunks(local: int, gbs: float) -> bool:
    """Whether short chunks pay between nodes of `local` GPUs, over a network of so many GB/s (0: unknown)."""
    return local == 1 and 0 < gbs < _SLOW_GBS


@functools.cache
def network_chunk_count(m_shard: int, row_bytes: int, products: int, in_short: bool = False) -> int:
    """Into how many chunks blocks are cut that cross between nodes of GPUs, at most `products` (products_that_fill). As
    chunk_count; in_short: up to twice as many, of half the bytes."""
    most, shortest = (8, _SHORTEST_EXCHANGE) if in_short else (4, _SHORTEST_COPY)
    return chunk_count(m_shard, row_bytes, True, max(1, min(most, products)), shortest)


def products_that_fill(m_shard: int, n: int, at_once: int, sms: int) -> int:
    """Into how many products `at_once` blocks of m_shard rows and n columns can be cut so that the tiles of each fill the SMs
    of a GPU: one with fewer tiles takes as long as one of so many."""
    return at_once * HOPPER_TILE.count(m_shard, n) // sms


def equal_chunks(m_shard: int, most: int) -> int:
    """The largest of 1, 2, 4 and 8, up to `most`, that cuts m_shard rows into equal chunks. What was measured with `most` chunks
    may have had other rows."""
    return max(count for count in CHUNK_COUNTS if count <= most and m_shard % count == 0)


def blocks_together(depth: int, local: int) -> int:
    """How many of a node's `local` blocks of `depth` features A2A + GEMM multiplies at once, by the library across nodes of GPUs.

    Each product reads and writes the sum in fp32: 8 bytes an element, which takes an H200 as long as a product of 700 features.
    """
    return min(local, -(-_DEEP // depth))


@functools.cache
def direct_chunk_count(m_shard: int, on_gpu: bool, may_cost: int = 0) -> int:
    """Into how many equal chunks a block is cut that a kernel stores at the peers and signals itself. As chunk_count, but on GPUs
    chunks have at least _SHORTEST_DIRECT rows, whatever their bytes."""
    if not on_gpu:
        return 2 if m_shard % 2 == 0 else 1
    fits = [c for c in (1, 2, 4, 8) if _is_cheap(m_shard, c, may_cost) and m_shard >= c * _SHORTEST_DIRECT]
    return max(fits, default=1)


def _is_cheap(m_shard: int, chunks: int, may_cost: int) -> bool:
    """Whether a block can be cut into equal chunks for so many strips. Where none may be lost, tiles count: a strip that fills up
    the last tile of a chunk costs nothing."""
    if m_shard % chunks:
        return False
    if may_cost:
        return chunks * HOPPER_TILE.strips(m_shard // chunks) <= HOPPER_TILE.strips(m_shard) + may_cost
    return chunks * HOPPER_TILE.count(m_shard // chunks, 1) == HOPPER_TILE.count(m_shard, 1)


@functools.cache
def tma_reads(device: torch.device | Target, dtype: torch.dtype, k: int, n: int) -> bool:
    """Whether the Hopper kernels can read and write contiguous [*, k] and [*, n] matrices: 16-byte rows of 16-bit numbers."""
    if device.type != "cuda" or dtype == torch.float32 or capability_of(device)[0] != 9:
        return False
    return k * dtype.itemsize % 16 == 0 and n * dtype.itemsize % 16 == 0


def capability_of(device: torch.device | Target) -> tuple[int, int]:
    """CUDA's compute capability of a GPU, or of one that is planned for."""
    return device.capability if isinstance(device, Target) else torch.cuda.get_device_capability(device)


def tma_reads_weight(weight: torch.Tensor) -> bool:
    """Whether a weight [N, K], or its transpose in memory, has rows that start on 16 bytes."""
    rows, cols = weight.stride()
    pitch = rows if cols == 1 else cols
    one_step = 1 in (rows, cols)
    return one_step and pitch > 0 and pitch * weight.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0
