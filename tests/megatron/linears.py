"""Pairs of parallel linears for the tests: Megatron's own and the overlapped one, with the same integer-valued weights.

With small integers every product and sum is exact in fp32, whatever the order, so results are compared bit for bit.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron.linears import overlapped_forms, turn_linear
from tests.megatron import layout

SEQUENCE, BATCH, FEATURES_IN, FEATURES_OUT = 8, 3, 12, 20


def model_config(**changes: Any) -> TransformerConfig:
    """A small dense model under TP 2 with sequence parallelism, in fp32."""
    settings: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,  # the same full weights for every tensor-parallel size
    )
    config = TransformerConfig(**{**settings, **changes})
    config._cpu_offloading_context = None  # TransformerBlock sets it; linears on their own need it too
    return config


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same integers in [-3, 3] on every rank, as fp32."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


@dataclass
class Pair:
    """Megatron's linear and the overlapped one."""

    own: Any
    overlapped: Any

    @property
    def counts(self) -> tuple[int, dict[str, int]]:
        """(overlapped calls, calls that fell back by reason)."""
        return self.overlapped.overlap.overlapped_calls, dict(self.overlapped.overlap.fallback_calls)


def column_pair(overlap: OverlapConfig | None = None, tensor_parallel: int = 2, **arguments: Any) -> Pair:
    """x [s/W, b, K] -> [s, b, N/W]; `arguments` are ColumnParallelLinear's, and `config_changes`."""
    return _pair(ColumnParallelLinear, overlap, tensor_parallel, dict(bias=True), arguments)


def row_pair(overlap: OverlapConfig | None = None, tensor_parallel: int = 2, **arguments: Any) -> Pair:
    """x [s, b, K/W] -> [s/W, b, N]; `arguments` are RowParallelLinear's, and `config_changes`."""
    return _pair(
        RowParallelLinear,
        overlap,
        tensor_parallel,
        dict(bias=True, input_is_parallel=True, skip_bias_add=False),
        arguments,
    )


def _pair(kind: type, overlap: OverlapConfig | None, tensor_parallel: int, defaults: dict, arguments: dict) -> Pair:
    group = layout.use(tensor_parallel)
    arguments = {**defaults, **arguments}
    changes = {"sequence_parallel": tensor_parallel > 1, **arguments.pop("config_changes", {})}
    config = model_config(tensor_model_parallel_size=tensor_parallel, **changes)
    own = kind(FEATURES_IN, FEATURES_OUT, config=config, init_method=torch.nn.init.zeros_, tp_group=group, **arguments)
    for index, parameter in enumerate(own.parameters()):  # copy_ casts to the dtype of the parameter
        parameter.data.copy_(integers(*parameter.shape, seed=10 * group.rank() + index))
    if own.bias is not None and kind is RowParallelLinear:
        own.bias.data.copy_(integers(FEATURES_OUT, seed=5))  # one bias, the same on every rank
    return Pair(own, overlapped(own, overlap or OverlapConfig()))


def overlapped(own: Any, config: OverlapConfig) -> Any:
    """A copy of Megatron's linear with the overlapped class."""
    linear = copy.copy(own)
    linear._parameters = {name: None if p is None else _twin(p) for name, p in own._parameters.items()}
    turn_linear(linear, overlapped_forms()[type(own)], config, "fc1", "linear")
    return linear


OFFLOADED = "activations are offloaded to the CPU"


def fall_back(linear: Any, on: bool = True) -> Any:
    """Let the calls of the linears of its config fall back (OFFLOADED), and do nothing else: no block has begun to offload."""
    linear.config.cpu_offloading = on
    return linear


def _twin(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    twin = torch.nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
    twin.__dict__.update(parameter.__dict__)
    return twin


def run(linear: Any, x: torch.Tensor, **arguments: Any) -> dict[str, torch.Tensor | None]:
    """One forward and backward with integer-valued output gradients: outputs and gradients by name."""
    x = x.clone().requires_grad_()
    y, returned_bias = linear(x, **arguments)
    y.backward(integers(*y.shape, seed=77).to(y.dtype))
    grads = {f"grad of {name}": parameter.grad for name, parameter in linear.named_parameters()}
    return {"y": y.detach(), "returned bias": returned_bias, "grad of x": x.grad, **grads}


def assert_same(left: dict[str, torch.Tensor | None], right: dict[str, torch.Tensor | None]) -> None:
    """Bit for bit, key for key."""
    assert left.keys() == right.keys()
    for key, value in left.items():
        if value is None:
            assert right[key] is None, key
        else:
            torch.testing.assert_close(right[key], value, rtol=0, atol=0, msg=lambda text, key=key: f"{key}: {text}")
