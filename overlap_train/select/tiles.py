"""How the tiles of a pass fill the SMs, wave after wave, and into how many chunks its blocks are cut.

GEMM + RS, rows, columns, on two GPUs    tiles of the peer, own    waves of 132
4100, 4096                               272, 272                  four, and one of halves
  split reduction                        528, some of them of both four
2048, 5120                               160, 160                  two, and one of halves. The peer's tiles end in the second,
beside
                                                                   104 own ones, which wait there for the peer's partial sums
"""

from __future__ import annotations

import torch

from .method import Method
from .passes import Pass
from .system import System
from .tiling import (
    HOPPER_TILE,
    chunk_count,
    count_waves,
    direct_chunk_count,
    equal_chunks,
    tma_reads,
)

# Beside reading and writing: what the second kernel of a split reduction takes from the end of the first.
_SUM_LAUNCH_US = 5.0
# What `System.copy_gbs` says of one copy, over what many with the gaps between them reach.
_GAPS = 1.2


def gemm_us(pass_: Pass, system: System) -> float:
    """Microseconds of this rank's GEMM, at the rate of a long run."""
    return 2 * pass_.rows * pass_.n * pass_.k / (system.sustained_tflops * 1e6)


def copy_us(pass_: Pass, system: System) -> float:
    """Microseconds that NVLink takes for what one rank sends, with the gaps between copies."""
    return sent_bytes(pass_) / (system.copy_gbs / _GAPS * 1e3)


def sent_bytes(pass_: Pass) -> float:
    """Bytes that one rank sends to all others."""
    return (pass_.world - 1) / pass_.world * pass_.m * pass_.row_features * pass_.dtype.itemsize


def on_hopper(pass_: Pass, device: System | torch.device) -> bool:
    """Whether the warp-specialised kernels serve a pass."""
    return tma_reads(device, pass_.dtype, pass_.k, pass_.n) and tma_reads(device, pass_.dtype, pass_.row_features, 0)


def scatters_on_hopper(pass_: Pass, system: System) -> bool:
    """Whether it is a GEMM + RS that they serve."""
    return pass_.kind.reduces and on_hopper(pass_, system)


def saves_a_wave(pass_: Pass, system: System) -> bool:
    """Whether a scatter takes half a wave of tiles less, or more, and less time, with a split reduction.

    Own tiles that add the peers' partials have no rows of peers (schedule/order.py: units_in_run). So 4100 rows of 4096 columns
    on two GPUs are 544 tiles, four waves and one of halves, and with a split reduction 528, four: 332 us instead of 386.
    """
    if not scatters_on_hopper(pass_, system):
        return False
    rows, peers = pass_.m // pass_.world, pass_.world - 1
    apart = HOPPER_TILE.count(rows, pass_.n, peers) + HOPPER_TILE.count(rows, pass_.n)
    together = HOPPER_TILE.count(rows, pass_.n, pass_.world)
    own = HOPPER_TILE.pairs(rows, pass_.n)
    before, after = (count_waves(tiles, system.sms, own) for tiles in (apart, together))
    if before <= after:
        return False
    nbytes = (pass_.world + 1) * rows * pass_.n * pass_.dtype.itemsize  # own and received partials, and their sum
    return (before - after) / before * gemm_us(pass_, system) > _SUM_LAUNCH_US + nbytes / (system.memory_gbs * 1e3)


def strips_to_spare(pass_: Pass, system: System, splits: bool = False) -> int:
    """How many strips of rows a block may take more in chunks than whole: one, which shares a tile with a strip of another chunk.
    splits: the reduction.

    None in a gather: strips of all ranks are in one row of tiles, and 4100 rows on two GPUs would take 4.5 waves instead of 4.
    None where it may cost the wave that a split reduction saves. None by portable kernels, whose tiles do not cross from one
    chunk into the next.
    """
    keeps_a_wave = splits and saves_a_wave(pass_, system)
    return int(not pass_.kind.gathers and on_hopper(pass_, system) and not keeps_a_wave)


def chunks_of(how: Method, pass_: Pass, device: System | torch.device) -> int:
    """Into how many chunks each block is cut: as measured, else as a rule says."""
    m_shard = max(1, pass_.m // pass_.world)
    if how.chunks:
        return equal_chunks(m_shard, how.chunks)
    if not how.multiplies or how.whole:
        return 1
    system, on_gpu = System.of(device), device.type == "cuda"
    spare = strips_to_spare(pass_, system, how.split_reduction)
    if how.name == "direct":
        return direct_chunk_count(m_shard, on_gpu, spare)
    # Of A2A + GEMM every tile waits for a chunk, and the first one counts.
    most = 8 if pass_.kind.sums_blocks else 4
    row_bytes = pass_.row_features * pass_.dtype.itemsize
    return chunk_count(m_shard, row_bytes, on_gpu, most, may_cost=spare)
