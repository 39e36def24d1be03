"""Train a GPT on real text with Megatron-Core and, with --overlap-train, with overlapped linears.

    torchrun --nproc-per-node 2 recipes/pretrain_gpt.py --overlap-train
    torchrun --nproc-per-node 4 recipes/pretrain_gpt.py --overlap-train --model llama3-8b --num-layers 8     (GPUs)

Text, tokens (bytes), model, checkpoints: see the modules of recipes/gpt, one for each. Prints Megatron's iteration
lines, the validation loss next to that of a byte-bigram model, and a sample of generated text.
"""

from __future__ import annotations

import sys

from gpt.errors import refused_by_rule
from gpt.program import hush_megatron, run_program
from gpt.rules import check_device, resolve
from gpt.settings import HelpFormatter, Parser, Settings, add_settings, defaults, named_model, settings_from_args
from gpt.world import World, find_world, join
from overlap_train import OverlapConfig
from overlap_train.flags import add_flags, config_from_args

USAGE = "torchrun --nproc-per-node RANKS recipes/pretrain_gpt.py [flags]"


def main() -> int:
    """Run the recipe in this process; returns the exit status."""
    world = find_world()
    return run_program("pretrain_gpt", world.rank, lambda: train(world))


def train(world: World) -> None:
    """Read the flags, join the other ranks and train."""
    settings, overlap = read_flags(sys.argv[1:], world)
    join(world)
    hush_megatron()
    from gpt.run import run  # imports Megatron-Core, seconds that --help and a wrong flag need not wait for

    run(settings, overlap, world)


def read_flags(arguments: list[str], world: World) -> tuple[Settings, OverlapConfig | None]:
    """Checked settings, and the overlap that was asked for (None without --overlap-train).

    Raises:
        RecipeError: flags that are wrong by themselves or contradict each other.
    """
    parser = Parser("pretrain_gpt", usage=USAGE, description=__doc__, formatter_class=HelpFormatter)
    initial = defaults(world.device.type == "cuda", named_model(arguments))
    add_flags(add_settings(parser, initial))
    args = parser.parse_args(arguments)
    with refused_by_rule():
        overlap = config_from_args(args)
    settings = resolve(settings_from_args(args), world.size)
    check_device(settings, world.device.type == "cuda")
    return settings, overlap


if __name__ == "__main__":
    sys.exit(main())
