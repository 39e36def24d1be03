"""Train a small GPT on real text with Megatron-Core and, with --overlap-train, with overlapped linears.

    torchrun --nproc-per-node 2 recipes/pretrain_gpt.py --overlap-train

Text, tokens (bytes), model, checkpoints: see the modules of recipes/gpt, one for each. Prints Megatron's iteration
lines, the validation loss next to that of a byte-bigram model, and a sample of generated text.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import warnings
from typing import NoReturn

import torch.distributed as dist

from gpt.errors import RecipeError, refused_by_rule
from gpt.rules import resolve
from gpt.settings import HelpFormatter, Parser, Settings, add_settings, defaults, settings_from_args
from gpt.world import World, find_world, join
from overlap_train import OverlapConfig, OverlapTimeoutError, shutdown
from overlap_train.flags import add_flags, config_from_args

TALKATIVE = ("models.gpt.gpt_model", "dist_checkpointing.strategies.torch", "distributed.distributed_data_parallel")
USAGE = "torchrun --nproc-per-node RANKS recipes/pretrain_gpt.py [flags]"


def main() -> int:
    """Run the recipe in this process; returns the exit status."""
    world = find_world()
    try:
        settings, overlap = read_flags(sys.argv[1:], world)
        join(world)
        hush_megatron()
        from gpt.run import run  # imports Megatron-Core, seconds that --help and a wrong flag need not wait for

        run(settings, overlap, world)
    except RecipeError as error:  # raised on every rank, told once
        if world.rank == 0:
            tell(error)
        leave()
        return 2
    except OverlapTimeoutError as error:  # names this rank and the peer that is missing
        tell(error)
        abandon()
    leave()
    return 0


def tell(error: Exception) -> None:
    """One line on the error stream."""
    sys.stdout.flush()
    print(f"pretrain_gpt: error: {error}", file=sys.stderr, flush=True)


def leave() -> None:
    """Free symmetric memory and the process groups; collective."""
    if dist.is_initialized():
        shutdown()
        dist.destroy_process_group()


def abandon() -> NoReturn:
    """Exit at once: leaving in good order would wait for a peer that is gone."""
    for child in multiprocessing.active_children():  # the queue process of Megatron's checkpoint writer
        child.kill()
    os._exit(3)


def hush_megatron() -> None:
    """Drop what would be said on every start and every rank and asks nothing of the user.

    Megatron-Core: that TransformerEngine and Apex are missing, which is meant so here; that HybridModel follows
    GPTModel, though its layers exist for TransformerEngine only. torch: new names for what Megatron-Core calls.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.checkpoint")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    for name in TALKATIVE:
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)


def read_flags(arguments: list[str], world: World) -> tuple[Settings, OverlapConfig | None]:
    """Checked settings, and the overlap that was asked for (None without --overlap-train).

    Raises:
        RecipeError: flags that are wrong by themselves or contradict each other.
    """
    parser = Parser("pretrain_gpt", usage=USAGE, description=__doc__, formatter_class=HelpFormatter)
    add_flags(add_settings(parser, defaults(on_gpu=world.device.type == "cuda")))
    args = parser.parse_args(arguments)
    with refused_by_rule():
        overlap = config_from_args(args)
    return resolve(settings_from_args(args), world.size), overlap


if __name__ == "__main__":
    sys.exit(main())
