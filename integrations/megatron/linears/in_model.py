"""The parallel linears of a model: which there are, what linear slot each has, and how one is overlapped in place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron.linears.column_row import OVERLAPPED, attach
from overlap_train.integrations.megatron.linears.conditions import divides_weights, standing_reason
from overlap_train.integrations.megatron.linears.state import LinearOverlap
from overlap_train.integrations.megatron.linears.transformer_engine import (
    is_te_linear,
    overlap_te_linear,
    standing_te_reason,
)
from overlap_train.integrations.megatron.linears.ulysses import exchanges

Model = torch.nn.Module | Sequence[torch.nn.Module]

# How Megatron-Core names the linears in its modules -> our name of the linear slot.
SLOT_OF_ATTRIBUTE = {
    "linear_qkv": "qkv",
    "linear_proj": "proj",
    "linear_fc1": "fc1",
    "linear_fc2": "fc2",
    "output_layer": "output",
}


def chunks_of(model: Model) -> list[torch.nn.Module]:
    """A model, or the chunks of a virtual pipeline, as a list."""
    return [model] if isinstance(model, torch.nn.Module) else list(model)


def named_linears(model: Model) -> Iterator[tuple[str, Any]]:
    """(name, module) of the modules in one of our linear slots and of all other parallel linears of Megatron's own classes.

    Names are those of the bare model, without the wrappers' leading "module."; of several chunks with "chunk0." before them.
    """
    chunks = chunks_of(model)
    for index, chunk in enumerate(chunks):
        prefix = f"chunk{index}." if len(chunks) > 1 else ""
        for name, module in chunk.named_modules():
            if (slot_of(name) is not None and hasattr(module, "weight")) or _is_own(module):
                yield prefix + re.sub(r"^(module\.)+", "", name), module


def overlapped_linears(model: Model) -> list[Any]:
    return [linear for _, linear in named_linears(model) if is_overlapped(linear)]


def slot_of(name: str) -> str | None:
    """ "decoder.layers.0.mlp.linear_fc1" -> "fc1"; None for a name that is no linear slot."""
    return SLOT_OF_ATTRIBUTE.get(name.rpartition(".")[2])


def is_overlapped(linear: Any) -> bool:
    return isinstance(getattr(linear, "overlap", None), LinearOverlap)


def is_row(linear: Any) -> bool:
    """Whether it is a row linear, Megatron's or an overlapped one of TransformerEngine."""
    return hasattr(linear, "input_is_parallel")


def groups_of(linear: Any) -> list[dist.ProcessGroup]:
    """The groups over which an overlapped linear communicates, the last call's last."""
    exchanging = list(linear.overlap.groups) if exchanges(linear) else []
    return [*exchanging, linear.tp_group] if not exchanges(linear) or divides_weights(linear) else exchanging


def is_candidate(linear: Any) -> bool:
    """Whether a linear overlaps, or is of a class that has an overlapped form and is no expert."""
    if is_overlapped(linear):
        return True
    if is_te_linear(linear):
        return linear.parallel_mode is not None
    return type(linear) in OVERLAPPED and not linear.is_expert


def why_not(linear: Any) -> str | None:
    """Why no call of a linear can overlap, of which `is_overlapped` is false; None: some can."""
    if is_te_linear(linear):
        return standing_te_reason(linear)
    if type(linear) not in OVERLAPPED:
        return f"{type(linear).__name__} has no overlapped form"
    return standing_reason(linear, weight=None)


def overlap_linear(linear: Any, config: OverlapConfig, slot: str, name: str) -> None:
    """Overlap a linear of which `why_not` is None, in place: only its class changes."""
    if is_te_linear(linear):
        overlap_te_linear(linear, config, slot, name)
    else:
        linear.__class__ = OVERLAPPED[type(linear)]
        attach(linear, LinearOverlap(config, slot, name))


def _is_own(module: torch.nn.Module) -> bool:
    return type(module) in OVERLAPPED or type(module) in OVERLAPPED.values()
