"""Megatron-Core's parallel state in the worker processes: entered once, kept from test to test, changed when one
asks."""

from __future__ import annotations

import logging
import warnings

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

import overlap_train
from overlap_train.integrations.megatron import run_without_cuda


def prepare() -> None:
    """What each process does once."""
    warnings.filterwarnings("ignore")  # Megatron's deprecations, a page of them for each model
    logging.getLogger("megatron").setLevel(logging.ERROR)
    assert run_without_cuda()


def use(
    tensor_parallel: int = 2, seed: int = 1, context_parallel: int = 1, expert_parallel: int = 1
) -> dist.ProcessGroup:
    """Make the layout current, seed every generator, and return the tensor-parallel group. With expert parallelism each expert
    is on one rank."""
    wanted = (tensor_parallel, context_parallel, expert_parallel)
    if parallel_state.is_initialized() and wanted != (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    ):
        leave()
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_parallel, context_parallel_size=context_parallel, expert_model_parallel_size=expert_parallel,
            expert_tensor_parallel_size=1 if expert_parallel > 1 else None,
        )  # fmt: skip
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return parallel_state.get_tensor_model_parallel_group()


def leave() -> None:
    """Free the heaps of this layout's groups, then the groups. Megatron only forgets them, and each has a gloo thread that
    wakes up a hundred times a second."""
    overlap_train.shutdown()
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
