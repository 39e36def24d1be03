"""Train a GPT on real text with Megatron-Core and, with --overlap-train, with overlapped linears.

    torchrun --standalone --nproc-per-node 2 recipes/pretrain_gpt.py --overlap-train
    torchrun --standalone --nproc-per-node 4 recipes/pretrain_gpt.py --overlap-train --model llama3-8b --num-layers 8     (GPUs)

The text is read as bytes. Prints Megatron's iteration lines, the validation loss next to that of a byte-bigram model, and a
sample of generated text. The modules of recipes/gpt have the parts: text, model, training, checkpoints, sample.
"""

from __future__ import annotations

import os
import sys

from gpt import check_packages


def main() -> int:
    """Run the recipe in this process; returns the exit status."""
    check_packages("pretrain_gpt")
    from gpt.program import run_program

    return run_program("pretrain_gpt", lambda: train(sys.argv[1:]))


def train(arguments: list[str]) -> None:
    """Read the flags, join the other ranks and train.

    Raises:
        RecipeError: flags that are wrong by themselves or contradict each other, or what the run itself refuses.
    """
    import torch

    from gpt.program import join_ranks
    from gpt.rules import read_flags

    size, on_gpu = int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.is_available()
    settings, overlap, notes = read_flags(arguments, __doc__, size, on_gpu)
    world = join_ranks(settings.distributed_timeout_minutes)
    for note in notes:
        world.say(f" {note}")
    from gpt.run import run  # imports Megatron-Core: seconds that --help and a wrong flag need not wait for

    run(settings, overlap, world)


if __name__ == "__main__":
    sys.exit(main())
