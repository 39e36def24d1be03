"""Compare training with overlapped linears with Megatron-Core's own: the same model, data and seed, in turns, in one job.

    torchrun --standalone --nproc-per-node 4 recipes/compare_mfu.py --model llama3-8b,llama3-70b --global-batch-size 4

Variants: Megatron-Core alone, overlap_train, and PyTorch's async-TP where it can run; with --cp Ulysses by each method; when
asked for, TransformerEngine's modules with and without userbuffers. All are alive at the same time, each with its own model and
optimizer, and take turns of a few steps. For each: step time, tokens/s/GPU, model TFLOP/s/GPU and MFU (FLOPs and peak:
recipes/mfu/flops.py), communication that is not hidden (recipes/mfu/alone.py), losses and memory. Writes mfu.json, mfu.md and
mfu.png, losses.json and timeline.json, and for each model loss-*.png and, on GPUs, timeline-*.png. docs/recipes.md explains the
figures.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpt import check_packages

if TYPE_CHECKING:
    from mfu.plan import Plan
    from overlap_train import OverlapConfig


def main() -> int:
    """Run the comparison in this process; returns the exit status."""
    check_packages("compare_mfu")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # CUDA reads it when it starts; Megatron-Core asks for 1
    os.environ.setdefault(
        "UB_SKIPMC", "1"
    )  # TransformerEngine's userbuffers without NVLink multicast, as all others here
    from gpt.program import run_program

    return run_program("compare_mfu", lambda: compare(sys.argv[1:]))


def compare(arguments: list[str]) -> None:
    """Measure every model of the command line, or draw again what was measured.

    Raises:
        RecipeError: flags that are wrong by themselves or contradict each other.
    """
    from gpt.program import refused_by_rule
    from mfu.plan import read_flags, settings_for

    plan, overlap = read_flags(arguments, __doc__)
    if plan.redraw:
        from mfu import pictures

        with refused_by_rule():
            print(*pictures.draw(Path(plan.redraw)), sep="\n")
        return
    for number in range(len(plan.model)):  # all are checked before the first begins
        settings_for(plan, number, int(os.environ.get("WORLD_SIZE", "1")))
    measure(plan, overlap)


def measure(plan: Plan, overlap: OverlapConfig) -> None:
    """Join the ranks, and measure the models of a plan. What was found is written after each of them."""
    began = time.monotonic()
    import torch  # from here on imports take seconds, which --help and a wrong flag need not wait for

    from gpt.program import join_ranks
    from gpt.run import make_deterministic
    from mfu import measuring
    from mfu.current import Layouts
    from mfu.plan import settings_for
    from mfu.results import Writer
    from overlap_train.integrations.megatron import run_without_cuda

    world = join_ranks()
    run_without_cuda()
    writer, layouts = Writer(plan, world), Layouts()
    for number in range(len(plan.model)):
        make_deterministic(settings_for(plan, number, world.size))
        writer.add(measuring.compare(plan, number, overlap, world, layouts))
        gc.collect()  # a model and its optimizer refer to each other
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    writer.conclude(time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
