"""enable(): turn the parallel linears of a built Megatron-Core model into overlapped ones, in place.

Only the class of a linear changes: parameters, their attributes, hooks and checkpoint keys are the same objects as
before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron.announcing import announce
from overlap_train.integrations.megatron.conditions import WAY_TO_FALL_BACK, bad_combination
from overlap_train.integrations.megatron.fallback import standing_reason
from overlap_train.integrations.megatron.linear import OVERLAPPED, attach
from overlap_train.integrations.megatron.reporting import Report, named_linears, report, slot_of
from overlap_train.integrations.megatron.transformer_engine import is_te_linear, overlap_te_linear

Model = torch.nn.Module | Sequence[torch.nn.Module]


def enable(model: Model, config: OverlapConfig | None = None) -> Report:
    """Overlap the linears of `config.slots` in a model, or in the chunks of a virtual pipeline; before DDP wraps it.

    Collective only in that every rank of the job must call it with the same config; it does not communicate. Linears
    that cannot overlap (experts, generalized tensor parallelism) are left as they are, and the report says why.
    Global rank 0 prints the report, and in a pipeline the first rank of each other stage that of its stage. A second
    call with the same config changes nothing.

    Returns:
        Report: which linear takes which path and why; `report(model)` returns it again, with the calls counted so far.

    Raises:
        ValueError: the model is wrapped already, its settings rule out overlap, it lacks a linear for a slot of
            config.slots, or it was enabled with another config. With config.on_unsupported="fallback" the first three
            leave the linears concerned to Megatron instead, and the report says so.
    """
    config = config or OverlapConfig()
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    _refuse_other_config(chunks, config)
    hopeless = _problem_of_model(chunks)
    problem = hopeless or _missing_slot(chunks, config)
    if problem is not None and config.on_unsupported == "error":
        raise ValueError(problem)
    if hopeless is None:
        for chunk in chunks:
            _enable_chunk(chunk, config)
    result = report(chunks, problem)
    announce(result)
    return result


def _enable_chunk(chunk: torch.nn.Module, config: OverlapConfig) -> None:
    for name, slot, linear in _wanted(chunk, config):
        if type(linear) in OVERLAPPED.values():
            linear.overlap.name = name  # a linear that was built from our layer spec did not know its place
        elif type(linear) not in OVERLAPPED:
            overlap_te_linear(linear, config, slot, name)
        elif standing_reason(linear, weight=None) is None:
            linear.__class__ = OVERLAPPED[type(linear)]
            attach(linear, config, slot, name)


def _wanted(chunk: torch.nn.Module, config: OverlapConfig) -> Iterator[tuple[str, str, Any]]:
    """(name, slot, module) of the linears in the slots asked for."""
    for name, linear in named_linears(chunk):
        slot = slot_of(name)
        if slot is not None and slot in config.slots:
            yield name, slot, linear


def _problem_of_model(chunks: Sequence[torch.nn.Module]) -> str | None:
    """What rules out overlap for the whole model, or None."""
    if not chunks:
        return "model=[]: no model chunk to enable; pass the model, or the list of chunks that get_model returns"
    for chunk in chunks:
        wrapper = _data_parallel_wrapper(chunk)
        if wrapper is not None:
            return (
                f"model is wrapped in {wrapper} already: enable() must come before data parallelism wraps the model, "
                f"because that fixes how gradients are collected; call it on the bare model, {WAY_TO_FALL_BACK}"
            )
    model_config = next((c for chunk in chunks if (c := _config_of(chunk)) is not None), None)
    return None if model_config is None else bad_combination(model_config)


def _data_parallel_wrapper(chunk: torch.nn.Module) -> str | None:
    wrappers = (_BaseDataParallel, torch.nn.parallel.DistributedDataParallel)
    for module in chunk.modules():
        if isinstance(module, wrappers):
            return type(module).__name__
    has_buffer = any(hasattr(parameter, "main_grad") for parameter in chunk.parameters())
    return "DistributedDataParallel" if has_buffer else None


def _config_of(chunk: torch.nn.Module) -> Any:
    """The TransformerConfig of the model: its own, or that of its first parallel linear."""
    linear = next((linear for _, linear in named_linears(chunk)), None)
    return getattr(chunk, "config", None) or getattr(linear, "config", None)


def _missing_slot(chunks: Sequence[torch.nn.Module], config: OverlapConfig) -> str | None:
    """A slot with no linear to overlap. Not asked of pipeline stages: the first has no output layer, for instance."""
    model_config = next((c for chunk in chunks if (c := _config_of(chunk)) is not None), None)
    if getattr(model_config, "pipeline_model_parallel_size", 1) > 1:
        return None
    known = (*OVERLAPPED, *OVERLAPPED.values())
    wanted = [(slot, linear) for chunk in chunks for _, slot, linear in _wanted(chunk, config)]
    found = {
        slot for slot, linear in wanted if is_te_linear(linear) or (type(linear) in known and not linear.is_expert)
    }
    for slot in config.slots:
        if slot not in found:
            others = sorted({type(linear).__name__ for s, linear in wanted if s == slot})
            there = f"only {', '.join(others)} there" if others else "none there"
            return (
                f"slots={config.slots!r}: the model has no ColumnParallelLinear or RowParallelLinear of Megatron-Core, nor "
                f"TransformerEngine's in their place, for {slot!r} outside experts ({there}); leave the slot out "
                f"(--overlap-train-slots), build the model from a layer spec with them, {WAY_TO_FALL_BACK}"
            )
    return None


def _refuse_other_config(chunks: Sequence[torch.nn.Module], config: OverlapConfig) -> None:
    for chunk in chunks:
        for name, linear in named_linears(chunk):
            if type(linear) in OVERLAPPED.values() and linear.overlap.config != config:
                raise ValueError(
                    f"config={config}: {name} overlaps already with {linear.overlap.config}; build the model anew, or "
                    "use one config for the layer spec and for enable()"
                )
