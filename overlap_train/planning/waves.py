"""What the Hopper kernels serve, and how the tiles of a GEMM + RS by them fill the SMs, wave after wave.

rows, columns, on two GPUs    tiles of the peer, own    waves of 132
4100, 4096                    272, 272                  four, and one of halves
  split reduction             528, some of them of both four
2048, 5120                    160, 160                  two, and one of halves. The peer's tiles end in the second, beside 104
                                                        own ones, which wait there for the peer's partial sums
"""

from __future__ import annotations

import torch

from ..schedule.order import GATHER, SCATTER
from ..select.passes import SCATTER_AND_WGRAD, Pass
from ..select.tiling import FILLS_A_GPU, HOPPER_TILE, chunk_count, count_waves, tma_reads
from .hardware import SUM_GBS

# A scatter whose tiles are one wave that leaves at most this part of the SMs idle: direct sends it under its product. 256 x 16384
# x 26624, 128 tiles on 132 SMs, took 350 and 363 us in two passes, by low_latency 367 and 374, by NCCL and cuBLAS 365 and 373. On
# another day direct was 1.04 and 1.03 times as fast as these two, low_latency 1.00 and 0.99 (2 x H200).
MOST_IDLE = 0.05
# Beside reading and writing: what the second kernel of a split reduction takes from the end of the first.
SUM_LAUNCH_US = 5.0
# Own tiles that wait for a copy hold their SMs. direct stores at the peers tile by tile, and is faster where these SMs wait for
# more than this part of the product, averaged over all SMs. Rows, columns, K: that part, us by fused and by direct (2 x H200):
#     2048, 5120, 2560     0.33   140   121    benchmarks/notes.md
#     2048, 5120, 4096     0.21   185   162    h200x2/untuned/tune.md
#     2048, 5120, 5120     0.17   379   358    the same, a column's backward
#     2048, 5120, 12800    0.07   433   441    notes.md, means of two
MOST_WAITING = 0.1


def on_hopper(pass_: Pass, device: torch.device) -> bool:
    """Whether the warp-specialised kernels serve a pass."""
    return tma_reads(device, pass_.dtype, pass_.k, pass_.n) and tma_reads(device, pass_.dtype, pass_.row_features, 0)


def scatters_on_hopper(pass_: Pass, device: torch.device) -> bool:
    """Whether it is a GEMM + RS that they serve."""
    return pass_.kind in (SCATTER, SCATTER_AND_WGRAD) and on_hopper(pass_, device)


def fills_tiles(pass_: Pass) -> bool:
    """Whether the rows of one rank are at least a tile."""
    return pass_.m >= HOPPER_TILE.block_m * pass_.world


def fills_a_wave(pass_: Pass, device: torch.device) -> bool:
    """Whether a scatter is one wave of whole tiles, on nearly all SMs."""
    if not fills_tiles(pass_) or not scatters_on_hopper(pass_, device):
        return False
    tiles = HOPPER_TILE.count(pass_.m // pass_.world, pass_.n, pass_.world)
    return 1 - MOST_IDLE <= tiles / FILLS_A_GPU <= 1


def saves_a_wave(pass_: Pass, device: torch.device) -> bool:
    """Whether a scatter takes half a wave of tiles less, or more, and less time, with a split reduction.

    Own tiles that add the peers' partials have no rows of peers (schedule/order.py: units_in_run). So 4100 rows of 4096 columns
    on two GPUs are 544 tiles, four waves and one of halves, and with a split reduction 528, four. 14336 x 4096 took 332 us with
    one, and 386 without when five waves were whole (2 x H200).
    """
    if not scatters_on_hopper(pass_, device):
        return False
    rows, peers = pass_.m // pass_.world, pass_.world - 1
    apart = HOPPER_TILE.count(rows, pass_.n, peers) + HOPPER_TILE.count(rows, pass_.n)
    together = HOPPER_TILE.count(rows, pass_.n, pass_.world)
    own = HOPPER_TILE.pairs(rows, pass_.n)
    before, after = (count_waves(tiles, FILLS_A_GPU, own) for tiles in (apart, together))
    if before <= after:
        return False
    nbytes = (pass_.world + 1) * rows * pass_.n * pass_.dtype.itemsize  # own and received partials, and their sum
    return (before - after) / before * pass_.gemm_us > SUM_LAUNCH_US + nbytes / (SUM_GBS * 1e3)


def strips_to_spare(pass_: Pass, device: torch.device, splits: bool = False) -> int:
    """How many strips of rows a block may take more in chunks than whole. splits: the reduction.

    One, which shares a tile with a strip of another chunk. Own tiles of a scatter wait for a peer's first chunk: blocks of 4100
    rows, not cut because of one strip in 66, took 0.708 and 0.698 ms in two passes, and blocks of 4096, in four chunks, 0.651 and
    0.647 (N = 4096, K = 14336, two of 4 x H100, 20 rounds). The simulator says 710 and 693 us, in two chunks 694; A2A + GEMM
    gains more.

    None in a gather: strips of all ranks are in one row of tiles, and 4100 rows on two GPUs would take 4.5 waves instead of 4.
    None where it may cost the wave that a split reduction saves: 4100 rows of 4096 columns on two GPUs are 528 tiles, four waves,
    and 544 if their blocks are cut in two. None by portable kernels, whose tiles do not cross from one chunk into the next: four
    chunks of 1088 rows are 36 tiles of 128, the block 34.
    """
    keeps_a_wave = splits and saves_a_wave(pass_, device)
    return int(pass_.kind != GATHER and on_hopper(pass_, device) and not keeps_a_wave)


def waits_in_a_wave(pass_: Pass, device: torch.device) -> bool:
    """Whether own tiles of a scatter by fused keep SMs waiting for long: those in the wave in which the peers' last tiles are
    multiplied, at all ranks alike. The partials for them leave when it ends, if blocks are too short to be cut. Not where a split
    reduction, which waits nowhere, saves a wave."""
    rows, peers = pass_.m // pass_.world, pass_.world - 1
    is_whole = chunk_count(rows, pass_.n * pass_.dtype.itemsize, True, may_cost=strips_to_spare(pass_, device)) == 1
    if not is_whole or not peers or not scatters_on_hopper(pass_, device) or saves_a_wave(pass_, device):
        return False
    last = HOPPER_TILE.count(rows, pass_.n, peers) % FILLS_A_GPU
    beside = min(FILLS_A_GPU - last, HOPPER_TILE.count(rows, pass_.n)) if last else 0
    return pass_.copy_us / peers * beside / FILLS_A_GPU > MOST_WAITING * pass_.gemm_us
