"""Counters of overlapped linears for Megatron's TensorBoard and W&B writers.

    overlap_train/<slot>/overlapped_calls   forward calls that overlapped, of all linears of that slot on this rank
    overlap_train/<slot>/fallback_calls     forward calls that took Megatron's own path
    overlap_train/symmetric_mib             symmetric memory of this rank, in MiB

<slot> is a linear slot: qkv, proj, fc1, fc2 or output. Calls are counted from the start of the process, recomputed ones included.
Megatron writes from the last rank: with a pipeline these are the figures of the last stage.
"""

from __future__ import annotations

from collections import Counter

from overlap_train.group.registry import made_domain
from overlap_train.integrations.megatron.linears.in_model import Model, groups_of, overlapped_linears


def counters(model: Model) -> dict[str, float]:
    """Name -> value for the overlapped linears of a model or its chunks."""
    values: Counter[str] = Counter()
    linears = overlapped_linears(model)
    for overlap in (linear.overlap for linear in linears):
        values[f"overlap_train/{overlap.slot}/overlapped_calls"] += overlap.overlapped_calls
        values[f"overlap_train/{overlap.slot}/fallback_calls"] += overlap.fallback_calls.total()
    calling = [linear for linear in linears if linear.overlap.overlapped_calls]  # the others hold no memory
    groups = {group for linear in calling for group in groups_of(linear)}
    domains = [domain for group in groups if (domain := made_domain(group)) is not None and domain.heap is not None]
    held = sum(domain.layout.nbytes for domain in domains)
    return {**values, "overlap_train/symmetric_mib": held / 2**20}


def write_counters(model: Model, iteration: int) -> None:
    """Write them where Megatron writes, at its own interval (--tensorboard-log-interval); nothing without writers."""
    from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if not (tensorboard or wandb) or iteration % get_args().tensorboard_log_interval:
        return
    values = counters(model)
    if tensorboard:
        for name, value in values.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(values, iteration)
