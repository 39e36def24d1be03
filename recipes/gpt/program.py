"""What the recipes' programs have in common: errors of the user, an orderly end, and less noise from Megatron-Core."""

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
from typing import NoReturn

import torch.distributed as dist

from overlap_train import OverlapTimeoutError, shutdown
from overlap_train.flags import tell
from overlap_train.tools.measure.world import World, join

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


def join_ranks(minutes: float = 10) -> World:
    """Start torch.distributed over the ranks of torchrun, or over this process alone, and silence Megatron-Core.

    Args:
        minutes: how long a collective may take; a checkpoint of a large model takes its time.

    Raises:
        RecipeError: more ranks on this node than GPUs.
    """
    _hush_megatron()
    with refused_by_rule():
        return join(may_be_alone=True, minutes=minutes)


def run_program(name: str, work: Callable[[], None]) -> int:
    """Call `work` in this process of the program `name`; returns the exit status."""
    refusal = None
    try:
        work()
    except RecipeError as error:
        refusal = str(error)  # without its traceback, which would keep process groups alive
    except OverlapTimeoutError as error:  # names this rank and the peer that is missing
        sys.stdout.flush()
        print(f"{name}: error: {error}", file=sys.stderr, flush=True)
        abandon()
    except RuntimeError as error:
        # It waited its time, or its peer closed the connection. NCCL's watchdog ends the process by itself.
        if "gloo/transport" not in str(error):
            raise
        traceback.print_exc()  # shows which collective it was
        reason = str(error).splitlines()[0]
        print(
            f"{name}: error: a collective of Megatron's or torch's own lost a rank: {reason}",
            file=sys.stderr,
            flush=True,
        )
        abandon()
    if refusal is not None and is_rank_0():  # before ranks have joined all are; then `tell` chooses
        tell(f"{name}: error: {refusal}")
    leave()
    return 0 if refusal is None else 2


def say(text: str) -> None:
    """Print one line from rank 0."""
    if is_rank_0():
        print(text, flush=True)


def is_rank_0() -> bool:
    """Whether this is rank 0 of the job, as far as is known: before ranks have joined, every process is."""
    return not dist.is_initialized() or dist.get_rank() == 0


def leave() -> None:
    """Free symmetric memory and the process groups; collective.

    Megatron-Core holds groups in its globals. Left to the end of the interpreter, gloo's threads are still at work then and
    sometimes end the process by SIGABRT (seen once in eight runs of the whole suite).
    """
    if dist.is_initialized():
        shutdown()
        state = sys.modules.get("megatron.core.parallel_state")
        if state is not None:
            state.destroy_model_parallel()
        dist.destroy_process_group()
        gc.collect()


def abandon() -> NoReturn:
    """Exit at once: an orderly end would wait for a peer that is gone."""
    for child in multiprocessing.active_children():  # the queue process of Megatron's checkpoint writer
        child.kill()
    os._exit(3)


def _hush_megatron() -> None:
    """Drop messages that every start prints on every rank and that ask nothing of the user.

    Megatron-Core says that TransformerEngine and Apex are missing, as intended here. torch deprecates names that Megatron-Core
    calls.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.checkpoint")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    for name in TALKATIVE:
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)
