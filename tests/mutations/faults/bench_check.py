"""Faults of the check before timing, of baselines and of ratios: what passes, what is compared, and what is said."""

from __future__ import annotations

from tests.mutations.mutation import In

CHECK = In("overlap_train/tools/measure/check.py", ("tests/unit/test_bench_check.py",))
INPUTS = In("overlap_train/tools/bench/operators.py", ("tests/unit/test_bench_hierarchical.py",))
BLOCKS = In("overlap_train/tools/bench/attention_data.py", ("tests/unit/test_bench_blocks.py",))
THREE = In("overlap_train/tools/bench/exchange_baselines.py", ("tests/unit/test_exchange_baselines.py",))
OF_GRAPHS = "tests/recipes/test_compare_mfu_graph.py::test_the_step_of_a_graph_is_compared_with_that_of_a_graph"
STEPS = In("recipes/mfu/measured.py", (OF_GRAPHS,))
NOTES = In(
    "recipes/mfu/rows.py", ("tests/recipes/test_compare_mfu.py::test_exposed_communication_below_0_is_explained",)
)
TURNS = In("overlap_train/tools/measure/timing.py", ("tests/unit/test_bench_timing.py",))
STEPS_IN_TURNS = In(
    "recipes/mfu/measuring.py",
    ("tests/recipes/test_compare_mfu_graph.py::test_a_variant_that_fails_in_its_turn_loses_only_its_own_results",),
)
SAID = In("overlap_train/tools/measure/results.py", ("tests/unit/test_bench_output.py",))

FAULTS = [
    CHECK("a product may differ by ten roundings", "+ unit * exact[rows].abs())", "+ 10 * unit * exact[rows].abs())"),
    CHECK("a product may differ by the roundings of other rows", "in_rows[rows], in_columns",
          "in_rows[: len(exact[rows])], in_columns"),
    CHECK("a sum may differ by many roundings", "+ world * unit * spread", "+ 50 * unit * spread"),
    CHECK("sums count the products of one rank", "2 * (world * a.shape[1] + world)", "2 * (a.shape[1] + world)"),
    CHECK("the last bad block is the worst", "worst = max(worst, float((error", "worst = (float((error"),
    CHECK("nothing is compared but the last block", "            count += wrong\n", "            count = wrong\n"),
    CHECK("NaN is right", "~(error <= bound)", "error > bound"),
    CHECK("rows beyond the last block are left out", "range(0, rows, most)", "range(0, rows - most, most)"),
    CHECK("norms of b's rows", "vector_norm(b[:, columns].double(), dim=0)", "vector_norm(b[:, columns].double(), dim=1)"),
    CHECK("norms in one block after the other, each of the first", "vector_norm(a[rows]", "vector_norm(a[: len(a[rows])]"),
    BLOCKS("blocks are compared as a whole", "TILE = 128", "TILE = 1 << 20"),
    BLOCKS("only the tiles of the last rows count", "error, norm = torch.cat(errors), torch.cat(norms)",
           "error, norm = errors[-1], norms[-1]"),
    BLOCKS("a tile in which results cancel is held to its own norm", ".clamp_min(norm.square().mean().sqrt())", ""),
    BLOCKS("a block may leave what it has left before", "other = forward_backward(block, decoy)",
           "other = forward_backward(block, data)"),
    STEPS("the step of a graph is compared with one that the host holds up", "if is_graph(name) else", "if False else"),
    NOTES("exposed communication below 0 is not explained", '(row["exposed_ms"] or 0) < 0', "False"),
    NOTES("exposed communication above 0 is explained away", '(row["exposed_ms"] or 0) < 0', '(row["exposed_ms"] or 0) != 0'),
    THREE("what is no QKV projection is cut like one", "if case.op == GEMM_A2A else None", "if True else None"),
    THREE("a QKV projection is cut into equal parts", "return (1, 1, 1) if model is None else", "return (1, 1, 1) if True else"),
    INPUTS("what does not fit into memory is forgotten",
           '    session.results.note(f"{case.name}: inputs: {problem}", failure=True)\n', ""),
    INPUTS("what does not fit into memory ends the run", "session.world.attempt(lambda: made.append(Inputs(case, session)))",
           "made.append(Inputs(case, session))"),
    TURNS("calls take turns in one order", "return random.Random(turn).sample(names, len(names))", "return list(names)"),
    TURNS("bursts are as long as ever", "if burst_ms else usual.burst", "if False else usual.burst"),
    STEPS_IN_TURNS("variants train in one order", "in order_of(names, turn) if", "in names if"),
    SAID("what has failed is said again beside each case", "new, self.told = self.notes[self.told :], len(self.notes)",
         "new = self.notes"),
    SAID("all notes are said beside each case", "if note.startswith(_FAILED)", ""),
]  # fmt: skip
