"""Counters of overlapped linears for Megatron's TensorBoard and W&B writers.

    overlap_train/<slot>/overlapped_calls   forward calls that overlapped, of all linears of a slot on this rank
    overlap_train/<slot>/fallback_calls     forward calls that took Megatron's own path
    overlap_train/symmetric_mib             symmetric memory of this rank, in MiB

Calls are counted from the start of the process, recomputed ones included. Megatron writes from the last rank, so with a
pipeline these are the figures of the last stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from overlap_train.integrations.megatron.linear import OVERLAPPED
from overlap_train.integrations.megatron.reporting import named_linears
from overlap_train.registry import made_domain


def counters(chunks: Sequence[torch.nn.Module]) -> dict[str, float]:
    """Name -> value for the overlapped linears of a model's chunks."""
    values: dict[str, float] = {}
    for linear in _overlapped(chunks):
        overlap, prefix = linear.overlap, f"overlap_train/{linear.overlap.slot}"
        for name, calls in (
            ("overlapped_calls", overlap.overlapped_calls),
            ("fallback_calls", overlap.fallback_calls.total()),
        ):
            values[f"{prefix}/{name}"] = values.get(f"{prefix}/{name}", 0) + calls
    values["overlap_train/symmetric_mib"] = _symmetric_bytes(chunks) / 2**20
    return values


def write_counters(chunks: Sequence[torch.nn.Module], iteration: int) -> None:
    """Write them where Megatron writes, at its own interval (--tensorboard-log-interval); nothing without writers."""
    from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if not (tensorboard or wandb) or iteration % get_args().tensorboard_log_interval:
        return
    values = counters(chunks)
    if tensorboard:
        for name, value in values.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(values, iteration)


def _overlapped(chunks: Sequence[torch.nn.Module]) -> Iterator[Any]:
    for chunk in chunks:
        for _, linear in named_linears(chunk):
            if type(linear) in OVERLAPPED.values():
                yield linear


def _symmetric_bytes(chunks: Sequence[torch.nn.Module]) -> int:
    """Of the domains that have been called; the others hold none."""
    groups = {linear.tp_group for linear in _overlapped(chunks) if linear.overlap.overlapped_calls}
    return sum(domain.layout.nbytes for group in groups if (domain := made_domain(group)) is not None)
