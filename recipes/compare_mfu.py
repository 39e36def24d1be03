"""Compare training with overlapped linears with Megatron-Core's own: the same model, data and seed, in turns, in one job.

    torchrun --standalone --nproc-per-node 4 recipes/compare_mfu.py --model llama3-8b,llama3-70b --global-batch-size 4

Variants: Megatron-Core alone, overlap_train, and PyTorch's async-TP where it can run; with --cp Ulysses by each method; when
asked for, TransformerEngine's modules with and without userbuffers. All are alive at the same time, each with its own model and
optimizer, and take turns of a few steps. For each: step time, MFU, tokens/s/GPU, communication that is not hidden
(recipes/mfu/linears.py) and losses. Writes mfu.json, mfu.md and mfu.png. docs/recipes.md explains the figures.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpt.program import RecipeError, join_ranks, refused_by_rule, run_program, say
from mfu.plan import read_flags, settings_for


def compare(arguments: list[str]) -> None:
    """Measure every model of the command line, or draw again what was measured. Raises RecipeError for wrong flags, or where
    variants did not run."""
    plan, overlap = read_flags(arguments, __doc__)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    from mfu import results

    if plan.redraw:
        with refused_by_rule():
            print(results.draw(Path(plan.redraw)))
        return
    every = [settings_for(plan, number, ranks) for number in range(len(plan.model))]
    from mfu.run import Comparison  # imports Megatron-Core: seconds that --help and a wrong flag need not wait for

    world, rows = join_ranks(every[0]), list[results.Row]()  # all models have the same division
    for settings in every:
        rows += Comparison(plan, settings, overlap, world).rows()
        table = results.write(plan, rows, world)  # after each model, so that none is lost
    say(f"\n{table}\n {plan.out}/mfu.json, mfu.md, mfu.png")
    missing = [row for row in rows if row["status"] != "ran" and row["variant"] != "async_tp"]
    if missing:
        reasons = "; ".join(f"{row['model']} {row['variant']}: {row['status']}" for row in missing)
        raise RecipeError(f"--variants {','.join(plan.variants)}: not all of them ran: {reasons}")


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # CUDA reads it when it starts; Megatron-Core asks for 1
    os.environ.setdefault("UB_SKIPMC", "1")  # userbuffers without NVLink multicast, as all others here
    sys.exit(run_program("compare_mfu", lambda: compare(sys.argv[1:])))
