"""GPTs under Ulysses' context parallelism beside those of one rank: gradients and weights of all ranks together, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron.table import counters
from tests.megatron.linears import fall_back
from tests.megatron.models import LLAMA, Recipe, batches, forward_backward, gpt, wrap


def Run(
    tensor_parallel: int = 1, context_parallel: int = 1, overlap: OverlapConfig | None = None, **others: Any
) -> Recipe:  # fmt: skip
    """A recipe, by default of one rank."""
    sizes = {"tensor_parallel": tensor_parallel, "context_parallel": context_parallel}
    return Recipe(**{"architecture": LLAMA, **others}, **sizes, overlap=overlap)


def gradients(run: Recipe) -> dict[str, torch.Tensor]:
    """Reduced main_grad of every parameter, of all tensor-parallel ranks together."""
    model = wrap(run, gpt(run))
    forward_backward(run, model, batches())
    return {name: whole(p, p.main_grad) for name, p in model.module.named_parameters()}


def error_of_two_kinds_of_call(model: GPTModel, alone: PackedSeqParams | None = None) -> float:
    """Of the gradients of a step in which one micro-batch exchanges within the products and another does not: how far they are
    from the sum of both by themselves. main_grad is of the model's dtype.

    alone: the other's, whose rows stay on their rank; None: its linears fall back for another reason.
    """
    attention = model.decoder.layers[0].self_attention
    linears = attention.linear_qkv, attention.linear_proj
    dtype = linears[0].weight.dtype
    wrapper = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=False), model)
    x = torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(1)).to(dtype)

    def added(*calls: bool) -> list[torch.Tensor]:
        wrapper.zero_grad_buffer()
        for exchanges in calls:
            for linear in linears:
                fall_back(linear, not exchanges and alone is None)
            attention(x, None, packed_seq_params=None if exchanges else alone)[0].square().sum().backward()
        assert all(linear.weight.main_grad.dtype == dtype for linear in linears)
        return [linear.weight.main_grad.clone() for linear in linears]

    sums = [a + b for a, b in zip(added(True), added(False), strict=True)]
    both = [pair for calls in ((True, False), (False, True)) for pair in zip(added(*calls), sums, strict=True)]
    calls = [linear.overlap.overlapped_calls for linear in linears]
    assert calls == [3, 3] and all(sum(linear.overlap.fallback_calls.values()) == 3 for linear in linears)
    return max(float((got - wanted).abs().max() / wanted.abs().max()) for got, wanted in both)


def weights(model: DistributedDataParallel) -> dict[str, torch.Tensor]:
    return {name: whole(p, p.detach()) for name, p in model.module.named_parameters()}


def difference(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: bool = False) -> float:
    """The largest. relative: to the largest element of the tensor."""
    assert actual.keys() == expected.keys()
    parts = [(actual[name] - x).abs().max() / (x.abs().max() if relative else 1) for name, x in expected.items()]
    return float(torch.stack(parts).max())


def whole(parameter: torch.nn.Parameter, x: torch.Tensor) -> torch.Tensor:
    """The shards of all tensor-parallel ranks, put together."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return x.clone()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    torch.distributed.all_gather(parts, x.contiguous(), group=group)
    if getattr(parameter, "partition_stride", 1) == 2:  # gated: each shard has its part of both halves
        halves = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([torch.cat(half) for half in halves])
    return torch.cat(parts, dim=parameter.partition_dim)


def counted(model: torch.nn.Module) -> float:
    """Symmetric memory in MiB, as the counters say."""
    return counters(model)["overlap_train/symmetric_mib"]


def save(model: torch.nn.Module, folder: Path) -> None:
    """The weights in Megatron's sharded format; collective."""
    if torch.distributed.get_rank() == 0:
        folder.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save({"model": model.sharded_state_dict(metadata=metadata())}, str(folder))
    torch.distributed.barrier()


def load(model: torch.nn.Module, folder: Path) -> None:
    state = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=metadata())}, str(folder))
    model.load_state_dict(state["model"])


def metadata() -> dict[str, Any]:
    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
