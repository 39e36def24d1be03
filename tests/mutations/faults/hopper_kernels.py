"""Faults of the Hopper kernels that show in their PTX, without a GPU."""

from __future__ import annotations

from tests.mutations.mutation import In

PTX = ("tests/unit/test_hopper_kernels.py",)
GATHER = In("kernels/hopper_all_gather_gemm.py", PTX)
SCATTER = In("kernels/hopper_gemm_reduce_scatter.py", PTX)
TILES = In("kernels/hopper_tiles.py", PTX)

FAULTS = [
    GATHER("AG: TMA reads a peer's shard without a fence", "            fence_for_tma()\n", ""),
    GATHER("AG: the kernel ends while TMA reads its buffers", "        tma.store_wait(0)\n", "        pass\n"),
    SCATTER("RS: TMA reads a peer's partial without a fence", "                    fence_for_tma()\n", ""),
    SCATTER("RS: tiles are counted before they are written", "            stores_are_written()\n", ""),
    SCATTER("RS: a reduction that is split off waits in the kernel", "if REDUCE and source != rank:", "if source != rank:"),
    SCATTER("RS: the storing warp does not say that it has read an index", "READERS=PARTS + 1", "READERS=PARTS"),
    TILES("written means read out of shared memory", "cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"),
    TILES("TMA reads a buffer before it is written: AG", "buffer.store(values.to(out_desc.dtype))\n    fence_async_shared()",
          "buffer.store(values.to(out_desc.dtype))"),
    TILES("TMA reads a buffer before it is written: RS", ".store(values.to(quarters.dtype))\n    fence_async_shared()",
          ".store(values.to(quarters.dtype))"),
    TILES("a buffer is overwritten while TMA reads it: AG", "    tma.store_wait(0)\n    debug_barrier()\n    buffer.store",
          "    debug_barrier()\n    buffer.store"),
    TILES("a buffer is overwritten while TMA reads it: RS",
          "            tma.store_wait(0)\n            mbarrier.arrive(free", "            mbarrier.arrive(free"),
    TILES("a panel is free when one group has read it", "panel_free.index(stage), count=PARTS)",
          "panel_free.index(stage), count=1)"),
    TILES("an index is free when one group has read it", "tile_free.index(place), count=READERS)",
          "tile_free.index(place), count=1)"),
    TILES("barriers are not fenced before they are used", "count=READERS)\n    fence_async_shared()", "count=READERS)"),
]  # fmt: skip
