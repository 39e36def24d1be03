"""Compare training with overlapped linears with Megatron-Core's own: the same model, data and seed, in turns, in one job.

    torchrun --standalone --nproc-per-node 4 recipes/compare_mfu.py --model llama3-8b,llama3-70b --global-batch-size 4

Variants: Megatron-Core alone and overlap_train, also by one method only or as a CUDA graph; TransformerEngine's modules, its
userbuffers, and ours on them; with --cp Ulysses by each method. All are alive at the same time, each with its own model and
optimizer, and take turns of a few steps. For each: step time, the GPU's part of it, MFU, tokens/s/GPU, communication that is not
hidden and losses. Writes mfu.json, mfu.md and mfu.png. docs/recipes.md explains the figures.
"""

from __future__ import annotations

import os
import sys

import torch

from gpt.program import join_ranks, run_program, say
from mfu.plan import read_flags, settings_for


def compare(arguments: list[str]) -> None:
    """Measure every model of the command line. Raises RecipeError for what the user can put right."""
    plan, overlap = read_flags(arguments, __doc__)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    every = [settings_for(plan, number, ranks) for number in range(len(plan.model))]
    from mfu import results  # imports Megatron-Core: seconds that --help and a wrong flag need not wait for
    from mfu.run import Comparison

    world, rows, table = join_ranks(every[0]), list[results.Row](), ""  # all models have the same division
    for settings in every:
        try:
            found = Comparison(plan, settings, overlap, world)
            found.train()
            found.time_passes()
            found.profile()
        except torch.OutOfMemoryError:  # on this rank: the others may wait for it
            way_out = "all variants are in memory side by side: name fewer (--variants), or fewer layers (--layers)"
            print(f"compare_mfu: {way_out}", file=sys.stderr, flush=True)
            raise
        rows += results.rows_of(found)
        found.close()
        table = results.write(plan, rows, world)  # after each model, so that none is lost
    say(f"\n{table}\n {plan.out}/mfu.json, mfu.md, mfu.png")


if __name__ == "__main__":
    os.environ.setdefault("UB_SKIPMC", "1")  # userbuffers without NVLink multicast, as all others here
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # CUDA reads it when it starts; Megatron-Core asks for 1
    sys.exit(run_program("compare_mfu", lambda: compare(sys.argv[1:])))
