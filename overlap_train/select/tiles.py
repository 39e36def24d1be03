"""How a product is cut: which kernels multiply it, with which tiles, in how many waves, and into how many chunks each block is
sent."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .method import CHUNK_COUNTS, Method, Pass
from .system import System

HOPPER, PORTABLE, LIBRARY = "hopper", "portable", "library"  # whose kernels multiply: Gluon's, plain Triton's, cuBLAS'

# A push takes the copy engine about 5 microseconds beside the copy itself, in which it would move 2 MB. A wave of tiles fills 8
# MiB, so shorter chunks of sums are done no sooner: GEMM + AR with twice as many takes 0.99 to 1.06 of the time (2 x H200).
SHORTEST_COPY = 8 << 20
# A chunk that kernels store themselves costs no host time, but its rows read all of b: 8 rows of tiles share that in L2.
SHORTEST_DIRECT = 1024  # rows


@dataclass(frozen=True)
class TileConfig:
    """How a kernel is cut: output tile, depth of a step, rows of tiles that share columns in L2, warps, stages. parts: strips of
    rows of a tile, each of which may be of another chunk."""

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


def portable_tile(dtype: torch.dtype, device: torch.device) -> TileConfig:
    """The tile of the plain Triton kernels. The interpreter pays per operation, not per element."""
    if device.type != "cuda":
        return _INTERPRETED
    return _FULL if dtype == torch.float32 else _HALF


def chunks_of(how: Method, pass_: Pass, device: System | torch.device) -> int:
    """Into how many chunks each block is cut: as measured, else as a rule says."""
    m_shard, on_gpu = max(1, pass_.m // pass_.world), device.type == "cuda"
    if how.chunks:
        return equal_chunks(m_shard, how.chunks)
    if not how.multiplies or how.whole:
        return 1
    # In a gather, and with a split reduction, tiles cross from block to block: a strip more may cost a wave (4100 rows on two
    # GPUs would take 4.5 instead of 4). Tiles of portable kernels do not cross from one chunk into the next.
    spare = int(not pass_.kind.gathers and on_hopper(pass_, device) and not how.split_reduction)
    if how.name == "direct":
        return chunk_count(m_shard, 1, on_gpu, 8, SHORTEST_DIRECT, spare)
    # Of A2A + GEMM every tile waits for a chunk, and the first one counts.
    most = 8 if pass_.kind.sums_blocks else 4
    return chunk_count(m_shard, pass_.row_bytes, on_gpu, most, may_cost=spare)


@functools.cache
def chunk_count(
    m_shard: int, row_bytes: int, on_gpu: bool, most: int = 4, shortest: int = SHORTEST_COPY, may_cost: int = 0
) -> int:
    """Into how many equal chunks a fused operator cuts each block of m_shard rows: the more, the shorter the exposed tail.

    On GPUs the largest of 1, 2, 4 and 8, up to `most`, that costs no tile, or no more than `may_cost` strips, and leaves no chunk
    of less than `shortest` bytes; on the CPU 2 where the rows are even.
    """
    if not on_gpu:
        return 2 if m_shard % 2 == 0 else 1
    fits = (c for c in CHUNK_COUNTS if c <= most and m_shard * row_bytes >= c * shortest)
    return max((c for c in fits if _is_cheap(m_shard, c, may_cost)), default=1)


def _is_cheap(m_shard: int, chunks: int, may_cost: int) -> bool:
    """Whether a block can be cut into equal chunks for so many strips. Where none may be lost, tiles count: a strip that fills up
    the last tile of a chunk costs nothing."""
    if m_shard % chunks:
        return False
    if may_cost:
        return chunks * HOPPER_TILE.strips(m_shard // chunks) <= HOPPER_TILE.strips(m_shard) + may_cost
    return chunks * HOPPER_TILE.count(m_shard // chunks, 1) == HOPPER_TILE.count(m_shard, 1)


def equal_chunks(m_shard: int, most: int) -> int:
    """The largest of 1, 2, 4 and 8, up to `most`, that cuts m_shard rows into equal chunks. What was measured with `most` chunks
    may have had other rows."""
    return max(count for count in CHUNK_COUNTS if count <= most and m_shard % count == 0)


def on_hopper(pass_: Pass, device: System | torch.device) -> bool:
    """Whether the warp-specialised kernels serve a pass."""
    both = (pass_.k, pass_.n), (pass_.row_features, 0)
    return all(tma_reads(device, pass_.dtype, *features) for features in both)


@functools.cache
def tma_reads(device: System | torch.device, dtype: torch.dtype, k: int, n: int) -> bool:
    """Whether the Hopper kernels can read and write contiguous [*, k] and [*, n] matrices: 16-byte rows of 16-bit numbers."""
    if device.type != "cuda" or dtype == torch.float32:
        return False
    capability = device.capability if isinstance(device, System) else torch.cuda.get_device_capability(device)
    return capability[0] == 9 and k * dtype.itemsize % 16 == 0 and n * dtype.itemsize % 16 == 0


def tma_reads_weight(weight: torch.Tensor) -> bool:
    """Whether a weight [N, K], or its transpose in memory, has rows that start on 16 bytes."""
    rows, cols = weight.stride()
    pitch = rows if cols == 1 else cols
    one_step = 1 in (rows, cols)
    return one_step and pitch > 0 and pitch * weight.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0
