"""The ranks of this job: who am I, which device is mine, and one verdict for all."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gpt.errors import RecipeError

Result = TypeVar("Result")


@dataclass(frozen=True)
class World:
    """As torchrun started it; one process alone is a world of one."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device


def find_world() -> World:
    """Read torchrun's variables; nothing is started yet."""
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    size, local_size = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    return World(rank, size, local_rank, local_size, device)


def join(world: World) -> None:
    """Set the device and start torch.distributed: NCCL on GPUs, gloo on CPUs.

    Raises:
        RecipeError: more ranks on this node than GPUs.
    """
    on_gpu = world.device.type == "cuda"
    if on_gpu and world.local_size > torch.cuda.device_count():
        raise RecipeError(
            f"torchrun --nproc-per-node {world.local_size}: this node has {torch.cuda.device_count()} GPUs; start one "
            "process a GPU at most"
        )
    if on_gpu:
        torch.cuda.set_device(world.device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=None if "RANK" in os.environ else dist.HashStore(),
        rank=world.rank,
        world_size=world.size,
        timeout=datetime.timedelta(minutes=10),
    )


def on_every_rank(work: Callable[[], Result]) -> list[Result]:
    """Call `work` on every rank and return all results, or raise the first RecipeError, on every rank."""
    mine: Result | RecipeError
    try:
        mine = work()
    except RecipeError as error:
        mine = error
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, mine)
    for outcome in outcomes:
        if isinstance(outcome, RecipeError):
            raise outcome
    return outcomes


def on_rank_0(work: Callable[[], Result]) -> Result:
    """Call `work` on rank 0 while the others wait, and return its result, or raise its RecipeError, on every rank."""
    outcome: list[Result | RecipeError | None] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [work()]
        except RecipeError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], RecipeError):
        raise outcome[0]
    return outcome[0]  # type: ignore[return-value]
