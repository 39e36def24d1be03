"""What the recipes' programs have in common: one line for a mistake, an orderly end, and less noise from Megatron-Core."""

from __future__ import annotations

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
    try:
        work()
    except RecipeError as error:  # raised on every rank, told once
        if rank == 0:
            tell(name, error)
        leave()
        return 2
    except OverlapTimeoutError as error:  # names this rank and the peer that is missing
        tell(name, error)
        abandon()
    leave()
    return 0


def tell(name: str, error: Exception) -> None:
    """One line on the error stream."""
    sys.stdout.flush()
    print(f"{name}: error: {error}", file=sys.stderr, flush=True)


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
