"""One outcome for all ranks: what one of them refuses, all refuse with the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from gpt.program import RecipeError

Result = TypeVar("Result")


def on_every_rank(work: Callable[[], Result], target: str = "") -> list[Result]:
    """Call `work` on every rank and return all results in the order of the ranks.

    Args:
        target: `--save DIR`, where `work` writes; an OSError becomes a RecipeError that names it.

    Raises:
        RecipeError: on every rank, the first one that any rank raised.
    """
    mine: Any
    try:
        mine = _written(work, target)
    except RecipeError as error:
        mine = error
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, mine)
    for outcome in outcomes:
        if isinstance(outcome, RecipeError):
            raise outcome
    return outcomes


def on_rank_0(work: Callable[[], Result], target: str = "") -> Result:
    """Call `work` on rank 0 and return its result on every rank; otherwise as on_every_rank."""
    results = on_every_rank(lambda: work() if dist.get_rank() == 0 else None, target)
    return results[0]  # type: ignore[return-value]


def _written(work: Callable[[], Result], target: str) -> Result:
    try:
        return work()
    except OSError as error:
        if not target:
            raise
        raise RecipeError(f"{target} cannot be written: {error.strerror or error}") from error
