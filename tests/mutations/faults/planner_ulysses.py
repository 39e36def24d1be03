"""Faults of the planner under Ulysses alone: passes over memory beside an exchange, and what it takes without overlap."""

from __future__ import annotations

from tests.mutations.mutation import In

ALONE = "tests/unit/test_plan_ulysses.py"
COPIES = In("overlap_train/tools/plan/simulation/copies.py", (ALONE,))
COST = In("overlap_train/planning/cost.py", (ALONE,))
PROGRAMS = In("overlap_train/tools/plan/simulation/programs.py", (ALONE,))
BACKWARD = In("overlap_train/tools/plan/simulation/backward.py", (ALONE,))
PREDICTION = In("overlap_train/tools/plan/prediction.py", (ALONE,))
GROUPS = In("overlap_train/tools/plan/two_groups.py", ("tests/unit/test_plan_two_groups.py",))

FAULTS = [
    COPIES("ulysses plan: heads are packed for nothing", 'else [_heads(work, "pack")]', "else []"),
    COPIES("ulysses plan: rows are in order", '[_order(work, "index_select")] if', "[] if"),
    COPIES("ulysses plan: an own block need not be unpacked", "2 * work.world * work.shard_bytes + work.side",
           "2 * (work.world - 1) * work.shard_bytes + work.side"),
    COPIES("ulysses plan: cos and sin are there", " + work.side.angle_bytes, f", ", f"),
    COPIES("ulysses plan: torch copies as fast as kernels of ours", "cost.torch_copy_us(work", "cost.sum_us(work"),
    COPIES("ulysses plan: NCCL leaves a slot, too", '[] if work.plan.method == "collective" else [copied', "[copied"),
    COST("ulysses plan: torch copies are faster than memory", "sum_us(system, nbytes) / system.torch_copy",
         "sum_us(system, nbytes) * system.torch_copy"),
    PROGRAMS("ulysses plan: rows leave before they are packed", "[*give(work), *start, *kernels]",
             "[*start, *give(work), *kernels]"),
    PROGRAMS("ulysses plan: NCCL sends columns as they lie", "[] if scatters else [put_together(work)]", "[]"),
    PROGRAMS("ulysses plan: blocks come side by side", "[] if gathers else [put_together(work)]", "[]"),
    PROGRAMS("ulysses plan: NCCL gives the attention what it wants", "[_by_nccl(work), *_out_of_slot(work)]", "[_by_nccl(work)]"),
    BACKWARD("ulysses plan: x is in the ranks' order", "[*give(again), *epoch(work", "[*epoch(work"),
    BACKWARD("ulysses plan: without overlap x is sent again", "(2 if work.plan.kind == SCATTER else 1)", "2"),
    BACKWARD("ulysses plan: NCCL runs beside products", "if work.plan.kind == SCATTER else _exchanged_by_nccl(work)",
             "if True else _exchanged_by_nccl(work)"),
    PREDICTION("ulysses plan: an attention has what is exchanged", "if pass_.kind in EXCHANGES else None", "if False else None"),
    PREDICTION("ulysses plan: each sequence has its cos and sin", "float(strategy.seq * model", "float(strategy.rows * model"),
    GROUPS("grid: each rank has cos and sin of its rows", "float(s.ranks * ANGLE_BYTES", "float(ANGLE_BYTES"),
]  # fmt: skip
