"""Small GPT models and a few steps of training with Megatron-Core's own DDP, schedule and optimizer, on the CPU; under Ulysses'
context parallelism with Megatron's own slicing of the batch."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank

from overlap_train import Fp8Copies, OverlapConfig, SequenceLayout
from overlap_train.integrations.megatron import enable, gpt_block_spec, report
from overlap_train.ops import quantize
from tests.megatron import layout
from tests.megatron.linears import model_config

VOCABULARY, SEQUENCE, BATCH = 48, 16, 2
DOCUMENTS = (0, 8, 24)  # of a pack: starts of two documents and the end of the last; 8 rows beyond it

LLAMA = dict(
    normalization="RMSNorm",
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
    add_bias_linear=False,
    num_query_groups=2,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
GPT2 = dict(normalization="LayerNorm", hidden_dropout=0.0, attention_dropout=0.0)
FULL_RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@dataclass(frozen=True)
class Recipe:
    """What a test trains: `architecture` are changes to model_config(), the rest says how."""

    architecture: dict[str, Any]
    tensor_parallel: int = 2
    overlap: OverlapConfig | None = None
    tied: bool = False
    microbatches: int = 2
    overlap_grad_reduce: bool = False
    positions: str = "rope"
    context_parallel: int = 1  # Ulysses
    packed: bool = False
    cut: str = "zigzag"  # of a pack; newer Megatron has contiguous, too


def gpt(recipe: Recipe) -> GPTModel:
    """The model of a recipe; the same full weights for every tensor-parallel size and with overlap or without."""
    layout.use(recipe.tensor_parallel, context_parallel=recipe.context_parallel)
    config = model_config(
        tensor_model_parallel_size=recipe.tensor_parallel, context_parallel_size=recipe.context_parallel,
        **{"cp_comm_type": "a2a", "sequence_parallel": recipe.tensor_parallel > 1, **recipe.architecture},
    )  # fmt: skip
    return assembled(
        config, gpt_block_spec(config), recipe.overlap, share_embeddings_and_output_weights=recipe.tied,
        position_embedding_type=recipe.positions,
    )  # fmt: skip


def assembled(config: Any, spec: Any, overlap: OverlapConfig | None = None, **arguments: Any) -> GPTModel:
    """A model of any layer spec. overlap: None leaves it as it is. arguments: GPTModel's."""
    model = GPTModel(config, spec, VOCABULARY, 2 * SEQUENCE, **{"position_embedding_type": "rope", **arguments})
    if overlap is not None:
        quietly_enable(model, overlap)
    return model


def quietly_enable(model: GPTModel | list[GPTModel], config: OverlapConfig) -> str:
    """enable() and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        enable(model, config)
    return printed.getvalue()


def wrap(recipe: Recipe, model: GPTModel) -> DistributedDataParallel:
    model.config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=recipe.overlap_grad_reduce, use_distributed_optimizer=False,
        delay_wgrad_compute=model.config.delay_wgrad_compute,
    )  # fmt: skip
    return DistributedDataParallel(model.config, settings, model)


def batches(seed: int = 0) -> Iterator[torch.Tensor]:
    """Token sequences [BATCH, SEQUENCE + 1], the same on every rank: counting up from a random start, so easy to
    learn."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        yield (start + torch.arange(SEQUENCE + 1)) % VOCABULARY


def micro_batch(recipe: Recipe, text: torch.Tensor) -> dict[str, Any]:
    """A micro-batch as Megatron hands it to a rank."""
    text = text.reshape(1, -1)[:, : 2 * SEQUENCE + 1] if recipe.packed else text
    length = text.size(1) - 1
    batch = {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": torch.ones(len(text), length),
        "position_ids": torch.arange(length).expand(len(text), -1).contiguous(),
    }
    return _packed(batch, recipe.context_parallel, recipe.cut) if recipe.packed else _sliced(batch)


def _sliced(batch: dict[str, Any]) -> dict[str, Any]:
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


def forward_step(recipe: Recipe, data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Megatron's pair. Its schedule multiplies a loss of two parts by the context-parallel ranks, and DDP divides by them."""
    batch = micro_batch(recipe, next(data))
    losses = model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=batch.get("packed")
    )

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        total = torch.stack([(losses * batch["loss_mask"]).sum(), batch["loss_mask"].sum()])
        mean = total.detach().clone()
        torch.distributed.all_reduce(mean, group=parallel_state.get_context_parallel_group())
        return total[0] / mean[1], {"loss": mean[0] / mean[1]}  # every token weighs the same, whichever rank has it

    return losses, loss


def forward_backward(recipe: Recipe, model: DistributedDataParallel, data: Iterator[torch.Tensor]) -> float:
    """All microbatches of one step, gradients reduced; returns the mean loss."""
    results = get_forward_backward_func()(
        forward_step_func=partial(forward_step, recipe),
        data_iterator=data,
        model=model,
        num_microbatches=recipe.microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    return sum(result["loss"].item() for result in results) / len(results)


def optimizer_of(model: DistributedDataParallel) -> Any:
    settings = OptimizerConfig(optimizer="adam", lr=3e-3, params_dtype=torch.float32, clip_grad=1.0)
    return get_megatron_optimizer(settings, [model])


def one_step(model: GPTModel) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of one batch, and the gradients, without data parallelism."""
    text = next(batches())
    positions = torch.arange(SEQUENCE).expand(len(text), -1)
    loss = model(text[:, :-1], positions, None, labels=text[:, 1:]).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train(recipe: Recipe, steps: int, bare: GPTModel | None = None) -> tuple[list[float], DistributedDataParallel]:
    """Losses of the steps, and the model after them. bare: the model before; None: as the recipe says."""
    model = wrap(recipe, gpt(recipe) if bare is None else bare)
    optimizer, data, losses = optimizer_of(model), batches(), []
    for _ in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(forward_backward(recipe, model, data))
        successful, _, _ = optimizer.step()
        assert successful
    return losses, model


def train_experts(
    model: GPTModel, microbatches: int, by_adam: bool, steps: int = 2
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses of the micro-batches, gradients of the last step), by each schedule of Megatron. by_adam: else a tenth of its
    gradient is taken from a weight: Adam makes much of the last bits of what is small."""
    wrapped, data, losses = wrap(Recipe({}), model), batches(), []
    optimizer = optimizer_of(wrapped) if by_adam else None

    def step(data: Iterator[torch.Tensor], chunk: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
        text = next(data)
        call = model.build_schedule_plan if return_schedule_plan else chunk
        positions = torch.arange(SEQUENCE).expand(len(text), -1)
        result = call(text[:, :-1].contiguous(), positions, None, labels=text[:, 1:].contiguous())
        return result, lambda y: (y.float().mean(), {"loss": y.detach().float().mean()})

    for _ in range(steps):
        wrapped.zero_grad_buffer()
        results = get_forward_backward_func()(
            forward_step_func=step, data_iterator=data, model=[wrapped], num_microbatches=microbatches, seq_length=SEQUENCE,
            micro_batch_size=BATCH, forward_only=False,
        )  # fmt: skip
        losses += [float(result["loss"]) for result in results]
        gradients = {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
            continue
        for parameter in model.parameters():
            parameter.data.sub_(0.1 * parameter.main_grad)
    return losses, gradients


def assert_in_fp8(model: torch.nn.Module, said: str) -> None:
    """The table says it of each linear but the output layer."""
    reasons = {row.slot: row.reason for row in report(model).linears if row.slot is not None}
    assert len(reasons) == 5
    assert all((said in reason) == (slot != "output") for slot, reason in reasons.items()), reasons


def three_steps(
    recipe: Recipe, model: DistributedDataParallel, evaluations: tuple[tuple[bool, bool], ...],
    falls_back: Container[int] = (), keeps: bool = True,
) -> tuple[list[torch.Tensor], list[int]]:  # fmt: skip
    """Losses, what evaluations give after each step, and the weights at last; how many weights each step made in fp8 to keep
    them. The weights change through `.data`, as by Megatron's optimizers, but before the last step they come from a checkpoint.

    evaluations: (training mode, with gradients). falls_back: micro-batches in which Megatron's own code runs. keeps: copies.
    """
    results, made, bare = [], [0, 0, 0], model.module
    import_module("overlap_train.fp8")  # else it would take what is patched
    start, (text, *_), largest = copy.deepcopy(bare.state_dict()), next(batches(7))[None, :, :-1], quantize.largest

    def data() -> Iterator[torch.Tensor]:
        for number, text in enumerate(batches()):
            bare.config.cpu_offloading = number in falls_back
            yield text

    texts, holder = data(), Fp8Copies if keeps else lambda: None
    with patch("overlap_train.integrations.megatron.weight_copies.Fp8Copies", holder):
        for step in range(3):

            def counted(*arguments: Any, step: int = step) -> torch.Tensor:
                made[step] += 1
                return largest(*arguments)

            model.zero_grad_buffer()
            with patch.object(quantize, "largest", counted):
                results.append(torch.tensor(forward_backward(recipe, model, texts)))
            bare.config.cpu_offloading = False
            for parameter in model.parameters():
                parameter.data.sub_(parameter.main_grad)
            if step == 1:
                bare.load_state_dict(start)
            for training, with_gradients in evaluations:
                model.train(training)
                with torch.set_grad_enabled(with_gradients):
                    results.append(model(text, torch.arange(SEQUENCE).expand(BATCH, -1), None).detach().clone())
            model.train()
    return [*results, *(parameter.detach() for parameter in bare.parameters())], made


def gradients(recipe: Recipe, bare: GPTModel | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and reduced main_grad of every trained parameter after one step's microbatches, and no optimizer step."""
    model = wrap(recipe, gpt(recipe) if bare is None else bare)
    model.zero_grad_buffer()
    loss = forward_backward(recipe, model, batches())
    return loss, {name: p.main_grad.clone() for name, p in model.module.named_parameters() if p.requires_grad}
