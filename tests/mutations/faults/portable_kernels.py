"""Faults of the kernels that Triton's interpreter runs."""

from __future__ import annotations

from tests.mutations.mutation import In

BY_KERNELS = "tests/protocol/test_processes.py::test_every_shape_by_kernels"
TILE = "tests/protocol/test_tile_product.py"
CUTS = "tests/protocol/test_tiles.py"
REDUCTION, FOOTPRINT = "tests/protocol/test_reduction.py", "tests/protocol/test_footprint.py"

TILES = In("kernels/tiles.py", (TILE,))
GATHER = In("kernels/all_gather_gemm.py", (BY_KERNELS,))
SCATTER = In("kernels/gemm_reduce_scatter.py", (BY_KERNELS,))
STORES = In("kernels/p2p_store.py", (BY_KERNELS,))

FAULTS = [
    TILES("a group's rows begin at its number", "first_m = group * GROUP_M", "first_m = group"),
    TILES("the last group is as tall as the others", "tl.minimum(tiles_m - first_m, GROUP_M)", "GROUP_M"),
    TILES("columns are counted by the whole group", "within // group_m", "within // GROUP_M"),
    TILES("a group has a tile less", "group = index // (GROUP_M * tiles_n)", "group = index // (GROUP_M * tiles_n - 1)"),
    TILES("a row past the edge is stored", "(rows < m_shard)[:, None]", "(rows <= m_shard)[:, None]"),
    TILES("a column past the edge is stored", "& (cols < n)[None, :]\n    return", "& (cols <= n)[None, :]\n    return"),
    TILES("rows past the edge are read", "tl.arange(0, BLOCK_M)) % m_shard", "tl.arange(0, BLOCK_M))"),
    TILES("columns past the edge are read", "tl.arange(0, BLOCK_N)) % n", "tl.arange(0, BLOCK_N))"),
    TILES("a column of a past its depth is read", "mask=depth[None, :] < left", "mask=depth[None, :] <= left"),
    TILES("a row of b past its depth is read", "mask=depth[:, None] < left", "mask=depth[:, None] <= left"),
    TILES("the next panel of a has another stride", "a_ptrs += BLOCK_K * stride_ak", "a_ptrs += BLOCK_K"),
    TILES("the next panel of b has another stride", "b_ptrs += BLOCK_K * stride_bk", "b_ptrs += BLOCK_K * stride_bn"),
    TILES("the last step along k is left out", "range(0, k, BLOCK_K)", "range(0, k - BLOCK_K + 1, BLOCK_K)"),
    TILES("tiles are cut at more than half a wave", "2 * rest <= programs", "2 * rest < programs", CUTS),
    TILES("a half tile is computed twice", "halved + beyond // 2", "halved + beyond", CUTS),
    TILES("both halves are the left one", "WHOLE, beyond % 2)", "WHOLE, 0)", CUTS),
    GATHER("a peer's shard begins a chunk's rows further", "* m_shard * k\n", "* m_chunk * k\n"),
    GATHER("every chunk multiplies the first", "shard_ptr + first_row * k", "shard_ptr"),
    GATHER("every chunk is stored over the first", "m_shard + first_row + rows) * n", "m_shard + rows) * n"),
    GATHER("tiles are numbered on over chunks", "tile_in_block(index % per_chunk", "tile_in_block(index"),
    GATHER("the last tile is left out", "while index < bound:",
           "while index < bound - 1:"),
    SCATTER("partial sums are added in 16 bits", "acc += tl.where(arrived, part.to(tl.float32), float(\"nan\"))",
            "acc = (acc.to(part.dtype) + tl.where(arrived, part, float(\"nan\"))).to(tl.float32)", REDUCTION),
    SCATTER("partial sums are added backwards", "part = tl.load(received_ptr + source * block",
            "part = tl.load(received_ptr + (2 * rank + WORLD - source) % WORLD * block", REDUCTION),
    SCATTER("the own block is added", "if source != rank:\n            part_ptr", "if True:\n            part_ptr", REDUCTION),
    SCATTER("the reduction after a wait adds in 16 bits",
            "total += tl.load(part_ptr + offsets, mask=mask, other=0.0).to(tl.float32)",
            "total = (total + tl.load(part_ptr + offsets, mask=mask, other=0.0)).to(y_ptr.dtype.element_ty).to(tl.float32)",
            REDUCTION),
    SCATTER("the reduction after a wait writes one element more", "mask = offsets < size", "mask = offsets <= size",
            REDUCTION),
    SCATTER("the reduction after a wait reads block by block of 32 bits", "source * tl.cast(size, tl.int64)",
            "source * tl.cast(size - 1, tl.int64)", REDUCTION),
    SCATTER("every chunk is stored over the first own rows", "offsets = (first_row + rows) * n", "offsets = rows * n"),
    SCATTER("every chunk multiplies the first rows", "(tl.int64) * m_shard + first_row", "(tl.int64) * m_shard"),
    STORES("an element past a chunk is stored", "inside = place < chunk_size", "inside = place <= chunk_size", FOOTPRINT),
    STORES("a piece that is not whole is left out", "tl.cdiv(chunk_size, PIECE)", "chunk_size // PIECE"),
    STORES("every chunk sends the first rows", "tl.load(own_ptr + first + place", "tl.load(own_ptr + place"),
    STORES("the second piece lies over the first", "place = piece * PIECE + start", "place = start"),
]  # fmt: skip
