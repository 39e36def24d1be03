"""Optimizer, schedule, and one step of training or validation, all of them Megatron's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from gpt.context_parallel import part_of_rank
from gpt.data import Batch, Share, blank, lengths
from gpt.model import Model
from gpt.settings import Settings


@dataclass
class Trainer:
    """A model with its optimizer and learning-rate schedule."""

    settings: Settings
    model: Model
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler

    def step(self, batches: Iterator[Batch]) -> tuple[torch.Tensor, float]:
        """Train on a global batch; returns (Σ nats, Σ bytes) as a tensor [2], and the gradient norm.

        The sums are those of this replica on its last pipeline stage, and zeros on the others; see `per_byte`.
        """
        self.optimizer.zero_grad()
        total = self.forward_backward(batches)
        _, grad_norm, _ = self.optimizer.step()
        self.schedule.step(increment=self.settings.global_batch_size)
        return total, 0.0 if grad_norm is None else float(grad_norm)

    def forward_backward(self, batches: Iterator[Batch]) -> torch.Tensor:
        """Replace the gradients by those of a global batch, reduced; returns Σ nats and Σ bytes as above."""
        self.model.trained.train()
        self.model.trained.zero_grad_buffer()
        return _run(self, batches, micro_batches(self.settings), forward_only=False)

    def rehearse(self, device: torch.device) -> None:
        """Run forward and backward once at each length that micro-batches may have, the longest first. One length: do nothing.

        The first use of a shape makes symmetric memory, plans of the operators and the allocator's blocks. The first step finds
        them. Weights stay as they are; the next step clears the gradients.
        """
        self.model.trained.train()
        for length in lengths(self.settings) if self.settings.variable_seq_length else ():
            self.model.trained.zero_grad_buffer()
            _run(self, iter([blank(self.settings, length, device)]), 1, forward_only=False)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], steps: int) -> float:
        """Nats per byte over `steps` global batches, summed over all data-parallel ranks."""
        self.model.trained.eval()
        return per_byte(sum(_run(self, batches, micro_batches(self.settings), forward_only=True) for _ in range(steps)))

    def release(self) -> None:
        """Free what the device must not hold when NCCL ends: nothing here (see gpt/graph.py)."""

    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])


def build_trainer(settings: Settings, model: Model) -> Trainer:
    """AdamW, distributed over data-parallel ranks on GPUs, with linear warm-up and a cosine; hooks DDP into `model`."""
    on_gpu = model.config.bf16
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=0.9,
        adam_beta2=0.95,
        clip_grad=settings.clip_grad,
        bf16=on_gpu,
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=on_gpu,
    )
    optimizer = get_megatron_optimizer(config, [model.trained])
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss
    if model.trained.ddp_config.overlap_grad_reduce:
        model.config.no_sync_func = model.trained.no_sync
    return Trainer(settings, model, optimizer, _schedule(settings, optimizer))


def per_byte(total: torch.Tensor) -> float:
    """Σ nats / Σ bytes of a tensor [2], each summed over replicas, parts of sequences and stages: the same on every rank."""
    total = total.clone()
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    return (total[0] / total[1]).item()


def data_share() -> Share:
    """This rank's part of a global batch."""
    return Share(parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size())


def micro_batches(settings: Settings) -> int:
    """Forward and backward passes in a step."""
    return settings.global_batch_size // (settings.micro_batch_size * data_share().size)


def _schedule(settings: Settings, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The schedule of learning rate and weight decay, which counts samples as Megatron does."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters * settings.global_batch_size,
        lr_decay_steps=settings.train_iters * settings.global_batch_size,
        lr_decay_style="cosine",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=settings.train_iters * settings.global_batch_size,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def _run(trainer: Trainer, batches: Iterator[Batch], count: int, forward_only: bool) -> torch.Tensor:
    settings = trainer.settings
    losses = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=batches,
        model=[trainer.model.trained],
        num_microbatches=count,
        seq_length=settings.seq_length,
        micro_batch_size=settings.micro_batch_size,
        forward_only=forward_only,
    )
    if not losses:  # not the last pipeline stage
        return next(trainer.model.bare.parameters()).new_zeros(2, dtype=torch.float64)
    return torch.stack([loss["lm loss"] for loss in losses]).sum(0)


def _forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, partial[Any]]:
    """Megatron's pair: the output of the model, on the last stage losses [b, s], and the function that makes a loss of it."""
    batch = part_of_rank(next(batches))
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(_loss, batch["loss_mask"])


def _loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total = (losses.float() * mask).sum()
    count = mask.sum()
    return total, count.to(torch.int), {"lm loss": torch.stack([total.detach(), count]).double()}
