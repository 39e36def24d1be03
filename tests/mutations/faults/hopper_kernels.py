"""Faults of the Hopper kernels that show without a GPU: in their PTX, or in which rows they read and store."""

from __future__ import annotations

from tests.mutations.mutation import In

PTX = ("tests/unit/test_hopper_kernels.py",)
GATHER = In("kernels/hopper_all_gather_gemm.py", PTX)
SCATTER = In("kernels/hopper_gemm_reduce_scatter.py", PTX)
TILES = In("kernels/hopper_tiles.py", PTX)
STORES = In("kernels/hopper_stores.py", PTX)
ROWS = ("tests/unit/test_hopper_rows.py",)
GATHER_ROWS, SCATTER_ROWS, TILE_ROWS = (In(file.file, ROWS) for file in (GATHER, SCATTER, TILES))
ORDER = In("kernels/tiles.py", ROWS)
GIVEN_UP = "tests/unit/test_hopper_rows.py::test_what_a_wait_gave_up_on_is_nan"
OUTBOX = In("kernels/hopper_stores.py", ("tests/unit/test_hopper_warps.py",))
LAUNCHES = In("overlap_train/operators/hopper.py", ROWS)

FAULTS = [
    GATHER("AG: one row, 16 and 17 are compiled apart", 'do_not_specialize=["m_shard", ', "do_not_specialize=[",
           "tests/unit/test_packed_launch.py::test_no_kernel_is_compiled_for_a_number_of_rows"),
    GATHER("AG: TMA reads a peer's shard without a fence", "            fence_for_tma()\n", ""),
    GATHER("AG: the storing warp does not say that it has read an index", "READERS=PARTS + 1", "READERS=PARTS"),
    SCATTER("RS: TMA reads a peer's partial without a fence", "                    fence_for_tma()\n", ""),
    SCATTER("RS: tiles are counted before they are written", "    stores_are_written()\n", ""),
    SCATTER("RS: a reduction that is split off waits in the kernel", "if REDUCE and source != rank:", "if source != rank:"),
    SCATTER("RS: the storing warp does not say that it has read an index", "READERS=PARTS + 1", "READERS=PARTS"),
    GATHER_ROWS("AG: chunks are stored over each other", "source * CHUNKS + chunk", "source + chunk"),
    TILE_ROWS("half tiles read the other half's columns", "col += side * (BLOCK_N // 2)", "col += (1 - side) * (BLOCK_N // 2)"),
    ORDER("RS: tiles with a peer's strip are cut", "tl.where(total - halved <= own, halved, total)", "halved"),
    ORDER("RS: half tiles are stored over the other half", "tl.where(is_whole, 0, side * (BLOCK_N // 2))",
          "tl.where(is_whole, 0, (1 - side) * (BLOCK_N // 2))"),
    ORDER("RS: a half tile is stored as a whole one", "tl.where(is_whole, 2, 1)", "tl.where(is_whole, 2, 2)"),
    SCATTER_ROWS("RS: half tiles add nothing", "half, step = add_half(panels, step, half, received_desc, PART, STAGES)", "pass"),
    SCATTER_ROWS("RS: what a wait gave up on looks like a result", 'left, right = left + float("nan"), right + float("nan")',
                 "pass", GIVEN_UP),
    SCATTER_ROWS("RS: so does a half tile", 'half = half + float("nan")', "pass", GIVEN_UP),
    SCATTER_ROWS("RS: destinations are staged over each other", "target * CHUNKS + chunk, row", "chunk, row"),
    SCATTER_ROWS("RS: own chunks are stored over each other", "y_desc, outbox, turn, chunk,", "y_desc, outbox, turn, 0,"),
    SCATTER_ROWS("RS: chunks are stored over each other at the peers", "1], outbox, turn, chunk,", "1], outbox, turn, 0,"),
    SCATTER_ROWS("RS: each chunk adds the first one's rows", "above + upper, above + row",
                 "above + upper_strip * ROWS, above + strip * ROWS"),
    SCATTER_ROWS("RS: a chunk counts whole strips only", "chunk, stored, strips * tiles_n",
                 "chunk, stored, (strips - 1) * tiles_n"),
    SCATTER_ROWS("RS: half tiles are multiplied by whole panels", "panels, step, b_half_desc, k_steps",
                 "panels, step, b_desc, k_steps"),
    LAUNCHES("RS: half tiles take the first linear's weight", '("b_desc", "b_half_desc"), () if', '("b_desc",), () if'),
    LAUNCHES("RS: panels of half tiles are whole ones", "b_half_desc=_operand(b_kn, HALF_N), y_desc=_stored(y, call.chunks)",
             "b_half_desc=_operand(b_kn, BLOCK_N), y_desc=_stored(y, call.chunks)"),
    LAUNCHES("AG: half tiles take the first linear's weight", '("b_desc", "b_half_desc"), ("y_desc",)',
             '("b_desc",), ("y_desc",)'),
    LAUNCHES("AG: tiles cross from one shard's rows to the next", "_stored(y, blocks * call.chunks)", "_stored(y, 1)"),
    LAUNCHES("RS: tiles cross from one chunk's rows to the next", "y_desc=_stored(y, call.chunks)", "y_desc=_stored(y, 1)"),
    LAUNCHES("RS: tiles cross from one destination's rows to the next", "domain.world_size * call.chunks)]", "1)]"),
    LAUNCHES("RS: tiles cross into another rank's block at a peer", "_stored(call.remote_block(peer), call.chunks)",
             "_stored(call.remote_block(peer), 1)"),
    STORES("written means read out of shared memory", "cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"),
    STORES("TMA reads a buffer before it is written", ".store(values.to(quarters.dtype))\n    fence_async_shared()",
          ".store(values.to(quarters.dtype))"),
    STORES("a buffer is overwritten while TMA reads it",
          "        tma.store_wait(0)\n        mbarrier.arrive(free", "        mbarrier.arrive(free"),
    OUTBOX("a group overwrites what the other group has put", "(turn & 1) ^ (1 - PART))", "(turn & 1) ^ 1)"),
    OUTBOX("group 0 waits for what group 1 is yet to put", "(turn & 1) ^ (1 - PART))", "turn & 1)"),
    OUTBOX("a group waits for its own quarter in a shared buffer", "free.index((1 - PART) * 2 + HALF)",
           "free.index(PART * 2 + HALF)"),
    OUTBOX("the left quarter's buffer is free when the right one is", "free.index((1 - PART) * 2 + HALF)",
           "free.index((1 - PART) * 2 + 1 - HALF)"),
    OUTBOX("direct: wrong phase of a quarter that is free", "(turn & 1) ^ 1)\n    buffer", "turn & 1)\n    buffer"),
    OUTBOX("direct: both groups put into the same buffers", "quarters.index(PART * 2 + HALF)", "quarters.index(HALF)"),
    OUTBOX("the storing warp takes a quarter that is not there", "full.index(PART * 2 + half), turn & 1)",
           "full.index(PART * 2 + half), (turn & 1) ^ 1)"),
    OUTBOX("the storing warp takes both halves from one buffer", "PART * 2 + half), chunk", "PART * 2), chunk"),
    TILES("a panel is free when one group has read it", "panel_free.index(stage), count=PARTS)",
          "panel_free.index(stage), count=1)"),
    TILES("an index is free when one group has read it", "tile_free.index(place), count=READERS)",
          "tile_free.index(place), count=1)"),
    TILES("barriers are not fenced before they are used", "count=READERS)\n    fence_async_shared()", "count=READERS)"),
]  # fmt: skip
