"""Faults that only a GPU can show: wrong values, or kernels that wait for ever.

Each is run by the method that it is in. Two ranks are enough for all of them.
"""

from __future__ import annotations

from tests.mutations.mutation import In

OPERATORS, STRESS = "tests/gpu/test_operators.py", "tests/gpu/test_stress.py"


def exact(method: str, operator: str) -> str:
    """Every shape of one operator in bf16, forward and backward."""
    return f"{OPERATORS}::test_every_shape_is_exact[{method}-{operator}-torch.bfloat16]"


def ragged(method: str, operator: str) -> str:
    """997 rows a rank, of whose last tile 27 are empty."""
    return f"{OPERATORS}::test_rows_that_end_within_a_tile[{method}-{operator}-997]"


GATHER = In("kernels/hopper_all_gather_gemm.py", (exact("fused", "column"),), gpu=True)
DIRECT_GATHER = In(GATHER.file, (exact("direct", "column"),), gpu=True)
FEW_TILES = (f"{STRESS}::test_one_slow_rank[fused]",)  # which are cut
HALVES_OF_B = In("kernels/hopper_tiles.py", FEW_TILES, gpu=True)
SCATTER = In("kernels/hopper_gemm_reduce_scatter.py", (exact("fused", "row"),), gpu=True)
DIRECT_SCATTER = In(SCATTER.file, (exact("direct", "row"),), gpu=True)
CUT_SCATTER = In(SCATTER.file, (f"{OPERATORS}::test_a_last_wave_of_half_tiles_is_exact[fused-row]",), gpu=True)
TILES = In("kernels/hopper_tiles.py", (exact("fused", "column"),), gpu=True)
SINGLE_STRIP = In(
    TILES.file, (f"{OPERATORS}::test_tiles_that_cross_from_one_chunk_into_the_next[fused-row-190-1]",), gpu=True
)
RAGGED_ROW = In(SCATTER.file, (ragged("fused", "row"),), gpu=True)
CROSSING = (f"{OPERATORS}::test_tiles_that_cross_from_one_chunk_into_the_next[fused-row-130-2]",)
BROUGHT = In(TILES.file, CROSSING, gpu=True)
ADDED = In(TILES.file, (exact("fused", "row"),), gpu=True)
OUTBOX = In("kernels/hopper_stores.py", (exact("fused", "row"),), gpu=True)
RAGGED = In(OUTBOX.file, (ragged("fused", "column"),), gpu=True)
WEIGHT_GRADIENT = In(
    "overlap_train/operators/weight_gradient.py",
    (f"{OPERATORS}::test_main_grad_accumulates_in_fp32[collective]",),
    gpu=True,
)
WORKSPACE = In(
    "overlap_train/protocol/workspace.py",
    ("tests/gpu/test_mismatched_calls.py::test_ranks_that_raised_in_different_places_do_not_go_on[chunked]",),
    gpu=True,
)

FAULTS = [
    # the rings: which phase of a barrier is waited for
    TILES("GPU: wrong phase of a tile index that is free", "(turn // QUEUE_DEPTH & 1) ^ 1)", "turn // QUEUE_DEPTH & 1)"),
    TILES(
        "GPU: wrong phase of a tile index that is there",
        "tile_full.index(place), turn // QUEUE_DEPTH & 1)",
        "tile_full.index(place), (turn // QUEUE_DEPTH & 1) ^ 1)",
    ),
    TILES(
        "GPU: wrong phase of a panel that is there",
        "mbarrier.wait(panel_full.index(stage), step // STAGES & 1)\n        b = ",
        "mbarrier.wait(panel_full.index(stage), (step // STAGES & 1) ^ 1)\n        b = ",
    ),
    SINGLE_STRIP(
        "GPU: panels that a group has no strip in are not counted",
        "arrive(panel_free.index(stage), count=1)\n        step += 1\n    return no_product",
        "arrive(panel_free.index(stage), count=1)\n    return no_product",
    ),
    TILES(
        "GPU: a panel is freed before it is multiplied",
        "mbarrier.arrive(panel_free.index((step - 1) % STAGES), count=1)\n        step += 1",
        "mbarrier.arrive(panel_free.index(step % STAGES), count=1)\n        step += 1",
    ),
    # which part of what
    TILES("GPU: both groups multiply the upper rows", "stage * PARTS + PART), b, acc", "stage * PARTS), b, acc"),
    TILES("GPU: every step multiplies the first panel of a", "[lower_row, k * BLOCK_K]", "[lower_row, 0]"),
    TILES("GPU: every step multiplies the first panel of b", "[b_col, b_first_k + k * BLOCK_K]", "[b_col, b_first_k]"),
    GATHER("GPU: a peer's shard is read from the own", "step, gathered_desc, gathered_desc, b_desc",
           "step, own_desc, own_desc, b_desc"),
    GATHER("GPU: a peer's shard is the slot's first", "row += source * m_shard", "row += 0 * m_shard"),
    HALVES_OF_B("GPU: the right half is multiplied by the left columns", "col += side * (BLOCK_N // 2)", "col += 0"),
    SCATTER("GPU: both groups' quarters are stored above", "chunk, strip * ROWS, col", "chunk, upper_strip * ROWS, col"),
    OUTBOX("GPU: both quarters are stored on the left", "col + half * cols)", "col)"),
    ADDED("GPU: the reduction adds the left half twice", "[lower_row, col + half * desc.block_type.shape[1]]",
          "[lower_row, col]"),
    ADDED("GPU: the reduction adds the upper rows twice", "b_place(panels, stage, desc, PART).load",
           "b_place(panels, stage, desc, 0).load"),
    SCATTER("GPU: the reduction adds the first block", "above = source * m_shard", "above = 0"),
    SCATTER("GPU: the reduction adds the tile to the left", "above + row, first_col, halves", "above + row, 0, halves"),
    CUT_SCATTER("GPU: a half tile takes its panels from a shorter ring", "ROWS, HALF, STAGES, B_IS_NK)",
                "ROWS, HALF, STAGES - 1, B_IS_NK)"),
    CUT_SCATTER("GPU: a half tile adds each peer's upper rows", "half, received_desc, PART, STAGES",
                "half, received_desc, 0, STAGES"),
    SCATTER("GPU: every destination's rows are the first", "row if EXCHANGE else target * m_shard + row", "row"),
    RAGGED("GPU: all chunks are stored over the first", "[chunk, row, col]", "[0, row, col]"),
    RAGGED_ROW("GPU: a chunk's tiles are staged a row below their place", "target * CHUNKS + chunk, row",
               "target * CHUNKS + chunk, row + 1"),
    # tiles of two chunks
    BROUGHT("GPU: the lower strip's partials lie over the upper ones'", "full, b_place(panels, stage, desc, 1))",
            "full, b_place(panels, stage, desc, 0))"),
    # signals and epochs
    DIRECT_GATHER("GPU: AG expects the epoch before", "tag) if DIRECT else gl.load", "tag) if False else gl.load"),
    DIRECT_GATHER("GPU: AG signals the epoch before", "next_word(gl.load(words[3]), words[6])", "gl.load(words[3])"),
    DIRECT_GATHER("GPU: AG does not count its epoch", "next_word(gl.load(epoch_ptr), tag), WORLD)", "gl.load(epoch_ptr), WORLD)"),
    DIRECT_SCATTER("GPU: RS does not count epochs", "next_word(gl.load(epoch_ptr), tag), WORLD)", "gl.load(epoch_ptr), WORLD)"),
    DIRECT_SCATTER("GPU: RS signals a tile early", "of_chunk, signals_ptr + chunk", "of_chunk - 1, signals_ptr + chunk"),
    DIRECT_SCATTER("GPU: RS signals for another chunk", "signals_ptr + chunk, expected", "signals_ptr + chunk + 1, expected"),
    GATHER("GPU: what a wait gave up on looks like a result", 'acc = acc + float("nan")', "acc = acc + 0.0",
           f"{STRESS}::test_a_silent_peer_is_named[fused]"),
    WORKSPACE("GPU: ranks that raised in different places go on", "torch.cuda.is_current_stream_capturing():", "True:"),
    # the weight gradient
    WEIGHT_GRADIENT(
        "GPU: products are rounded before they are added to main_grad",
        "torch.addmm(target, dy.t(), x, out_dtype=torch.float32, out=target)", "target.add_(dy.t() @ x)",
    ),
    WEIGHT_GRADIENT(
        "GPU: main_grad is overwritten",
        "torch.addmm(target, dy.t(), x, out_dtype=torch.float32, out=target)",
        "torch.mm(dy.t(), x, out_dtype=torch.float32, out=target)",
    ),
]  # fmt: skip
