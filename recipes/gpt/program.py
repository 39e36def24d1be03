"""What the recipes' programs have in common: one line for a mistake, an orderly end, and less noise from Megatron-Core."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from gpt.errors import RecipeError
from overlap_train import OverlapTimeoutError, shutdown

TALKATIVE = ("models.gpt.gpt_model", "dist_checkpointing.strategies.torch", "distributed.distributed_data_parallel")


def run_program(name: str, rank: int, work: Callable[[], None]) -> int:
    """Call `work` in this process of the program `name`; returns the exit status."""
    refusal = None
    try:
        work()
    except RecipeError as error:  # raised on every rank, told once
        refusal = str(error)  # without its traceback, which would keep process groups alive
    except OverlapTimeoutError as error:  # names this rank and the peer that is missing
        tell(name, str(error))
        abandon()
    if refusal is not None and rank == 0:
        tell(name, refusal)
    leave()
    return 0 if refusal is None else 2


def tell(name: str, error: str) -> None:
    """One line on the error stream."""
    sys.stdout.flush()
    print(f"{name}: error: {error}", file=sys.stderr, flush=True)


def leave() -> None:
    """Free symmetric memory and the process groups; collective.

    Megatron-Core holds groups in its globals. Left to the end of the interpreter, gloo's threads are still at work then, and now
    and then end the process by SIGABRT instead of with its exit status (seen once in eight runs of the whole suite).
    """
    if dist.is_initialized():
        shutdown()
        state = sys.modules.get("megatron.core.parallel_state")
        if state is not None:
            state.destroy_model_parallel()
        dist.destroy_process_group()
        gc.collect()


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
