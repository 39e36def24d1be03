"""Train a GPT on real text with Megatron-Core and, with --overlap-train, with overlapped linears.

    torchrun --standalone --nproc-per-node 2 recipes/pretrain_gpt.py --overlap-train
    torchrun --standalone --nproc-per-node 4 recipes/pretrain_gpt.py --overlap-train --model llama3-8b --num-layers 8     (GPUs)

The text is read as bytes. Prints Megatron's iteration lines, the validation loss next to that of a byte-bigram model, and a
sample of generated text. recipes/gpt has the parts; recipes/gpt/loop.py is where to begin.
"""

import os
import sys

import torch

from gpt.program import run_program
from gpt.settings import read_flags


def train() -> None:
    """Read the flags and train. Raises RecipeError, on every rank, for what the user can put right."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    settings, overlap = read_flags(sys.argv[1:], __doc__, ranks, torch.cuda.is_available())
    from gpt.loop import run  # imports Megatron-Core: seconds that --help and a wrong flag need not wait for

    run(settings, overlap)


if __name__ == "__main__":
    sys.exit(run_program("pretrain_gpt", train))
