"""Faults of tiles that cross from one chunk's rows into the next: in arithmetic, waits, counts, and the schedule."""

from __future__ import annotations

from tests.mutations.mutation import In

ROWS, STRIPS = "tests/unit/test_hopper_rows.py", "tests/protocol/test_strips.py"
WARPS = "tests/unit/test_hopper_warps.py"
TILES = In("kernels/tiles.py", (STRIPS,))
SIGNAL = In("kernels/signal.py", (ROWS,))
GATHER = In("kernels/hopper_all_gather_gemm.py", (ROWS,))
RECEIVE = In("kernels/hopper_all_to_all_gemm.py", (ROWS,))
SCATTER = In("kernels/hopper_gemm_reduce_scatter.py", (ROWS,))
ORDER = In("overlap_train/planning/schedule/order.py", (STRIPS,))
ENGINES = ("tests/unit/test_hopper_rows.py::test_copies_wait_for_as_many_strips_as_a_chunk_has",)

FAULTS = [
    # which strips
    TILES(
        "a pair belongs to the unit of its first strip",
        "(2 * (index // tiles_n) + 1) // strips",
        "2 * (index // tiles_n) // strips",
    ),
    TILES("a pair that crosses is one of a group", "crosses = unit * strips % 2", "crosses = 0 * strips"),
    TILES("a unit ends where the next one's pairs do", "(unit + 1) * strips // 2", "((unit + 1) * strips + 1) // 2"),
    TILES(
        "the last strip of a run has no tile", "tl.cdiv(strips * units, 2) * tiles_n", "strips * units // 2 * tiles_n"
    ),
    TILES(
        "a strip beyond the run is one of a unit beyond it", "tl.minimum(strip // strips, units - 1)", "strip // strips"
    ),
    ORDER("tiles cross from one block of columns into the next", "kind in EXCHANGES or (interleaved", "(interleaved"),
    ORDER("tiles cross between blocks that take turns", "and world > 2)", "and world > 8)"),
    # loads and stores
    GATHER(
        "AG: the lower strip is stored below the upper one",
        "gather_strip(2 * pair + part, strips",
        "gather_strip(2 * pair, strips",
    ),
    GATHER(
        "AG: an own strip is read from what has arrived",
        "step, own_desc, gathered_desc, b_desc",
        "step, gathered_desc, gathered_desc, b_desc",
    ),
    GATHER("AG: a peer's strip above is read from the first shard", "upper += upper_source * m_shard", "upper += 0"),
    RECEIVE(
        "A2A: the upper strip is read from the lower one's chunk",
        "upper_chunk * m_chunk + upper_strip",
        "chunk * m_chunk + upper_strip",
    ),
    SCATTER(
        "RS: the upper strip is read from the lower one's target",
        "else upper_target * m_shard + upper",
        "else target * m_shard + upper",
    ),
    SCATTER(
        "RS: the upper strip is staged in the lower one's chunk",
        "upper_target, upper_chunk, upper_strip * ROWS",
        "upper_target, chunk, upper_strip * ROWS",
    ),
    # waits
    SIGNAL("a tile waits for its last chunk only", "waiting = word != first", "waiting = False"),
    GATHER("AG: an own strip waits for itself", "gl.where(upper_source == rank, word, upper_word)", "upper_word"),
    RECEIVE(
        "A2A: a tile waits for its lower strip only",
        "wait_both(signals_ptr, upper_word, word",
        "wait_both(signals_ptr, word, word",
    ),
    SCATTER(
        "RS: a tile of two own chunks waits for the lower one's",
        "signal_word(source, upper_chunk)",
        "signal_word(source, chunk)",
    ),
    In(ORDER.file, (WARPS,))("RS: an own strip adds below a peer's", "(max(1, world - 1) if adds else world)", "world"),
    # counts
    SCATTER("RS: both strips of a tile count as one", "(strip == strips), 1, 2)", "(strip == strips), 1, 1)"),
    SCATTER("RS: a strip that is missing is counted", "crosses | (strip == strips)", "crosses"),
    SCATTER(
        "RS: the upper strip of a tile that crosses is not counted", "if crosses and upper_target != rank:", "if False:"
    ),
    SCATTER("RS: an own strip is counted", "if crosses and upper_target != rank:", "if crosses:"),
    In("overlap_train/operators/persistent.py", ENGINES)(
        "a push waits for as many strips as there are tiles", "tile.counted(", "tile.count("
    ),
    SCATTER(
        "RS: a strip beyond the run is multiplied",
        "if strip < strips:\n                acc",
        "if strip <= strips:\n                acc",
    ),
    SCATTER(
        "RS: a strip beyond the run is multiplied in half tiles",
        "if strip < strips:\n                half",
        "if strip <= strips:\n                half",
    ),
]
