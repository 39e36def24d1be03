"""What the recipes' programs have in common: errors of the user, the start of the ranks, and an orderly end."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist

from overlap_train import OverlapTimeoutError, shutdown
from overlap_train.flags import tell
from overlap_train.integrations.megatron import missing, run_without_cuda
from overlap_train.tools.measure.world import World, join

if TYPE_CHECKING:
    from gpt.settings import Settings

TALKATIVE = ("models.gpt.gpt_model", "dist_checkpointing.strategies.torch", "distributed.distributed_data_parallel")


class RecipeError(Exception):
    """What a user can put right. Every rank raises it with the same text, and rank 0 prints the text as one line."""


@contextlib.contextmanager
def refused_by_rule() -> Iterator[None]:
    """Turn a library's ValueError, which names argument, value and rule, into a RecipeError."""
    try:
        yield
    except ValueError as error:
        raise RecipeError(" ".join(str(error).split())) from error


def join_ranks(settings: Settings) -> World:
    """Start torch.distributed over the ranks of torchrun or over this process alone, and divide the ranks into Megatron-Core's
    groups.

    Raises:
        RecipeError: this node has more ranks than GPUs.
    """
    minutes = settings.distributed_timeout_minutes
    with refused_by_rule():
        world = join(may_be_alone=True, minutes=minutes)
    run_without_cuda()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        settings.tp, context_parallel_size=settings.cp, distributed_timeout_minutes=minutes
    )
    return world


def run_program(name: str, work: Callable[[], None]) -> int:
    """Call `work` in this process of the program `name`; returns the exit status."""
    # What asks nothing of the user: that Apex and TransformerEngine are missing, and that names are deprecated.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron|torch\.distributed\.checkpoint")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    for talker in TALKATIVE:
        logging.getLogger(f"megatron.core.{talker}").setLevel(logging.ERROR)
    refusal = None
    try:
        work()
    except RecipeError as error:
        refusal = str(error)  # without its traceback, which would keep process groups alive
    except ImportError as error:
        if (refusal := missing(error)) is None:
            raise
    except OverlapTimeoutError as error:  # names this rank and the peer that is missing
        _abandon(name, str(error))
    except RuntimeError as error:  # of gloo; NCCL's watchdog ends the process itself
        if "gloo/transport" not in str(error):
            raise
        traceback.print_exc()  # shows which collective it was
        _abandon(name, f"a collective of Megatron's or torch's own lost a rank: {str(error).splitlines()[0]}")
    if refusal is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        tell(f"{name}: error: {refusal}")
    if dist.is_initialized():  # groups have threads, which may abort the interpreter at its end
        shutdown()
        sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
        dist.destroy_process_group()
        gc.collect()
    return 0 if refusal is None else 2


def say(text: str) -> None:
    """Print one line from rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def _abandon(name: str, problem: str) -> None:
    """Exit at once: an orderly end would wait for a peer that is gone."""
    sys.stdout.flush()
    print(f"{name}: error: {problem}", file=sys.stderr, flush=True)
    for child in multiprocessing.active_children():  # the queue process of Megatron's checkpoint writer
        child.kill()
    os._exit(3)
