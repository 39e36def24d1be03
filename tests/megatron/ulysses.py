"""Small GPTs under Ulysses' context parallelism, with Megatron's own slicing of the batch, on CPU processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank

from overlap_train import OverlapConfig, SequenceLayout
from overlap_train.integrations.megatron import gpt_block_spec
from overlap_train.integrations.megatron.table import counters
from tests.megatron import layout, models
from tests.megatron.linears import model_config
from tests.megatron.models import BATCH, LLAMA, SEQUENCE, VOCABULARY

ULYSSES = dict(cp_comm_type="a2a")
DOCUMENTS = (0, 8, 24)  # starts of two documents and the end of the last; 8 rows beyond it


@dataclass(frozen=True)
class Run:
    """How a GPT is trained."""

    tensor_parallel: int = 1
    context_parallel: int = 1
    overlap: OverlapConfig | None = None
    architecture: dict[str, Any] = field(default_factory=lambda: LLAMA)
    packed: bool = False
    cut: str = "zigzag"  # of a pack; newer Megatron has contiguous, too


def gpt(run: Run) -> GPTModel:
    """The same full weights for every layout."""
    layout.use(run.tensor_parallel, context_parallel=run.context_parallel)
    config = model_config(
        tensor_model_parallel_size=run.tensor_parallel, sequence_parallel=run.tensor_parallel > 1,
        context_parallel_size=run.context_parallel, **{**ULYSSES, **run.architecture},
    )  # fmt: skip
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(config, gpt_block_spec(config), VOCABULARY, 2 * SEQUENCE, position_embedding_type="rope")
    if run.overlap is not None:
        models.quietly_enable(model, run.overlap)
    return model


def wrapped(model: GPTModel) -> DistributedDataParallel:
    return models.wrap(models.Recipe({}), model)


def batches(run: Run) -> Iterator[dict[str, Any]]:
    """Micro-batches as Megatron hands them to a rank."""
    cut = partial(_packed, cut=run.cut) if run.packed else _sliced
    for text in models.batches():
        text = text.reshape(1, -1)[:, : 2 * SEQUENCE + 1] if run.packed else text
        length = text.size(1) - 1
        batch = {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "loss_mask": torch.ones(len(text), length),
            "position_ids": torch.arange(length).expand(len(text), -1).contiguous(),
        }
        yield cut(batch, run.context_parallel)


def _sliced(batch: dict[str, Any], ranks: int) -> dict[str, Any]:
    group = parallel_state.get_context_parallel_group()
    try:
        return get_batch_on_this_cp_rank({**batch, "cu_seqlens": None}, False, group)
    except TypeError:  # Megatron-Core 0.16
        return get_batch_on_this_cp_rank(batch, group)


def _packed(batch: dict[str, Any], ranks: int, cut: str) -> dict[str, Any]:
    """Zigzag within each document, as TransformerEngine's thd_get_partitioned_indices cuts; or contiguous, or zigzag_pack, across
    documents. Rows beyond the last do not count."""
    ends = torch.tensor(DOCUMENTS, dtype=torch.int32)
    batch["loss_mask"][:, DOCUMENTS[-1] :] = 0
    if ranks == 1:  # Megatron's own rotary positions know no rows beyond
        batch = {name: x[:, : DOCUMENTS[-1]] for name, x in batch.items()}
    rows = batch["tokens"].size(1)
    if ranks > 1:
        starts = (*DOCUMENTS, rows) if cut == "zigzag" else ()
        layout = SequenceLayout(cut.removesuffix("_pack"), starts)
        of_ranks = layout.rows_of_ranks(rows, ranks, torch.device("cpu"))
        mine = of_ranks[parallel_state.get_context_parallel_rank()]
        batch = {name: x[:, mine].contiguous() for name, x in batch.items()}
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=16, max_seqlen_kv=16)
    if cut != "zigzag":
        packed.cp_partition_mode = cut
    return {**batch, "packed": packed}


def forward_step(data: Iterator[dict[str, Any]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Megatron's pair. Its schedule multiplies a loss of two parts by the context-parallel ranks, and DDP divides by them."""
    batch = next(data)
    losses = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=batch.get("packed")
    )

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        total = torch.stack([(losses * batch["loss_mask"]).sum(), batch["loss_mask"].sum()])
        mean = total.detach().clone()
        torch.distributed.all_reduce(mean, group=parallel_state.get_context_parallel_group())
        return total[0] / mean[1], {"loss": mean[0] / mean[1]}  # every token weighs the same, whichever rank has it

    return losses, loss


def forward_backward(model: DistributedDataParallel, data: Iterator[dict[str, Any]]) -> float:
    model.zero_grad_buffer()
    results = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=data, model=model, num_microbatches=2, seq_length=SEQUENCE,
        micro_batch_size=BATCH, forward_only=False,
    )  # fmt: skip
    return sum(result["loss"].item() for result in results) / len(results)


def train(run: Run, steps: int) -> tuple[list[float], DistributedDataParallel]:
    """Losses of the steps, and the model after them."""
    model = wrapped(gpt(run))
    optimizer, data, losses = models.optimizer_of(model), batches(run), []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(forward_backward(model, data))
        assert optimizer.step()[0]
    return losses, model


def gradients(run: Run) -> dict[str, torch.Tensor]:
    """Reduced main_grad of every parameter, of all tensor-parallel ranks together."""
    model = wrapped(gpt(run))
    forward_backward(model, batches(run))
    return {name: whole(p, p.main_grad) for name, p in model.module.named_parameters()}


def error_of_two_kinds_of_call(model: GPTModel, alone: PackedSeqParams | None = None) -> float:
    """Of the gradients of a step in which one micro-batch exchanges within the products and another does not: how far they are
    from the sum of both by themselves. main_grad is of the model's dtype.

    alone: the other's, whose rows stay on their rank; None: its linears are in evaluation mode.
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
                linear.train(exchanges or alone is not None)
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
    dist_checkpointing.save({"model": model.sharded_state_dict(metadata=_metadata())}, str(folder))
    torch.distributed.barrier()


def load(model: torch.nn.Module, folder: Path) -> None:
    state = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=_metadata())}, str(folder))
    model.load_state_dict(state["model"])


def _metadata() -> dict[str, Any]:
    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
