"""DDP, optimizer, schedule, and one step of training or validation, all of them Megatron's; on request a step as a CUDA graph."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import get_all_rng_states
from megatron.core.transformer.module import Float16Module

import overlap_train
from gpt.data import Batch
from gpt.settings import Settings
from overlap_train.integrations.megatron import graphed_model

WEIGHT_DECAY, CLIP_GRAD, LOWEST_LR = 0.1, 1.0, 0.1  # the last: as a part of the highest
EAGER_STEPS = 3  # before a capture: kernels compile, NCCL connects and symmetric memory is allocated


class Trainer:
    """A model in Megatron's DDP with fp32 gradients, AdamW, and a warm-up with a cosine after it. On GPUs gradients are reduced
    during the backward pass, and the optimizer is distributed over data-parallel ranks. `bare` owns the parameters and the
    checkpoint keys; `trained` is the same model in Megatron's wrappers.

    With --cuda-graph 1 the first steps run eagerly. Then all passes of a step are captured, on copies of the micro-batches
    (`inputs`), over which later steps copy their own. Megatron's full_cuda_graph.py does so once in a process, and compare_mfu
    has several models in one.
    """

    def __init__(self, settings: Settings, model: GPTModel) -> None:
        self.settings, self.bare, self.samples = settings, model, settings.global_batch_size
        self.eager_steps = EAGER_STEPS if settings.cuda_graph else math.inf  # that are left
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: Sequence[Batch] = ()
        self.total = torch.empty(2)  # (Σ nats, Σ bytes), which the graph writes
        # DDP keeps the nodes that collect gradients. They run in the stream in which DDP was built: the one that is captured.
        self.stream = torch.cuda.Stream() if settings.cuda_graph else None
        config, lowest = model.config, LOWEST_LR * settings.lr
        is_reduced_early = config.bf16 and parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
        # Without Apex and TransformerEngine Megatron cannot load the distributed optimizer's state: torch's AdamW keeps another.
        is_distributed = config.bf16 and (HAVE_APEX_OR_TE or not (settings.save or settings.load))
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=is_reduced_early, use_distributed_optimizer=is_distributed
        )
        with on_stream(self.stream):
            self.trained = DistributedDataParallel(config, ddp, Float16Module(config, model) if config.bf16 else model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=settings.lr, min_lr=lowest, weight_decay=WEIGHT_DECAY, adam_beta1=0.9, adam_beta2=0.95,
                clip_grad=CLIP_GRAD, bf16=config.bf16, params_dtype=config.params_dtype, use_distributed_optimizer=is_distributed,
            ),
            [self.trained],
        )  # fmt: skip
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        if is_reduced_early:
            config.no_sync_func = self.trained.no_sync
        self.schedule = OptimizerParamScheduler(  # counts samples
            self.optimizer, init_lr=0.0, max_lr=settings.lr, min_lr=lowest, lr_decay_style="cosine", wd_incr_style="constant",
            lr_warmup_steps=settings.lr_warmup_iters * self.samples, lr_decay_steps=settings.train_iters * self.samples,
            start_wd=WEIGHT_DECAY, end_wd=WEIGHT_DECAY, wd_incr_steps=settings.train_iters * self.samples,
            use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True,
        )  # fmt: skip

    def step(self, batches: Iterator[Batch]) -> tuple[torch.Tensor, float]:
        """Train on a global batch; returns (Σ nats, Σ bytes) of this replica's part as a tensor [2], and the gradient norm."""
        self.optimizer.zero_grad()
        total = self.forward_backward(batches)
        _, grad_norm, _ = self.optimizer.step()
        self.schedule.step(increment=self.samples)
        return total, 0.0 if grad_norm is None else float(grad_norm)

    def forward_backward(self, batches: Iterator[Batch]) -> torch.Tensor:
        """Replace the gradients by those of a global batch, reduced; returns Σ nats and Σ bytes as above. Raises
        OverlapTimeoutError where a wait in an earlier replay has given up."""
        taken = list(islice(batches, micro_batches(self.settings)))
        if self.graph is None and self.eager_steps > 0:
            self.eager_steps -= 1
            with on_stream(self.stream):
                return self._train(taken)
        if self.graph is None:
            self.capture(taken)
        assert self.graph is not None
        overlap_train.check()  # a replay raises nothing itself
        for kept, batch in zip(self.inputs, taken, strict=True):
            for key, value in kept.items():
                value.copy_(batch[key], non_blocking=True)
        self.graph.replay()
        return self.total.clone()  # the next replay writes over it

    def capture(self, batches: Sequence[Batch]) -> None:
        """Capture the passes of a global batch, once, after the eager steps. Nothing runs, so gradients stay as they are."""
        graph = torch.cuda.CUDAGraph()
        inputs = [{key: value.clone() for key, value in batch.items()} for batch in batches]
        for state in get_all_rng_states().values():
            graph.register_generator_state(state)
        gc.collect()  # freeing memory during a capture may end it
        torch.cuda.synchronize()
        # thread_local: NCCL's watchdog and autograd's threads go on calling CUDA
        capture = torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local")
        with capture, graphed_model(self.bare):
            self.total = self._train(inputs)
        self.graph, self.inputs = graph, inputs

    def release(self) -> None:
        """Free the graph, which NCCL's end would wait for; the next call captures again."""
        if self.graph is not None:
            torch.cuda.synchronize()
            self.graph.reset()
        self.graph, self.inputs = None, ()

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], steps: int) -> float:
        """Nats per byte over `steps` global batches, summed over all data-parallel ranks."""
        self.trained.eval()
        return per_byte(sum(self._run(batches, forward_only=True) for _ in range(steps)))

    def _train(self, batches: Sequence[Batch]) -> torch.Tensor:
        self.trained.train()
        self.trained.zero_grad_buffer()
        return self._run(iter(batches), forward_only=False)

    def _run(self, batches: Iterator[Batch], forward_only: bool) -> torch.Tensor:
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=batches,
            model=[self.trained],
            num_microbatches=micro_batches(self.settings),
            seq_length=self.settings.seq_length,
            micro_batch_size=self.settings.micro_batch_size,
            forward_only=forward_only,
        )
        return torch.stack([loss["lm loss"] for loss in losses]).sum(0)


def _forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, partial[Any]]:
    """Megatron's pair: the losses [b, s] of the model, and the function that makes a loss of them."""
    batch = next(batches)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(_loss, batch["loss_mask"])


def _loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total, count = (losses.float() * mask).sum(), mask.sum()
    return total, count.to(torch.int), {"lm loss": torch.stack([total.detach(), count]).double()}


def per_byte(totals: torch.Tensor) -> Any:
    """Σ nats / Σ bytes of [..., 2], each summed over replicas and parts of sequences: the same on every rank."""
    totals = totals.clone()
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return (totals[..., 0] / totals[..., 1]).tolist()


def micro_batches(settings: Settings) -> int:
    """Forward and backward passes in a step."""
    return settings.global_batch_size // (settings.micro_batch_size * parallel_state.get_data_parallel_world_size())


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Enqueue the block into `stream`: after what the caller's stream has, before what it gets next. None: change nothing."""
    if stream is None:
        yield
        return
    caller = torch.cuda.current_stream()
    stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        yield
    caller.wait_stream(stream)
