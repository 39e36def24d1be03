"""Compare training with overlapped linears with Megatron-Core's own: the same model, data and seed, in turns, in one job.

    torchrun --nproc-per-node 4 recipes/compare_mfu.py --model llama3-8b,llama3-70b --layers 4,2 --global-batch-size 4

Variants: Megatron-Core alone, overlap_train, PyTorch's async-TP and TransformerEngine's userbuffers where they can run. All are
alive at the same time, each with its own model and optimizer, and take turns of a few steps. Of each: step time, tokens/s/GPU,
model TFLOP/s/GPU and MFU (FLOPs and peak: recipes/mfu/flops.py), communication that is not hidden (recipes/mfu/alone.py), losses
and memory. Writes mfu.json, mfu.md and mfu.png, losses.json and timeline.json, and for each model loss-*.png and, on GPUs,
timeline-*.png. docs/recipes.md explains the figures.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from typing import TYPE_CHECKING

from gpt.errors import refused_by_rule
from gpt.program import hush_megatron, run_program
from mfu.plan import Plan, parser, plan_from_args, settings_for
from overlap_train import OverlapConfig
from overlap_train.flags import config_from_args

if TYPE_CHECKING:
    from gpt.world import World
    from mfu.measuring import Measured


def main() -> int:
    """Run the comparison in this process; returns the exit status."""
    return run_program("compare_mfu", int(os.environ.get("RANK", "0")), lambda: compare(sys.argv[1:]))


def compare(arguments: list[str]) -> None:
    """Measure every model of the command line and write what was found after each of them.

    Raises:
        RecipeError: flags that are wrong by themselves or contradict each other.
    """
    began = time.monotonic()
    plan, overlap = read_flags(arguments)
    set_variables(plan)
    from gpt.world import find_world, join

    world = find_world()
    for number in range(len(plan.models)):  # all are checked before the first begins
        settings_for(plan, number, world.size)
    join(world)
    hush_megatron()
    from mfu.results import Writer  # imports Megatron-Core, seconds that --help and a wrong flag need not wait for

    writer = Writer(plan, world)
    for number in range(len(plan.models)):
        writer.add(measure(plan, number, overlap, world))
        gc.collect()  # a model and its optimizer know each other
    writer.conclude(time.monotonic() - began)


def read_flags(arguments: list[str]) -> tuple[Plan, OverlapConfig]:
    """The checked plan and the settings of the overlapped variant."""
    top = parser()
    top.description, top.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    args = top.parse_args(arguments)
    plan = plan_from_args(args)
    args.overlap_train = True  # one of the variants has it in any case
    with refused_by_rule():
        overlap = config_from_args(args)
    assert overlap is not None
    return plan, overlap


def set_variables(plan: Plan) -> None:
    """What CUDA reads when it starts."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(plan.connections)


def measure(plan: Plan, number: int, overlap: OverlapConfig, world: World) -> Measured:
    """Everything about one model; its variants are gone from memory afterwards."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from gpt.run import make_deterministic
    from mfu.measuring import compare as compare_variants
    from overlap_train.bench.world import World as Ranks
    from overlap_train.integrations.megatron import run_without_cuda

    run_without_cuda()
    settings = settings_for(plan, number, world.size)
    make_deterministic(settings)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=settings.tp)
    ranks = Ranks(dist.group.WORLD, world.device, world.rank, world.size)
    measured = compare_variants(plan, number, overlap, ranks)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return measured


if __name__ == "__main__":
    sys.exit(main())
