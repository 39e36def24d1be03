"""The table of a model's linears, printed by one rank for all whose table is the same: when overlap is enabled, and once more
where it then ran otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from overlap_train.integrations.megatron.fallback import standing_reason
from overlap_train.integrations.megatron.linear import OVERLAPPED
from overlap_train.integrations.megatron.reporting import Report, choices, expected_choices, named_linears, report


def announce(table: Report, heading: str = "") -> None:
    """Print it on global rank 0 and, in a pipeline, on the first rank of each other stage."""
    if _prints():
        print(f"{_stage()}{heading}{table}", flush=True)


def announce_changes(model: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
    """Behind the first step: print what has run, with the calls, where it is not what enable() announced. Does not communicate.

    enable() knows neither M, by which `auto` chooses, nor what single calls are like.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    linears = [linear for chunk in chunks for _, linear in named_linears(chunk) if type(linear) in OVERLAPPED.values()]
    if any(_is_unexpected(linear) for linear in linears):
        announce(report(chunks), "what has run, now that sizes are known:\n")


def _is_unexpected(linear: Any) -> bool:
    if standing_reason(linear, linear.weight) is not None:
        return False  # all of its calls are Megatron's own, as announced
    ran, expected = ([(choice.method, choice.way) for choice in how(linear)] for how in (choices, expected_choices))
    return ran != expected or bool(linear.overlap.fallback_calls)


def _prints() -> bool:
    """Whether this rank speaks for the ranks whose table is the same: those of its pipeline stage."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        return True
    if not _stage():
        return False
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return parallel_state.get_tensor_model_parallel_rank() == 0 and replica == 0


def _stage() -> str:
    """A heading for the table of a pipeline stage; empty without a pipeline."""
    if not parallel_state.model_parallel_is_initialized():
        return ""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return (
        f"pipeline stage {parallel_state.get_pipeline_model_parallel_rank()} of {stages}, layers counted within it:\n"
        if stages > 1
        else ""
    )
