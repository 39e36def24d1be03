"""A stand-in for TransformerEngine, which is not installed where the tests run: the classes under Megatron's wrappers.

Interface (constructor arguments, attributes, parameter names, extra state, what forward returns) as Megatron's
extensions/transformer_engine.py uses it; the arithmetic is torch's, the communication Megatron's mappings. `install()` in a
fresh process, before Megatron is imported.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F


class _Norm(torch.nn.Module):
    calls = 0  # of all norms outside the fused linear

    def __init__(
        self, normalized_shape: int = 0, *, hidden_size: int = 0, eps: float, sequence_parallel: bool, zero_centered_gamma: bool,
        **rest: Any,
    ) -> None:  # fmt: skip
        """hidden_size: the same as normalized_shape, as Megatron 0.16 calls it."""
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = _norm_parameter(normalized_shape or hidden_size, zero_centered_gamma, sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _Norm.calls += 1
        return _normalised(x, self.weight, getattr(self, "bias", None), self.eps, self.zero_centered_gamma)


class RMSNorm(_Norm):
    """te.pytorch.RMSNorm."""


class LayerNorm(_Norm):
    def __init__(self, *size: int, sequence_parallel: bool, **rest: Any) -> None:
        super().__init__(*size, sequence_parallel=sequence_parallel, **rest)
        self.bias = _norm_parameter(self.weight.numel(), True, sequence_parallel)


class Linear(torch.nn.Module):
    """te.pytorch.Linear, column or row parallel."""

    def __init__(
        self, in_features: int, out_features: int, *, sequence_parallel: bool, fuse_wgrad_accumulation: bool, tp_group: Any,
        tp_size: int, get_rng_state_tracker: Any, init_method: Any, bias: bool, return_bias: bool, parallel_mode: str,
        params_dtype: torch.dtype, **rest: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.ub_name = rest.get("ub_name")
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=params_dtype))
        if parallel_mode is None:  # others are Megatron's to fill, on the CPU
            torch.nn.init.normal_(self.weight, std=0.02)
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]  # gradient norms count it on every rank
        self.bias = torch.nn.Parameter(torch.zeros(self.out_features)) if bias else torch.Tensor()
        if bias and parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel
        self.wgrad_store = WeightGradStore(rest.get("delay_wgrad_compute", False))
        self.of_data_parallelism: list[Any] = []
        if self.wgrad_store.is_enabled:
            self.weight.skip_backward_post_hook = True  # type: ignore[attr-defined]
            if bias:
                self.bias.skip_backward_post_hook = True

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
        self.of_data_parallelism.append(hook)

    def backward_dw(self) -> None:
        (dw, dbias), _ = self.wgrad_store.pop()
        if not self.fuse_wgrad_accumulation:
            self.weight.grad = dw.to(self.weight.dtype)
        if self.use_bias and self.bias.grad is None:
            self.bias.grad = dbias.to(self.bias.dtype)
        for hook in self.of_data_parallelism:
            hook()

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Nothing of fp8 to restore."""

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        from megatron.core.tensor_parallel import mappings

        added = self.bias if self.use_bias and not self.return_bias else None
        weight: Any = self.weight
        if self.fuse_wgrad_accumulation or self.wgrad_store.is_enabled:
            weight = _WeightGradient.apply(
                weight, self.fuse_wgrad_accumulation, bool(is_first_microbatch), self.wgrad_store
            )
        if self.parallel_mode is None:  # an expert's, or the same on every rank
            y = F.linear(x, weight, added)
        elif self.parallel_mode == "column":
            copied = mappings.copy_to_tensor_model_parallel_region
            gathered = mappings.gather_from_sequence_parallel_region if self.sequence_parallel else copied
            y = F.linear(gathered(x), weight, added)
        else:
            added_up = mappings.reduce_from_tensor_model_parallel_region
            scattered = mappings.reduce_scatter_to_sequence_parallel_region if self.sequence_parallel else added_up
            y = scattered(F.linear(x, weight))
            y = y if added is None else y + added
        return (y, self.bias) if self.return_bias else y


class GroupedLinear(torch.nn.Module):
    """te.pytorch.GroupedLinear of experts that are whole on one rank."""

    def __init__(
        self, *, num_gemms: int, in_features: int, out_features: int, fuse_wgrad_accumulation: bool, bias: bool,
        params_dtype: torch.dtype, **rest: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_gemms, self.use_bias, self.fuse_wgrad_accumulation = num_gemms, bias, fuse_wgrad_accumulation
        for number in range(num_gemms):
            weight = torch.nn.Parameter(0.02 * torch.randn(out_features, in_features).to(params_dtype))
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> torch.Tensor:
        weights: list[Any] = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        if self.fuse_wgrad_accumulation:
            store = WeightGradStore(False)
            weights = [_WeightGradient.apply(weight, True, bool(is_first_microbatch), store) for weight in weights]
        return torch.cat([F.linear(part, weight) for part, weight in zip(x.split(m_splits), weights, strict=True)])


class Float8Tensor(torch.Tensor):
    """A weight in e4m3 with one scale, which says that it is in fp32."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, inverse: torch.Tensor) -> Float8Tensor:
        self: Any = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32, requires_grad=True)
        self._data, self._scale_inv = data.view(torch.uint8), inverse
        return self

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{function} of a weight in fp8")


class WeightGradStore:
    """Products for backward_dw(), in the order of their backward passes."""

    def __init__(self, is_enabled: bool) -> None:
        self.is_enabled, self._waiting = is_enabled, []  # type: ignore[var-annotated]

    def delay_wgrad_compute(self) -> bool:
        return self.is_enabled

    def put(self, tensors: list[Any], function: Any) -> None:
        self._waiting.append((tensors, function))

    def pop(self) -> Any:
        tensors, function = self._waiting.pop(0)
        return function(*tensors), tensors


class _WeightGradient(torch.autograd.Function):
    """A weight whose gradient TE's backward adds into main_grad (fuses), or leaves to the store, or both."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, fuses: bool, is_first: bool, store: WeightGradStore) -> torch.Tensor:
        ctx.weight, ctx.fuses, ctx.is_first, ctx.store = weight, fuses, is_first, store
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        weight, fuses, is_first = ctx.weight, ctx.fuses, ctx.is_first

        def add(grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            if fuses and is_first:
                weight.main_grad.copy_(grad)
            elif fuses:
                weight.main_grad.add_(grad)
            return grad, None

        if ctx.store.is_enabled:
            ctx.store.put([grad], add)
        else:
            add(grad)
        if not (fuses and hasattr(weight, "grad_added_to_main_grad")):
            return None, None, None, None
        weight.grad_added_to_main_grad = True
        return torch.full_like(grad, torch.nan), None, None, None  # nobody may read it


class LayerNormLinear(Linear):
    """te.pytorch.LayerNormLinear."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        **rest: Any,
    ) -> None:
        super().__init__(in_features, out_features, **rest)
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.layer_norm_weight = _norm_parameter(in_features, zero_centered_gamma, self.sequence_parallel)
        with_bias = normalization == "LayerNorm"
        self.layer_norm_bias = _norm_parameter(in_features, True, self.sequence_parallel) if with_bias else None

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        from megatron.core.tensor_parallel import mappings

        x = _normalised(x, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma)
        result = super().forward(x, is_first_microbatch)
        if not self.return_layernorm_output:
            return result
        x = mappings.gather_from_sequence_parallel_region(x) if self.return_layernorm_output_gathered else x
        return (*result, x) if self.return_bias else (result, x)


class _NormKernels(ModuleType):
    """transformer_engine_torch, as far as norms are called in it: as torch's norms, to the bit."""

    calls = 0  # of forward passes

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.eps: dict[int, float] = {}  # by where forward's scales are

    def rmsnorm_fwd(self, x: Any, gamma: Any, *how: Any) -> tuple[Any, None, Any]:
        h, _, scale = self.layernorm_fwd(x, gamma, None, *how)
        return h, None, scale

    def layernorm_fwd(
        self, x: Any, gamma: Any, beta: Any, eps: float, out: None, quantizer: None, dtype: str, margin: int, zero_centered: bool
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        assert x.dim() == 2 and x.is_contiguous() and dtype == str(x.dtype) and out is quantizer is None and margin == 0
        self.calls += 1
        mean = torch.zeros(len(x)) if beta is None else x.mean(-1)
        scale = _scale(x, mean, eps)
        self.eps[scale.data_ptr()] = eps
        return _normalised(x, gamma, beta, eps, zero_centered), mean, scale

    def rmsnorm_bwd(self, dh: Any, x: Any, scale: Any, gamma: Any, margin: int, zero_centered: bool) -> Any:
        return self._gradients(dh, x, torch.zeros(len(x)), scale, gamma, None, zero_centered)

    def layernorm_bwd(
        self, dh: Any, x: Any, mean: Any, scale: Any, gamma: Any, margin: int, zero_centered: bool
    ) -> Any:
        return self._gradients(dh, x, mean, scale, gamma, torch.zeros_like(gamma), zero_centered)

    def _gradients(self, dh: Any, x: Any, mean: Any, scale: Any, gamma: Any, beta: Any, zero_centered: bool) -> Any:
        eps = self.eps[scale.data_ptr()]
        assert torch.equal(scale, _scale(x, mean, eps)), "not what forward gave"
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in (x, gamma, beta) if tensor is not None]
            h = _normalised(*inputs, *[None] * (beta is None), eps, zero_centered)
            return list(torch.autograd.grad(h, inputs, dh))


def _scale(x: torch.Tensor, mean: torch.Tensor, eps: float) -> torch.Tensor:
    return ((x - mean[:, None]).square().mean(-1) + eps).rsqrt()


def _norm_parameter(size: int, zero: bool, sequence_parallel: bool) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(size) if zero else torch.ones(size))
    parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
    return parameter


def _normalised(x: torch.Tensor, weight: torch.Tensor, bias: Any, eps: float, zero_centered: bool) -> torch.Tensor:
    weight = weight + 1 if zero_centered else weight
    if bias is None:
        return F.rms_norm(x, (weight.numel(),), weight, eps)
    return F.layer_norm(x, (weight.numel(),), weight, bias, eps)


class DotProductAttention(torch.nn.Module):
    """te.pytorch.DotProductAttention, causal, of the heads it was built for; of context parallelism only the arguments."""

    def __init__(
        self, *, num_attention_heads: int, num_gqa_groups: int, kv_channels: int, tp_size: int, cp_group: Any = None,
        cp_comm_type: str = "", **rest: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type
        self.heads = num_attention_heads // tp_size, num_gqa_groups // tp_size

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(0)

    def set_extra_state(self, state: Any) -> None:
        pass

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, attn_mask_type: str, **packed: Any
    ) -> torch.Tensor:
        assert self.cp_group is None, "the stand-in cannot exchange"
        assert (q.size(-2), k.size(-2)) == self.heads and attn_mask_type.endswith("causal") and mask is None
        if q.dim() == 3:
            return _of_documents(q, k, v, packed["cu_seqlens_q"], packed["cu_seqlens_q_padded"])
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return context.permute(2, 0, 1, 3).flatten(2)


def _of_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, real: torch.Tensor, padded: torch.Tensor
) -> torch.Tensor:
    """[t, n * d]. Rows between documents are as they come, NaN here; those beyond the last are zeros, as are their gradients."""
    spans = [
        slice(start, start + length) for start, length in zip(padded[:-1].tolist(), real.diff().tolist(), strict=True)
    ]
    between = torch.ones(len(q), dtype=torch.bool)
    between[int(padded[-1]) :] = False
    for span in spans:
        between[span] = False
    q, k, v = (_LeftAsTheyAre.apply(x, between) for x in (q, k, v))
    context = torch.zeros_like(q)
    for span in spans:
        rows = (x[span].transpose(0, 1) for x in (q, k, v))
        context[span] = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(0, 1)
    return _LeftAsTheyAre.apply(context, between).flatten(1)


class _LeftAsTheyAre(torch.autograd.Function):
    """NaN in some rows of what passes, and of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.rows = rows
        return x.masked_fill(rows[:, None, None], torch.nan)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy.masked_fill(ctx.rows[:, None, None], torch.nan), None


class _Module(ModuleType):
    """A module whose other names are mocks: Megatron takes some of them at import and never calls them here."""

    __path__: list[str] = []  # noqa: RUF012 -- what makes a module a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


def _userbuffers(base: Any) -> None:
    """pytorch.module.base, as far as --tp-comm-overlap calls it: `made` has the arguments of each call of initialize_ub."""
    base.made, base._ub_communicators = [], None
    base.UserBufferQuantizationMode = SimpleNamespace(NONE="none")

    def initialize_ub(**arguments: Any) -> None:
        assert base._ub_communicators is None
        base._ub_communicators = len(base.made)
        base.made.append(arguments)

    base.get_dummy_wgrad = lambda shape, dtype, zero=False: torch.zeros(shape, dtype=dtype)
    base.initialize_ub, base.destroy_ub = initialize_ub, lambda: setattr(base, "_ub_communicators", None)


def install() -> None:
    """Make `import transformer_engine` find the stand-in."""
    assert "megatron.core" not in sys.modules
    names = (
        "", ".pytorch", ".pytorch.fp8", ".pytorch.float8_tensor", ".pytorch.cpp_extensions",
        ".pytorch.module", ".pytorch.module.base", ".pytorch.tensor", ".pytorch.tensor.float8_tensor",
    )  # fmt: skip
    modules = [_Module(f"transformer_engine{name}") for name in names]
    package, torch_part, fp8, tensors, _, module, base, quantized, in_float8 = modules
    kernels, constants = _NormKernels("transformer_engine_torch"), ModuleType("transformer_engine.pytorch.constants")
    constants.TE_DType = {dtype: str(dtype) for dtype in (torch.float32, torch.bfloat16)}  # type: ignore[attr-defined]
    module.base = base  # type: ignore[attr-defined]
    _userbuffers(base)
    fp8.FP8GlobalStateManager = MagicMock()  # type: ignore[attr-defined]  # one, which says whether a layer is in fp8
    package.__version__, package.pytorch, torch_part.fp8 = "2.3.0", torch_part, fp8  # type: ignore[attr-defined]
    for part, name in ((tensors, "Float8Tensor"), (in_float8, "Float8Tensor"), (quantized, "QuantizedTensor")):
        setattr(part, name, type(name, (torch.Tensor,), {}))  # type: ignore[attr-defined]
    for part in (Linear, GroupedLinear, LayerNormLinear, RMSNorm, LayerNorm, DotProductAttention):
        setattr(torch_part, part.__name__, part)
    sys.modules.update({module.__name__: module for module in (*modules, kernels, constants)})
