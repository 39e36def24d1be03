"""Megatron-Core's layers of experts, with the exchange of rows behind the experts' products: `OverlapConfig.experts`.

    MoELayer with SequentialMLP or TEGroupedMLP      our A2A + grouped GEMM, Megatron's activation, our grouped GEMM + A2A

Router, activation, probabilities, shared experts and recomputation stay Megatron's. Only the class of a built layer changes:
parameters, keys and checkpoints stay. A layer that cannot overlap, or a call, runs Megatron's exchange and is counted with its
reason.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import distributed_data_parallel
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import experts as megatron_experts
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer

from overlap_train import OverlapConfig, Routing, dispatch_linear, expert_routing, linear_combine
from overlap_train.group.registry import domain_of
from overlap_train.integrations.megatron.conditions import attribute, broken_rule, input_reason, our_fp8, tes_fp8_is_on
from overlap_train.integrations.megatron.linears import LinearOverlap, Model, chunks_of, derived
from overlap_train.integrations.megatron.weight_copies import renew_stack
from overlap_train.ops.blocks import BLOCK
from overlap_train.ops.experts import OVERFLOWS
from overlap_train.ops.plan import Plan
from overlap_train.select.autotune import Autotune

# Megatron-Core 0.16 looks for it in each call of a router, and has it only beside TransformerEngine.
vars(moe_utils).setdefault("te_general_gemm", None)

# Of Megatron itself and of TransformerEngine as it wraps them: what stands in their place, as an adapter, is not called by ours.
_LINEARS = re.compile("(TE)?(Column|Row)Parallel(Grouped)?Linear")
_PARTS, _DDP = ("linear_fc1", "linear_fc2"), distributed_data_parallel.__name__
_RULES = (  # what a model's config must say: setting, value, why
    ("moe_token_dispatcher_type", "alltoall", "ours takes the place of its exchange"),
    ("moe_pad_expert_input_to_capacity", False, "experts take the rows that there are"),
    ("add_bias_linear", False, "experts have no bias here"),
    ("moe_shared_expert_overlap", False, "shared experts then run inside Megatron's exchange"),
    ("overlap_moe_expert_parallel_comm", False, "another micro-batch hides the exchange"),
    ("overlap_dispatch_backward_with_experts_wgrad", False, "weight gradients run under an exchange already"),
    ("moe_latent_size", None, "experts take the rows of the layer"),
    ("moe_apply_probs_on_input", False, "probabilities are applied in the activation"),
    ("moe_paged_stash", False, "rows stay where they are"),
    ("use_transformer_engine_op_fuser", False, "with it TransformerEngine does not call the experts' linears"),
    ("fp4", None, "experts multiply in the dtype of their weights"),
    ("cpu_offloading", False, "what is saved for backward stays on the GPU"),
    ("fine_grained_activation_offloading", False, "what is saved for backward stays on the GPU"),
    ("cuda_graph_impl", "none", "the host waits for the numbers of rows"),
)


@dataclass
class ExpertOverlap(LinearOverlap):
    """The attribute `overlap` of an overlapped layer of experts. modules: of the experts. routing: of the forward pass that runs,
    unless that is Megatron's."""

    modules: tuple[Any, ...] = ()
    routing: Routing | None = None

    def note_plan(self, plan: Plan, run: Autotune | None) -> None:
        """Notes the last plan by which a call overlapped, as far as some have: the others are counted."""
        overflow = plan.fprop.reason if plan.fprop.reason in OVERFLOWS else None
        if overflow is None or self.plan is None:
            super().note_plan(plan, run)
        self.count(overflow)

    def config_of_call(self, experts: Any) -> OverlapConfig:
        """Weight gradients go into main_grad only where Megatron's own go there: under gradient accumulation fusion. Products are
        in fp8 where blocks divide the weights, and OverlapConfig asks for blockwise or TransformerEngine has the layer in fp8."""
        linear = linears_of(experts, "linear_fc1")[0]
        fused = attribute(linear, "fuse_wgrad_accumulation", attribute(linear, "gradient_accumulation_fusion", False))
        of_te = getattr(experts.config, "fp8", None)
        asked = tes_fp8_is_on() if of_te else self.config.fp8 == "blockwise"
        return self._configs[bool(fused), "blockwise" if asked and not _misfit_in_fp8(experts) else "off"]


class _OverlappedExperts:
    """x [s, b, K] -> y [s, b, K] of this rank's tokens, in Megatron's steps; its own where `overlap.routing` is None."""

    def preprocess(self: Any, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> Any:
        overlap = self.overlap
        overlap.routing, reason = None, _broken_rule(self.config) or _linear_reason(self.experts)
        reason = reason or _hook_reason(overlap.modules) or _call_reason(self, hidden_states)
        if reason is not None:
            overlap.count(reason)
            return super().preprocess(hidden_states, probs, routing_map)  # type: ignore[misc]
        config = overlap.config_of_call(self.experts)
        overlap.routing = expert_routing(routing_map, group=self.ep_group, config=config, name=overlap.name)
        return hidden_states, probs

    def dispatch(self: Any, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        if self.overlap.routing is None:
            return super().dispatch(hidden_states, probs)  # type: ignore[misc]
        return hidden_states, probs

    def routed_experts_compute(self: Any, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        routing, overlap, experts = self.overlap.routing, self.overlap, self.experts
        if routing is None:
            return super().routed_experts_compute(hidden_states, probs)  # type: ignore[misc]
        w1, w2 = (weights_of(experts, part) for part in _PARTS)
        for part, weights in zip(_PARTS, (w1, w2), strict=True):
            renew_stack(linears_of(experts, part)[0], weights[0])
        for module in overlap.modules:  # nobody calls them
            for hook in module._forward_pre_hooks.values():  # by which data parallelism gathers parameters
                hook(module)
            if attribute(module, "is_first_microbatch", False):  # as TransformerEngine's forward does
                module.is_first_microbatch = False
        config, x = overlap.config_of_call(experts), hidden_states.reshape(-1, hidden_states.shape[-1])
        y, p = dispatch_linear(
            x, w1, routing, probs, config=config, name=f"{overlap.name}.linear_fc1", on_plan=overlap.note_plan
        )

        def combine(a: torch.Tensor) -> torch.Tensor:
            return linear_combine(a, w2, routing, config=config, name=f"{overlap.name}.linear_fc2")

        z = _between(experts, y, p, routing.all_places.counts, combine)
        return overlap.watched(z.view(hidden_states.shape)), None

    def combine(self: Any, output: torch.Tensor) -> Any:
        return super().combine(output) if self.overlap.routing is None else output  # type: ignore[misc]

    def postprocess(self: Any, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> Any:
        if self.overlap.routing is None:
            return super().postprocess(output, shared_expert_output)  # type: ignore[misc]
        self.overlap.routing = None
        return output if shared_expert_output is None else output + shared_expert_output


class _InPlace(torch.nn.Module):
    """Stands where an MLP calls one of its linears."""

    def __init__(self, work: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._work = work

    def forward(self, x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
        return self._work(x), None


def _between(
    experts: Any, y: torch.Tensor, p: torch.Tensor | None, counts: list[int], combine: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """What the experts' MLP makes of y, the rows behind its first linear, with `combine` in place of its second: Megatron's own
    forward, of a copy of the module, so that each of its activations does as it does there. Rows are not padded for fp8."""
    grouped = _is_grouped(experts)
    mlp = copy.copy(experts if grouped else experts.local_experts[0])
    vars(mlp).update(linear_fc1=_InPlace(lambda rows: rows), linear_fc2=_InPlace(combine))
    vars(mlp).update(quantization_padding=lambda *given: given, quantization_unpadding=lambda rows, _: rows)
    z: torch.Tensor = mlp.forward(y, torch.tensor(counts), p)[0] if grouped else mlp.forward(y, p)[0]
    return z


def linears_of(experts: Any, part: str) -> list[Any]:
    """The linears called `part` ("linear_fc1") of this rank's experts: one for all, or one each."""
    return [getattr(each, part) for each in ([experts] if _is_grouped(experts) else experts.local_experts)]


def weights_of(experts: Any, part: str) -> list[torch.Tensor]:
    """Their weights, one by one."""
    linears = linears_of(experts, part)
    if _is_grouped(experts):
        return [getattr(linears[0], f"weight{number}") for number in range(experts.num_local_experts)]
    return [linear.weight for linear in linears]


def _weight_of(experts: Any, part: str) -> torch.Tensor:
    """That of the first one: all have one shape and dtype."""
    first = linears_of(experts, part)[0]
    return first.weight0 if _is_grouped(experts) else first.weight


def _is_grouped(experts: Any) -> bool:
    return isinstance(experts, megatron_experts.TEGroupedMLP)


def why_not_experts(layer: Any) -> str | None:
    """Why no call of a layer of experts can overlap; None: some can."""
    experts, group = layer.experts, layer.ep_group
    if group.size() == 1:
        return "expert-parallel size 1: nothing to exchange"
    broken = _broken_rule(layer.config)
    if broken is not None:
        return broken
    if type(layer) is not MoELayer:
        return f"{type(layer).__name__} has no overlapped form"
    is_sequential = type(experts) is megatron_experts.SequentialMLP
    if not is_sequential and type(experts) is not megatron_experts.TEGroupedMLP:
        return f"{type(experts).__name__} has no overlapped form"
    if experts.tp_group is not None and experts.tp_group.size() > 1:
        return "expert tensor parallelism: each expert must be on one rank"
    if is_sequential and any(type(expert) is not MLP for expert in experts.local_experts):
        return f"experts of the class {type(experts.local_experts[0]).__name__} have no overlapped form"
    if (reason := _linear_reason(experts)) is not None:
        return reason
    linear, weight = linears_of(experts, "linear_fc1")[0], _weight_of(experts, "linear_fc1")
    if hasattr(weight, "__fsdp_param__"):
        return "Megatron-FSDP owns the weights' gradients"
    # TransformerEngine marks the weight
    if any((getattr(holder, "gtp_remat_size", None) or 1) > 1 for holder in (linear, weight)):
        return "generalized tensor parallelism shards the weights again"
    return None


def _broken_rule(config: Any) -> str | None:
    if getattr(config, "fp8", None) and our_fp8(config) != "blockwise":
        asked = f"fp8={config.fp8!r}, fp8_recipe={config.fp8_recipe!r}"
        return f"{asked}: experts have a scale for each block; set fp8='e4m3' and fp8_recipe='blockwise'"
    return broken_rule(config, _RULES)


def _misfit_in_fp8(experts: Any) -> str | None:
    """Why experts' weights do not go in fp8 with scales of blocks, or None."""
    for weight in (_weight_of(experts, part) for part in _PARTS):
        if weight.dtype == torch.float16:
            return "float16"
        if any(size % BLOCK for size in weight.shape):
            return f"weights {[*weight.shape]}, not a multiple of {BLOCK}"
    return None


def _linear_reason(experts: Any) -> str | None:
    """What the experts' linears do that ours would leave out, or None."""
    for part in _PARTS:
        for linear in linears_of(experts, part):
            if _LINEARS.fullmatch(type(linear).__name__) is None:
                return f"{type(linear).__name__} in the place of an expert's linear"
            if attribute(linear, "te_quant_params", None) is not None:
                return "quantized by TransformerEngine (te_quant_params)"
    return None


def _hook_reason(modules: Iterable[Any]) -> str | None:
    """Which module of the experts, none of which ours calls, has a hook that would not run, or None. That of Megatron's data
    parallelism takes nothing but its module. Ranks do not tell each other: a hook that only some have parts the group."""
    for module in modules:
        others = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
        before = module._forward_pre_hooks.values()
        if others or any(getattr(hook, "__module__", None) != _DDP for hook in before):
            return f"a hook on {type(module).__name__} of the experts"
    return None


def _call_reason(layer: Any, x: torch.Tensor) -> str | None:
    """Why a call runs Megatron's exchange, in a layer of which others overlap; None where it does not."""
    reason = input_reason(layer, x, _weight_of(layer.experts, "linear_fc1"), layer.ep_group)
    if reason is not None:
        return reason
    misfit = _misfit_in_fp8(layer.experts) if getattr(layer.config, "fp8", None) and tes_fp8_is_on() else None
    if misfit is not None:
        return f"fp8 with {misfit}"
    nodes = domain_of(layer.ep_group, layer.overlap.config, x.device).topology.nodes
    return None if nodes == 1 else f"the expert-parallel group spans {nodes} nodes"


_OVERLAPPED_FORM = derived(MoELayer, _OverlappedExperts)


def named_expert_layers(model: Model) -> Iterator[tuple[str, Any]]:
    """(name of the experts, layer) of the layers of experts."""
    chunks = chunks_of(model)
    for index, chunk in enumerate(chunks):
        prefix = f"chunk{index}." if len(chunks) > 1 else ""
        for name, module in chunk.named_modules():
            if isinstance(module, MoELayer):
                name = re.sub(r"^(module\.)+", "", name)
                yield f"{prefix}{name}{'.' * bool(name)}experts", module


def is_overlapped_layer(layer: Any) -> bool:
    return isinstance(layer, _OverlappedExperts)


def overlapped_expert_layers(model: Model) -> list[Any]:
    return [layer for _, layer in named_expert_layers(model) if is_overlapped_layer(layer)]


def turn_experts(layer: Any, config: OverlapConfig, name: str) -> None:
    layer.__class__ = _OVERLAPPED_FORM
    layer.overlap = ExpertOverlap(config, "experts", name, modules=tuple(layer.experts.modules()))
