"""Models of Megatron's TransformerEngine spec, checked on each rank of test_transformer_engine.py, where TE is there already."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer.mlp import MLP
from torch.utils.checkpoint import checkpoint

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import SDPACoreAttention, provide_accumulation_fusion, report
from overlap_train.ops.quantize import quantized_by_torch
from tests.megatron import layout, models, te_stand_in, ulysses
from tests.megatron.linears import fall_back, model_config
from tests.megatron.models import FULL_RECOMPUTE, LLAMA, quietly_enable
from tests.megatron.te_stand_in import Float8Tensor
from tests.megatron.test_main_grad import GRADIENTS, as_ddps_hook, as_in_ddp

RMS = dict(normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False)
ZERO_CENTERED = dict(normalization="LayerNorm", layernorm_zero_centered_gamma=True, add_bias_linear=True)
QKV_BIAS = dict(normalization="RMSNorm", add_bias_linear=False, add_qkv_bias=True)
DROPOUT = dict(hidden_dropout=0.0, attention_dropout=0.0)


ARCHITECTURES = {"rms": RMS, "zero-centered": ZERO_CENTERED, "qkv-bias": QKV_BIAS}


def model_of(
    context_parallel: int, tensor_parallel: int = 1, overlap: OverlapConfig | None = None, **architecture: Any
) -> Any:
    """A GPT of Megatron's TE spec; the same weights at every call. Over TP with torch's core attention."""
    layout.prepare()
    layout.use(tensor_parallel, context_parallel=context_parallel)
    TEDotProductAttention.cp_stream = object()  # it would make one on a GPU
    ulysses = {**LLAMA, "cp_comm_type": "a2a", "sequence_parallel": False}
    kind = ulysses if tensor_parallel == 1 else DROPOUT
    config = model_config(
        tensor_model_parallel_size=tensor_parallel, context_parallel_size=context_parallel, **{**kind, **architecture}
    )  # fmt: skip
    spec = get_gpt_layer_with_transformer_engine_spec()
    if config.qk_layernorm:  # the spec of a TransformerEngine as old as the stand-in's version has Apex' norms there
        parts = spec.submodules.self_attention.submodules
        parts.q_layernorm = parts.k_layernorm = TENorm
    if tensor_parallel > 1:
        spec.submodules.self_attention.submodules.core_attention = SDPACoreAttention
    return models.assembled(config, spec, overlap)


def train(model: Any, context_parallel: int = 1) -> list[float]:
    return models.train(ulysses.Run(context_parallel=context_parallel), 3, model)[0]


def enable_and_keep_names(model: Any, overlap: OverlapConfig, own: Any) -> None:
    """Parameters and classes of linears stay the model's, and keys those of Megatron's `own`."""
    before, classes = dict(model.named_parameters()), names(model)
    quietly_enable(model, overlap)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert names(model) == classes and list(model.state_dict()) == list(own.state_dict())


def training_with_overlap_is_training_without() -> None:
    for architecture in (RMS, ZERO_CENTERED, QKV_BIAS, {**RMS, "sequence_parallel": False}):
        own, overlapped = (model_of(1, 2, **architecture) for _ in range(2))
        enable_and_keep_names(overlapped, OverlapConfig(), own)
        keys = [model.sharded_state_dict(metadata=ulysses.metadata()).keys() for model in (own, overlapped)]
        assert keys[0] == keys[1]
        kernels = sys.modules["transformer_engine_torch"]
        kernels.calls = te_stand_in._Norm.calls = 0  # type: ignore[attr-defined]
        losses = train(overlapped)
        # layers, norms, micro-batches of three steps; the block's final norm
        assert (kernels.calls, te_stand_in._Norm.calls) == (2 * 2 * 6, 6)
        assert losses == pytest.approx(train(own), rel=1e-5)
        linears = [linear for linear in report(overlapped).linears if linear.slot is not None]
        assert {(linear.method, linear.calls) for linear in linears} == {("chunked", "overlapped 6")}
        for a, b in zip(own.parameters(), overlapped.parameters(), strict=True):
            assert float((a.main_grad - b.main_grad).abs().max()) < 1e-5


def fp8_with_one_scale_a_tensor_is_ours_and_other_recipes_are_transformer_engines() -> None:
    """Layers that TransformerEngine leaves out stay in bf16. The stand-in has no fp8 itself."""
    fp8 = dict(**DROPOUT, fp8="hybrid", fp8_recipe="tensorwise")
    expected = train(model_of(1, 2, **RMS))
    state, losses = sys.modules["transformer_engine.pytorch.fp8"].FP8GlobalStateManager, {}
    left_out = "TransformerEngine leaves this layer out"
    for run, said in (("hybrid", "fp8 tensorwise"), ("e4m3", "fp8 tensorwise_e4m3"), (None, left_out)):
        state.is_fp8_enabled.return_value = run is not None
        model = model_of(1, 2, OverlapConfig(), **{**RMS, **fp8, "fp8": run or "hybrid"})
        with patch("megatron.core.fp8_utils.get_fp8_recipe"):  # which asks for a newer version than the stand-in's
            losses[run] = train(model)
        models.assert_in_fp8(model, said)
    assert losses[None] == pytest.approx(expected, rel=1e-5)
    assert all(losses[run] == pytest.approx(expected, rel=0.02) for run in ("hybrid", "e4m3"))
    assert len({tuple(of_run) for of_run in (expected, losses["hybrid"], losses["e4m3"])}) == 3
    model = model_of(1, 2, **RMS, **fp8)
    for recipe in ("mxfp8", "blockwise"):  # in hybrid
        model.config.fp8_recipe = recipe
        said = "take --fp8-recipe delayed or tensorwise, or blockwise with --fp8-format e4m3"
        with pytest.raises(ValueError, match=said):
            quietly_enable(model, OverlapConfig())


def fp8_with_scales_of_blocks_is_ours_where_blocks_fit() -> None:
    """The stand-in has no fp8 itself. Where scales are no powers of two, or weights are kept in fp8, it is refused by name."""
    fp8 = dict(**DROPOUT, fp8="e4m3", fp8_recipe="blockwise")
    sys.modules["transformer_engine.pytorch.fp8"].FP8GlobalStateManager.is_fp8_enabled.return_value = True
    for sizes, said in ((dict(hidden_size=256, ffn_hidden_size=256), "fp8 blockwise"), ({}, "not a multiple of")):
        model = model_of(1, 2, OverlapConfig(), **RMS, **fp8, **sizes)
        with patch("megatron.core.fp8_utils.get_fp8_recipe"), patch.object(models, "SEQUENCE", 128 if sizes else 16):
            train(model)
        models.assert_in_fp8(model, said)
    model = model_of(1, 2, **RMS, **fp8)
    for variables, said in (
        ({"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}, "unset NVTE_FP8_BLOCK_SCALING_FP32_SCALES"),
        ({}, "leave out --fp8-param-gather"),
    ):
        model.config.fp8_param = not variables
        with patch.dict(os.environ, variables), pytest.raises(ValueError, match=f"fp8_recipe=.blockwise. in.*{said}"):
            quietly_enable(model, OverlapConfig())


class DelayedScaling:
    """A stand-in of TE's state manager for some modules. version: 2.15 has prepare_forward as a context, 2.14 as a function
    beside prepare_forward_ctx; the flag of the first module lies elsewhere. phase: of recomputation, "first", "again"; "": none.
    """

    def __init__(self, version: str, *modules: Any) -> None:
        def context(module: Any, x: torch.Tensor, **rest: Any) -> Any:
            return self.prepared(module, x, **rest)

        self.modules, self.phase, self.updated, self.kept = modules, "", list[Any](), dict[Any, list[torch.Tensor]]()
        self.is_fp8_enabled = lambda: True
        self.flag: tuple[Any, str] = (self, "IS_FIRST_FP8_MODULE")
        self.methods = {"prepare_forward": lambda module, x, **rest: x, "prepare_forward_ctx": context}
        if version == "2.15":
            self.quantization_state, self.methods = SimpleNamespace(), {"prepare_forward": context}
            self.flag = (self.quantization_state, "is_first_fp8_module")
        for module in modules:
            module.quantizers = {
                f"scaling_{way}": [SimpleNamespace(scale=torch.tensor(1.0), amax=torch.zeros(1)) for _ in range(3)]
                for way in ("fwd", "bwd")
            }

    @property
    def is_first(self) -> bool:
        return bool(getattr(*self.flag))

    @contextlib.contextmanager
    def running(self, phase: str = "") -> Iterator[None]:
        """A forward pass begins, and TE's modules have this manager."""
        setattr(*self.flag, True)
        self.phase, state = phase, sys.modules["transformer_engine.pytorch.fp8"]
        recomputation: Any = SimpleNamespace(in_fp8_activation_recompute_phase=lambda: phase == "again")
        sys.modules["transformer_engine.pytorch.distributed"] = recomputation  # patch.dict would undo imports, too
        with (
            patch.object(state, "FP8GlobalStateManager", self),
            patch.multiple(te_stand_in.Linear, create=True, **self.methods),
        ):
            yield

    @contextlib.contextmanager
    def prepared(self, module: Any, x: torch.Tensor, allow_non_contiguous: bool) -> Iterator[torch.Tensor]:
        """A module that is recomputed has the scales of the first time."""
        its = [tensor for one in module.quantizers["scaling_fwd"] for tensor in (one.scale, one.amax)]
        latest = [tensor.clone() for tensor in its]
        if self.phase == "first":
            self.kept[module] = latest
        if self.phase == "again":
            for tensor, kept in zip(its, self.kept.pop(module), strict=True):
                tensor.copy_(kept)
        yield x
        if self.phase == "again":
            for tensor, kept in zip(its, latest, strict=True):
                tensor.copy_(kept)

    def largest(self, forward: bool) -> list[float]:
        name = "scaling_fwd" if forward else "scaling_bwd"
        return [one.amax.item() for module in self.modules for one in module.quantizers[name]]

    def reduce_and_update_fp8_tensors(self, forward: bool) -> None:
        self.updated.append((forward, self.largest(forward)))
        for module in self.modules:
            for one in module.quantizers["scaling_fwd" if forward else "scaling_bwd"]:
                torch.distributed.all_reduce(one.amax, torch.distributed.ReduceOp.MAX, module.tp_group)
                one.scale.copy_(256 / one.amax[0] if one.amax > 0 else one.scale)
                one.amax.zero_()


def delayed_scales_are_transformer_engines() -> None:
    """Of two linears that follow each other. Its manager is told the largest elements, and updates the scales of gradients when
    backward has passed the first one, once. With the scales of the first pass the second one is nearer to what fp32 gives."""
    model = model_of(1, 2, **{**RMS, **DROPOUT}, fp8="hybrid", fp8_recipe="delayed")
    model.config.fp8_wgrad = False
    with pytest.raises(ValueError, match=r"fp8_wgrad=False.*leave out --no-fp8-wgrad"):
        quietly_enable(model, OverlapConfig())
    model, column, row, x, dy = _delayed()
    w, v = (linear.weight.abs().max().item() for linear in (column, row))
    for version in ("2.14", "2.15"):
        manager, results = DelayedScaling(version, column, row), list[list[Any]]()
        for enabled in (False, True, True):
            manager.is_fp8_enabled = lambda on=enabled: on
            column.is_first_microbatch = row.is_first_microbatch = True
            leaf = x.clone().requires_grad_()
            with manager.running():
                h, a, y = _both(column, row, leaf)
                of_forward = manager.largest(forward=True)
                manager.reduce_and_update_fp8_tensors(forward=True)  # as at the end of TE's context
                assert manager.is_first != enabled
                y.backward(dy)
            if enabled:
                assert of_forward[1:] == [w, 0.0, a.abs().max().item(), v, 0.0] and of_forward[0] > 0
                assert [forward for forward, _ in manager.updated] == [True, False]
                assert manager.updated[1][1] == [h.grad.abs().max().item(), 0.0, 0.0, dy.abs().max().item(), 0.0, 0.0]
            manager.updated.clear()
            results.append([y.detach(), leaf.grad])
        expected, *found = results
        errors = [[float((a - b).norm() / b.norm()) for a, b in zip(one, expected, strict=True)] for one in found]
        assert max(errors[1]) < 0.1 and errors[1][0] < errors[0][0], errors
    assert all(
        "fp8 tensorwise, scales of TransformerEngine" in row.reason
        for row in report(model).linears
        if "mlp" in row.name and "layers.0" in row.name
    )


def delayed_scales_of_layers_that_are_recomputed_are_those_of_the_first_time() -> None:
    """Though they have changed since, to the bit. The largest elements are told once, and the flag of the first module stays."""
    _, column, row, x, dy = _delayed()
    for version in ("2.14", "2.15"):
        results = []
        for recomputes in (False, True):
            manager, leaf = DelayedScaling(version, column, row), x.clone().requires_grad_()
            for linear in (column, row):
                linear.is_first_microbatch, linear.weight.grad = True, None
            with manager.running("first"), torch.set_grad_enabled(not recomputes):
                y = _both(column, row, leaf)[-1]
            manager.reduce_and_update_fp8_tensors(forward=True)
            if recomputes:
                with manager.running("again"):
                    first, y = y, _both(column, row, leaf)[-1]
                    assert torch.equal(y, first) and manager.is_first
            y.backward(dy)
            assert manager.largest(forward=True) == [0.0] * 6, manager.largest(forward=True)
            results.append([y.detach(), leaf.grad, column.weight.grad, row.weight.grad])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def a_step_of_delayed_scaling_makes_each_weight_in_fp8_once() -> None:
    """A later micro-batch takes the copy with the scale of the first one, which alone tells the weight's largest element. In
    evaluation each call makes it anew, and nothing waits for a backward pass."""
    _, _, row, x, dy = _delayed()
    weight, x = row.weight, x.repeat(2, 1, 2)
    manager = DelayedScaling("2.15", row)
    of_x, of_w, _ = manager.modules[0].quantizers["scaling_fwd"]

    def call(scale_of_w: torch.Tensor) -> float:
        """The largest element of the weight that it tells. scale_of_w: by which it is rounded."""
        operands = ((x, of_x.scale), (weight.detach(), scale_of_w))
        x8, w8 = ((one * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale for one, scale in operands)
        with manager.running():
            y = row(x)[0]
            assert manager.is_first == (y.grad_fn is None)
        torch.testing.assert_close(
            y.detach(), reduce_scatter_to_sequence_parallel_region(x8 @ w8.t()), rtol=1e-5, atol=1e-6
        )
        told = of_w.amax.item()
        if y.requires_grad:
            y.backward(dy)
        manager.reduce_and_update_fp8_tensors(forward=True)
        return told

    for _ in range(2):
        row.is_first_microbatch, scale, largest = True, of_w.scale.clone(), weight.abs().max().item()
        assert [call(scale) for _ in range(3)] == [largest, 0.0, 0.0]
        assert not torch.equal(of_w.scale, scale), "the next step's"
        weight.data.mul_(1.3)
    with torch.no_grad():
        row.eval()
        for factor in (1.0, 0.7):
            weight.data.mul_(factor)
            assert call(of_w.scale.clone()) == weight.abs().max().item()


def _delayed() -> tuple[Any, Any, Any, torch.Tensor, torch.Tensor]:
    """A model of delayed scaling, two of its linears, which follow each other, an input and a gradient of the output."""
    model = model_of(1, 2, OverlapConfig(), **RMS, **DROPOUT, fp8="hybrid", fp8_recipe="delayed")
    mlp = model.decoder.layers[0].mlp
    random = torch.Generator().manual_seed(mlp.linear_fc2.tp_group.rank())
    x, dy = (torch.randn(8, 2, 32, generator=random) for _ in range(2))
    return model, mlp.linear_fc1, mlp.linear_fc2, x, dy


def _both(column: Any, row: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(what the first linear gives, what the second one gets, and what that gives)."""
    h = column(x)[0]
    if h.requires_grad:
        h.retain_grad()
    a = h[..., : row.weight.shape[1]].contiguous()
    return h, a, row(a)[0]


def a_weight_that_is_kept_in_fp8_is_multiplied_as_it_is() -> None:
    """As one that is made in fp8 in each call, to the bit; its gradient goes into main_grad, also delayed, or TE's code runs."""
    fp8 = dict(fp8="hybrid", fp8_recipe="tensorwise")
    sys.modules["transformer_engine.pytorch.fp8"].FP8GlobalStateManager.is_fp8_enabled.return_value = True
    results = []
    for kept in (False, True):
        model = model_of(1, 2, OverlapConfig(), **RMS, **DROPOUT, **fp8, gradient_accumulation_fusion=True)
        for linear in (model.decoder.layers[0].mlp.linear_fc1, model.decoder.layers[0].mlp.linear_fc2):
            w = linear.weight.detach()
            w8 = quantized_by_torch(w, w.abs().amax().view(1), torch.float8_e4m3fn)
            linear.weight.data.copy_(w8.rows.float() * w8.inverse)
            if kept:
                del linear.weight
                linear.weight = Float8Tensor(w8.rows, w8.inverse)
            weight = linear.weight
            for step in range(2):
                weight.main_grad, weight.grad_added_to_main_grad = torch.ones(w.shape), False
                linear.wgrad_store = store = te_stand_in.WeightGradStore(bool(step))
                x = torch.linspace(-1, 1, 16 * 2 * w.shape[1]).reshape(16, 2, -1)[: 16 // (1 + (w.shape[1] == 32))]
                x = x.clone().requires_grad_()
                y = linear(x)[0]
                y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
                assert weight.grad_added_to_main_grad
                if step:
                    store.pop()
                results.append([y.detach(), x.grad, weight.main_grad])
            assert linear.overlap.overlapped_calls == 2
            if kept:
                del weight.main_grad
                with pytest.raises(NotImplementedError):  # TE's own code, which knows such weights
                    linear(x)
                reason = "a weight in fp8 whose gradient does not go into main_grad"
                assert linear.overlap.fallback_calls == {reason: 1}
    for made, as_it_is in zip(results[:4], results[4:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(made, as_it_is, strict=True))


def a_step_makes_each_weight_in_fp8_once() -> None:
    """Two layers with four linears. Under TransformerEngine's fp8 by its flag, also recomputed; without its cache in each call.
    Under ours by DDP's mark, which is there with gradient accumulation fusion only."""
    TES = dict(fp8="hybrid", fp8_recipe="tensorwise")
    sys.modules["transformer_engine.pytorch.fp8"].FP8GlobalStateManager.is_fp8_enabled.return_value = True

    def recompute(function: Any, *arguments: Any, **rest: Any) -> Any:
        return checkpoint(function, *arguments, use_reentrant=True)

    tes = {"transformer_engine.pytorch.distributed": SimpleNamespace(checkpoint=recompute)}
    for settings, falls_back, made in (
        (TES, (), [8] * 3),
        (TES, (4,), [8] * 3),
        ({**TES, **FULL_RECOMPUTE}, (), [8] * 3),
        ({**TES, "disable_parameter_transpose_cache": True}, (), [8 * 4] * 3),
        ({"gradient_accumulation_fusion": True}, (), [8] * 3),
        ({"gradient_accumulation_fusion": True, "cuda_graph_impl": "transformer_engine"}, (), [8 * 4] * 3),
        ({}, (), [8 * 4] * 3),
    ):
        found, recipe = [], ulysses.Run(2, microbatches=4)
        for keeps in (True, False):
            overlap = OverlapConfig(fp8="off" if "fp8" in settings else "tensorwise")
            model = model_of(1, 2, overlap, **RMS, **DROPOUT, **settings)
            with patch("megatron.core.fp8_utils.get_fp8_recipe"), patch.dict(sys.modules, tes):
                modes = ((False, True), (False, False))
                found.append(models.three_steps(recipe, models.wrap(recipe, model), modes, falls_back, keeps))
        (results, counts), (expected, _) = found
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)), settings
        assert counts == made, (settings, counts)


def transformer_engine_makes_its_own_copies_anew_after_overlapped_calls() -> None:
    """What it is told in calls that fall back, where Megatron says at the first call of each step that it is the first. Told that
    in mid-step, its backward would write over main_grad. Told nothing, it makes the weight anew."""
    model, told = model_of(1, 2, OverlapConfig(), **RMS), []
    linear, x = model.decoder.layers[0].mlp.linear_fc1, torch.ones(8, 2, 32)

    def forward(linear: Any, x: Any, is_first_microbatch: bool | None) -> Any:
        told.append(is_first_microbatch)
        return own(linear, x, is_first_microbatch)

    te = sys.modules["transformer_engine.pytorch"].LayerNormLinear
    own = te.forward
    with patch.object(te, "forward", forward):
        for step in ((True, True), (False, True, True), (True, False), (False, False), (True,)):
            linear.is_first_microbatch = True
            for falls_back in step:
                fall_back(linear, falls_back)(x)
                assert not linear.is_first_microbatch
    assert told == [True, False, None, None, True, True]


def evaluation_overlaps_and_a_second_enable_changes_nothing() -> None:
    model = model_of(1, 2, OverlapConfig(), **RMS)
    tokens, positions = torch.arange(32).reshape(2, 16), torch.arange(16).expand(2, -1)
    trained = model(tokens, positions, None)
    quietly_enable(model, OverlapConfig())
    torch.testing.assert_close(model.eval()(tokens, positions, None), trained, rtol=1e-4, atol=1e-5)
    assert {linear.calls for linear in report(model).linears} == {"overlapped 2"}


def the_norms_output_comes_with_the_product_where_lora_asks_for_it() -> None:
    """With a bias that the caller adds and without, the norm's output of this rank's rows and of all, overlapped and not."""
    for architecture, gathered, frozen, falls_back in product((RMS, ZERO_CENTERED), *[(False, True)] * 3):
        results = []
        for overlap in (None, OverlapConfig()):
            model = model_of(1, 2, overlap, **architecture)
            linear = fall_back(model.decoder.layers[0].mlp.linear_fc1, falls_back)
            linear.return_layernorm_output, linear.return_layernorm_output_gathered = True, gathered
            linear.requires_grad_(not frozen)
            x = torch.linspace(-1, 1, 8 * 2 * 32).reshape(8, 2, 32).requires_grad_()
            first, *others = linear(x)
            y, *normed = first if isinstance(first, tuple) else (first, others.pop())
            (y.square().sum() + normed[0].pow(3).sum()).backward()
            results.append([y, *normed, *others, x.grad])
        assert isinstance(first, tuple) == (architecture is RMS) and len(normed[0]) == (16 if gathered else 8)
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def the_weight_gradient_goes_into_main_grad_only_where_transformer_engine_adds_there_too() -> None:
    model = model_of(1, 2, OverlapConfig(), **RMS)
    linear, gradients = model.decoder.layers[0].mlp.linear_fc1, []
    weight = linear.weight
    for fused in (False, True):
        linear.fuse_wgrad_accumulation, weight.grad, weight.main_grad = fused, None, torch.zeros_like(weight)
        linear(torch.linspace(-1, 1, 8 * 2 * 32).reshape(8, 2, 32))[0].square().sum().backward()
        assert (bool(weight.main_grad.any()), weight.grad is None) == (fused, fused)
        gradients.append(weight.main_grad if fused else weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=0)


def calls_that_fall_back_do_as_overlapped_ones() -> None:
    """An overlapped call and one of TE's in a step give the sum of both alone; so do those of a Ulysses attention."""
    provide_accumulation_fusion()  # the output layer is Megatron's own
    for fusion, main_grad, dtype in ((False, *GRADIENTS[0]), *((True, *gradient) for gradient in GRADIENTS)):
        bound = 1e-6 if dtype == torch.float32 else 2**-7
        assert max(_errors(fusion, main_grad, dtype)) < bound
        overlap = OverlapConfig(method="chunked", main_grad=main_grad)
        model = model_of(2, overlap=overlap, gradient_accumulation_fusion=fusion).to(dtype)
        assert ulysses.error_of_two_kinds_of_call(model) < bound


def _errors(fusion: bool, main_grad: str, dtype: Any) -> Iterator[float]:
    mlp = model_of(1, 2, OverlapConfig(main_grad=main_grad), **RMS).to(dtype).decoder.layers[0].mlp
    for linear in (mlp.linear_fc1, mlp.linear_fc2):
        linear.fuse_wgrad_accumulation, weight = fusion, linear.weight
        x = torch.randn(8, 2, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)

        def added(*modes: bool, linear: Any = linear, weight: Any = weight, x: Any = x) -> torch.Tensor:
            as_in_ddp(weight, dtype)
            weight.main_grad.zero_()
            linear.is_first_microbatch = True
            for mode in modes:
                fall_back(linear, not mode)(x)[0].square().sum().backward()
                as_ddps_hook(weight)
            return weight.main_grad.clone()

        expected = added(True) + added(False)
        assert linear.fuse_wgrad_accumulation == fusion, "as before"
        yield from (
            float((added(*order) - expected).abs().max() / expected.abs().max())
            for order in ((True, False), (False, True))
        )


def what_cannot_overlap_stays_transformer_engines() -> None:
    model = model_of(1, 2, **RMS)
    model.config.use_transformer_engine_op_fuser = True
    gated = model_of(2)
    gated.config.attention_output_gate = True
    for refused, why in (
        (model, "use_transformer_engine_op_fuser=True"),
        (_fused_by_its_spec(), "TEFusedMLPWithGroupedLinear in the model"),
        (gated, "attention_output_gate=True"),
        (model_of(2, cp_comm_type="p2p"), "tensor_model_parallel_size=1.*cp_comm_type='a2a'"),
    ):
        with pytest.raises(ValueError, match=why):
            quietly_enable(refused, OverlapConfig())
    quietly_enable(gated, OverlapConfig(on_unsupported="fallback"))
    assert type(gated.decoder.layers[0].self_attention).__name__ == "SelfAttention"


def _fused_by_its_spec() -> Any:
    """A model whose spec was made with use_te_op_fuser: its settings do not say so. The stand-in is too old to have the class."""
    megatron_te.TEFusedMLP = type("TEFusedMLP", (MLP,), {})
    model = model_of(1, 2, **RMS)
    model.decoder.layers[1].mlp.__class__ = type("TEFusedMLPWithGroupedLinear", (megatron_te.TEFusedMLP,), {})
    return model


def ulysses_trains_as_one_rank_and_everything_keeps_its_name() -> None:
    for settings in ({}, {"qk_layernorm": True, "layernorm_zero_centered_gamma": True}):
        alone = model_of(1, **settings)
        expected = train(alone, 1)
        model = model_of(2, **settings)
        enable_and_keep_names(model, OverlapConfig(method="chunked"), alone)
        losses = train(model, 2)
        assert losses == pytest.approx(expected, rel=2e-6) and losses[-1] < losses[0]
        rows = {row.slot: (row.fprop, row.method, row.calls) for row in report(model).linears}
        assert rows["qkv"] == ("GEMM + A2A (CP 2)", "chunked", "overlapped 6")
        assert rows["proj"] == ("A2A(x) + GEMM (CP 2)", "chunked", "overlapped 6")


def rows_between_documents_are_zeros_whatever_the_core_attention_leaves_there() -> None:
    """Documents of 5 and 10 rows, padded to 8 and 16, and 8 rows of none: this rank has half of each."""
    model = model_of(2, overlap=OverlapConfig(method="chunked"))
    real, ends = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 5, 15], [0, 8, 24]))
    packed = PackedSeqParams("thd", real, real, ends, ends, 16, 16)
    x = torch.randn(16, 1, model.config.hidden_size, requires_grad=True)
    attention = model.decoder.layers[0].self_attention
    attention.core_attention.kept_packed_seq_params.add("cu_seqlens_q_padded")  # as of TransformerEngine 1.8
    y, _ = attention(x, None, packed_seq_params=packed)
    y.square().sum().backward()
    rank = torch.distributed.get_rank()
    rows = ((0, 1, 6, 7), (2, 3, 4, 5))[rank], ((0, 1, 2, 3, 12, 13, 14, 15), tuple(range(4, 12)))[rank]
    counts = [row < 5 for row in rows[0]] + [row < 10 for row in rows[1]] + [False] * 4
    assert y.isfinite().all() and [bool(row.any()) for row in y.detach()[:, 0]] == counts
    gradients = (x.grad, *(parameter.grad for parameter in attention.parameters() if parameter.grad is not None))
    assert all(gradient.isfinite().all() for gradient in gradients)


def other_layers_are_left_to_their_core_attention() -> None:
    try:
        model = model_of(2, cp_comm_type=["a2a", "p2p"])
    except IndexError:  # Megatron-Core 0.16 looks one layer too far in a list of cp_comm_type
        return
    quietly_enable(model, OverlapConfig(slots=("qkv", "proj")))
    reasons = {row.name: row.reason for row in report(model).linears}
    assert reasons["decoder.layers.0.self_attention.linear_qkv"] == "not called yet"
    left = "context parallelism: cp_comm_type='p2p' is left to the core attention"
    assert left in reasons["decoder.layers.1.self_attention.linear_qkv"]
    groups = [layer.self_attention.core_attention.cp_group for layer in model.decoder.layers]
    assert [group is None for group in groups] == [True, False]


def names(model: Any) -> dict[str, str]:
    """Class names of the linears, by which Megatron-FSDP and PEFT tools go."""
    return {
        name: type(module).__name__ for name, module in model.named_modules() if "layers" in name and "linear" in name
    }
