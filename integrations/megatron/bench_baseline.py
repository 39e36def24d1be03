"""Megatron-Core's own parallel linears as a baseline for overlap_train.tools.bench, which loads this module by name.

Megatron overlaps the backward's communication by the order of its launches and therefore wants
CUDA_DEVICE_MAX_CONNECTIONS=1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from overlap_train.integrations.megatron.cpu import run_without_cuda

Linear = Callable[[torch.Tensor], torch.Tensor]


def linears(w1: torch.nn.Parameter, w2: torch.nn.Parameter, group: dist.ProcessGroup) -> tuple[Linear, Linear]:
    """Megatron's column linear on w1 [N1/W, K1] and row linear on w2 [N2, K2/W], with sequence parallelism and no bias.

    Both take and return matrices: x [s/W, K1] -> [s, N1/W] and h [s, K2/W] -> [s/W, N2]. `group` must be all ranks.
    """
    run_without_cuda()
    world = dist.get_world_size(group)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    config = ModelParallelConfig(
        tensor_model_parallel_size=world, sequence_parallel=True, params_dtype=w1.dtype, perform_initialization=False,
        gradient_accumulation_fusion=False,
    )  # fmt: skip
    tp_group = parallel_state.get_tensor_model_parallel_group()
    common = dict(config=config, init_method=torch.nn.init.zeros_, bias=False, tp_group=tp_group)
    column = ColumnParallelLinear(w1.shape[1], w1.shape[0] * world, gather_output=False, **common)
    row = RowParallelLinear(w2.shape[1] * world, w2.shape[0], input_is_parallel=True, skip_bias_add=False, **common)
    column.weight, row.weight = w1, w2
    return _on_matrices(column), _on_matrices(row)


def _on_matrices(linear: torch.nn.Module) -> Linear:
    """Megatron's activations are [s, b, h]; here b = 1."""
    return lambda x: linear(x.unsqueeze(1))[0].squeeze(1)
