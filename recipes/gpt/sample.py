"""Text from a trained model, one byte at a time, with the whole window computed anew for each byte."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from gpt.data import BYTES, Batch, part_of_rank
from gpt.training import Trainer

PROMPT, TEMPERATURE = "The ", 0.7


@torch.no_grad()
def generate(trainer: Trainer, device: torch.device) -> str:
    """PROMPT and `sample_bytes` more bytes; every rank gets the same text.

    The window is always filled up to seq_length, so that sequence parallelism can divide it. Attention is causal, so the
    filling after the last byte changes nothing.
    """
    settings, tokens = trainer.settings, [*PROMPT.encode()]
    trainer.model.trained.eval()
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.sample_bytes):
        window = torch.zeros(1, settings.seq_length, dtype=torch.long, device=device)
        known = tokens[-settings.seq_length :]
        window[0, : len(known)] = torch.tensor(known)
        positions = torch.arange(settings.seq_length, device=device).unsqueeze(0)
        is_last = (positions == len(known) - 1).float()
        batch = part_of_rank({"tokens": window, "position_ids": positions, "is_last": is_last})
        logits = _next_byte(trainer, batch, device)
        tokens.append(int(torch.multinomial(torch.softmax(logits.cpu() / TEMPERATURE, dim=-1), 1, generator=generator)))
    return bytes(tokens).decode("utf-8", errors="replace")


def _next_byte(trainer: Trainer, batch: Batch, device: torch.device) -> torch.Tensor:
    """Logits [256] in fp32 at the one place where `is_last` is 1; the last pipeline stage sends them to the others."""
    found = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, batch),
        data_iterator=None,
        model=[trainer.model.trained],
        num_microbatches=1,
        seq_length=trainer.settings.seq_length,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    logits = torch.empty(BYTES, device=device)
    if found:  # [1, s/cp, V/W], on the last stage
        row = (found[0][0].float() * batch["is_last"][0].unsqueeze(1)).sum(0)
        dist.all_reduce(row, group=parallel_state.get_context_parallel_group())
        group = parallel_state.get_tensor_model_parallel_group()
        logits = gather_from_tensor_model_parallel_region(row, group=group)[:BYTES].contiguous()
    if trainer.settings.pp > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(logits, last, group=parallel_state.get_pipeline_model_parallel_group())
    return logits


def _forward_step(batch: Batch, _: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Megatron's pair: the output of the model, and how to make a result of it."""
    return model(batch["tokens"], batch["position_ids"], None), lambda logits, non_loss_data: logits
