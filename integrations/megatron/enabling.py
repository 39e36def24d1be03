"""enable(): turn the parallel linears of a built Megatron-Core model into overlapped ones, in place.

Only the class of a linear changes: parameters, their attributes, hooks and checkpoint keys are the same objects as before. A
weight that another module has, too, gets Megatron's mark for tied weights. Under Ulysses (context parallelism with cp_comm_type
"a2a") the class of the self-attention changes, too, and its core attention, which has no parameters, is built anew.

Importing this module lets gradient accumulation fusion work without Apex: enable() itself would come too late for that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core.distributed.data_parallel_base import _BaseDataParallel

from overlap_train import OverlapConfig
from overlap_train.config import SLOTS, check_type
from overlap_train.integrations.megatron.ahead import CompileAhead
from overlap_train.integrations.megatron.attention import (
    UlyssesSelfAttention,
    core_of_rank,
    is_asked_for,
    no_exchange,
    sharing_attentions,
    why_not_ulysses,
)
from overlap_train.integrations.megatron.conditions import Problem, bad_combination, divides_weights
from overlap_train.integrations.megatron.experts import (
    is_overlapped_layer,
    named_expert_layers,
    overlapped_expert_layers,
    turn_experts,
    why_not_experts,
)
from overlap_train.integrations.megatron.linears import (
    Model,
    chunks_of,
    fused_mlp,
    is_candidate,
    is_overlapped,
    named_linears,
    overlapped_forms,
    overlapped_linears,
    slot_of,
    turn_linear,
    why_not,
)
from overlap_train.integrations.megatron.main_grad import provide_accumulation_fusion
from overlap_train.integrations.megatron.table import FirstTable, Report, report, stage
from overlap_train.integrations.megatron.ulysses_linears import exchanging_forms
from overlap_train.integrations.megatron.whole_sequence import WholeSequence

OLDEST, NEWEST = (0, 16), (0, 20)  # no note on these: 0.16 and 0.19 are tested, and our hooks fit 0.20-dev

_ALONE = "linear"  # in place of a linear slot

provide_accumulation_fusion()


def enable(model: Model, config: OverlapConfig | None = None) -> Report:
    """Overlap the linears of `config.slots` in a model, in the chunks of a virtual pipeline, or one linear; before DDP wraps it.
    With `config.experts` also the exchange of its experts.

    Every rank of the job calls it with the same config; it does not communicate. Linears that cannot overlap (experts,
    generalized tensor parallelism, those of a part of the model whose settings rule it out) are left as they are, and the report
    says why. All slots, the default, mean what is there. LoRA may wrap linears before or after. Global rank 0 prints a line. The
    table of linears follows in the first training step: rank 0 prints it and, in a pipeline, the first rank of each other stage.
    A second call with the same config changes and prints nothing, also after DDP has wrapped the model.

    A model with gradient_accumulation_fusion=True needs no Apex if `enable` is imported before the model is built. Its linears
    then add weight gradients into main_grad; with config.main_grad="off" those that were enabled return them, fusion or not.

    Returns:
        Report: which linear takes which path and why; `report(model)` returns it again, with the calls counted so far.

    Raises:
        ValueError: the model is wrapped already, its settings rule out overlap, an attention with cp_comm_type "a2a" has no
            Ulysses form, it lacks a linear that config.slots names (of fewer than all slots), config.experts finds no experts
            that can overlap, or it was enabled with another config. With config.on_unsupported="fallback" all but the last leave
            the linears, attentions and experts concerned to Megatron instead, and the report says so.
    """
    check_type(config)
    config = config or OverlapConfig()
    chunks = chunks_of(model)
    _refuse_other_config(chunks, config)
    attentions = find_attentions(chunks, config)
    wanted = [each for each in _wanted(chunks, config) if not is_overlapped(each[2])]
    pending = [each for each in wanted if why_not(each[2], attentions.exchanges(each[2])) is None]
    layers, no_experts = find_experts(chunks, config)
    if not pending and not layers and (overlapped_linears(chunks) or overlapped_expert_layers(chunks)):
        return report(chunks)
    hopeless = _problem_of_model(chunks, bool(layers))
    # Why experts cannot act says more than that tensor parallelism, which they do not need, is off.
    problem = no_experts or hopeless or attentions.problem or _missing_slots(chunks, config, bool(layers))
    if problem is not None and config.on_unsupported == "error":
        raise problem.error
    if hopeless is None:
        attentions.turn(config.timeout_s)
        for name, slot, linear in pending:
            exchanging = attentions.exchanges(linear)
            forms = exchanging_forms(divides_weights(linear)) if exchanging else overlapped_forms()
            turn_linear(linear, forms[type(linear)], config, slot, name)
        for name, layer in layers:
            turn_experts(layer, config, name)
        linears = overlapped_linears(chunks)
        sending = [linear for linear in linears if divides_weights(linear) and not attentions.exchanges(linear)]
        for group in {linear.tp_group for linear in sending}:
            CompileAhead(group, sending)
        FirstTable(chunks)
    told = None if problem is None else str(problem)
    _tell_user(chunks, told)
    return report(chunks, told)


@dataclass(frozen=True)
class Attentions:
    """The attentions whose linears config.slots names. ours: those that are Ulysses', or can be. problem: why others cannot."""

    ours: tuple[Any, ...]
    problem: Problem | None

    def exchanges(self, linear: Any) -> bool:
        """Whether a linear is to exchange: linear_qkv or linear_proj of one of ours. One that cannot overlaps over TP alone."""
        for attention in self.ours:
            if linear is attention.linear_qkv or linear is attention.linear_proj:
                return attention.pg_collection.tp.size() == 1 or why_not(linear, exchanges=True) is None
        return False

    def turn(self, timeout_s: float) -> None:
        """Make them Ulysses', with core attentions built anew for the heads of one rank. timeout_s: see WholeSequence."""
        whole = WholeSequence()
        for attention in self.ours:
            if not isinstance(attention, UlyssesSelfAttention):
                core = attention.core_attention
                attention.core_attention = core_of_rank(
                    type(core), attention.pg_collection.cp.size(), config=attention.config,
                    layer_number=attention.layer_number, attn_mask_type=attention.attn_mask_type,
                    attention_type=attention.attention_type, pg_collection=attention.pg_collection,
                    softmax_scale=getattr(attention.config, "softmax_scale", None),
                ).train(core.training)  # fmt: skip
                attention.__class__, attention.whole = UlyssesSelfAttention, whole
            attention.whole.timeout_s = timeout_s


def find_experts(
    chunks: Sequence[torch.nn.Module], config: OverlapConfig
) -> tuple[list[tuple[str, Any]], Problem | None]:
    """The layers of experts that are to overlap, by name; and why others cannot, or that there are none."""
    if not config.experts:
        return [], None
    layers = [(name, layer) for name, layer in named_expert_layers(chunks) if not is_overlapped_layer(layer)]
    reasons = [why_not_experts(layer) for _, layer in layers]
    pending = [each for each, reason in zip(layers, reasons, strict=True) if reason is None]
    what = next(filter(None, reasons), None)
    if not layers and not _is_stage(chunks) and not overlapped_expert_layers(chunks):
        what = "the model has no MoELayer of Megatron-Core"
    return pending, None if what is None else Problem(f"experts=True: {what}", "leave out --overlap-train-experts")


def find_attentions(chunks: Sequence[torch.nn.Module], config: OverlapConfig) -> Attentions:
    if not {"qkv", "proj"} & set(config.slots):
        return Attentions((), None)
    asked = [attention for attention in sharing_attentions(chunks) if is_asked_for(attention)]
    reasons = [why_not_ulysses(attention) for attention in asked]
    ours = tuple(attention for attention, reason in zip(asked, reasons, strict=True) if reason is None)
    return Attentions(ours, no_exchange(next(filter(None, reasons), None)))


def _wanted(chunks: Sequence[torch.nn.Module], config: OverlapConfig) -> Iterator[tuple[str, str, Any]]:
    """(name, linear slot, module) of the linears asked for. One that was passed alone is asked for by that."""
    for name, linear in named_linears(chunks):
        slot = _ALONE if any(linear is chunk for chunk in chunks) else slot_of(name)
        if slot == _ALONE or slot in config.slots:
            yield name, slot, linear


def _tell_user(chunks: Sequence[torch.nn.Module], problem: str | None) -> None:
    """On global rank 0: how much is prepared. Where no linear overlaps, the table at once: no step would print it."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    names = [name for name, linear in named_linears(chunks) if is_overlapped(linear)]
    experts = len(overlapped_expert_layers(chunks))
    version, lines = megatron.core.__version__, []
    if names or experts:
        layers = len({found[0] for name in names if (found := re.match(r".*?layers\.\d+\.", name))})
        what = f"{len(names)} linear{'s' * (len(names) != 1)}"
        what += f" in {layers} layer{'s' * (layers != 1)}" * bool(layers)
        where = f" of {stage()}" if stage() else ""
        what += f" and the experts of {experts} layer{'s' * (experts != 1)}" * bool(experts)
        lines = [f"{what}{where} prepared; the table follows in the first step", problem]
    else:
        report(chunks, problem).show()
    if not OLDEST <= tuple(map(int, re.findall(r"\d+", version)[:2])) <= NEWEST:
        lines.append(f"Megatron-Core {version} was not tested, 0.16 and 0.19 were; if anything fails, try one of these")
    for line in filter(None, lines):
        print(f"overlap_train: {line}", flush=True)


def _problem_of_model(chunks: Sequence[torch.nn.Module], has_experts: bool) -> Problem | None:
    """What rules out overlap for the whole model, or None. has_experts: some that are to overlap."""
    if not chunks:
        instead = "pass the model, or the list of chunks that get_model returns"
        return Problem("model=[]: no model chunk to enable", instead, can_fall_back=False)
    for chunk in chunks:
        wrapper = _data_parallel_wrapper(chunk)
        if wrapper is not None:
            rule = "enable() must come before data parallelism wraps the model, because that fixes how gradients are collected"
            return Problem(f"model is wrapped in {wrapper} already: {rule}", "call it on the bare model")
        fused = fused_mlp(chunk)
        if fused is not None:
            instead = "build the model without use_te_op_fuser (leave out --use-transformer-engine-op-fuser)"
            return Problem(f"{fused} in the model: TransformerEngine computes it without calling its linears", instead)
    problems = [bad_combination(config, has_experts) for config in _configs(chunks)]
    return problems[0] if problems and all(problems) else None


def _data_parallel_wrapper(chunk: torch.nn.Module) -> str | None:
    wrappers = (_BaseDataParallel, torch.nn.parallel.DistributedDataParallel)
    for module in chunk.modules():
        if isinstance(module, wrappers):
            return type(module).__name__
    has_buffer = any(hasattr(parameter, "main_grad") for parameter in chunk.parameters())
    return "DistributedDataParallel" if has_buffer else None


def _configs(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """The TransformerConfigs of the linears that could overlap: several where a model is made of models. Without any, the
    model's own."""
    owners = [linear for _, linear in named_linears(chunks) if is_candidate(linear)] or chunks
    found = {id(owner.config): owner.config for owner in owners if getattr(owner, "config", None) is not None}
    return list(found.values())


def _missing_slots(chunks: Sequence[torch.nn.Module], config: OverlapConfig, has_experts: bool) -> Problem | None:
    """Linear slots that have nothing to overlap. Not asked of pipeline stages, which need not have all. All slots, which are the
    default, mean what is there, experts alone among it."""
    wanted = list(_wanted(chunks, config))
    found = {slot for _, slot, linear in wanted if is_candidate(linear)}
    missing = [slot for slot in config.slots if slot not in found]
    is_there = bool(found) or has_experts
    if not missing or _is_stage(chunks) or (is_there and (set(config.slots) == set(SLOTS) or _ALONE in found)):
        return None
    what = (
        f"slots={config.slots!r}: the model has no ColumnParallelLinear or RowParallelLinear of Megatron-Core, nor "
        f"TransformerEngine's in their place, for {', '.join(_with_others(wanted, slot) for slot in missing)}"
    )
    rest = ",".join(slot for slot in config.slots if slot in found)
    leave_out = f"leave out what is missing (--overlap-train-slots {rest}), " if rest else ""
    return Problem(what, f"{leave_out}build the model from a layer spec with them")


def _is_stage(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether these are of one pipeline stage of several."""
    return any(getattr(each, "pipeline_model_parallel_size", 1) > 1 for each in _configs(chunks))


def _with_others(wanted: Sequence[tuple[str, str, Any]], slot: str) -> str:
    """ "'fc1' (only experts there)": a slot, and what it has that does not overlap."""
    names = {"experts" if ".experts." in name else type(linear).__name__ for name, s, linear in wanted if s == slot}
    return f"{slot!r} (only {', '.join(sorted(names))} there)" if names else repr(slot)


def _refuse_other_config(chunks: Sequence[torch.nn.Module], config: OverlapConfig) -> None:
    overlapped = [(name, linear) for name, linear in named_linears(chunks) if is_overlapped(linear)]
    overlapped += [(name, layer) for name, layer in named_expert_layers(chunks) if is_overlapped_layer(layer)]
    for name, linear in overlapped:
        theirs = linear.overlap.config
        for setting in fields(config):
            mine, other = getattr(config, setting.name), getattr(theirs, setting.name)
            if mine != other and not (setting.name == "slots" and set(mine) == set(other)):
                what = f"config: {setting.name}={mine!r}, but {name} overlaps already with {setting.name}={other!r}"
                raise ValueError(f"{what}; build the model anew, or use one config for every enable()")
