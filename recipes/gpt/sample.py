"""Text from a trained model, one byte at a time, with the whole window computed anew for each byte."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from gpt.context_parallel import part_of_rank, row_of_all
from gpt.corpus import BYTES
from gpt.model import Model
from gpt.settings import Settings


@torch.no_grad()
def generate(model: Model, settings: Settings, device: torch.device) -> bytes:
    """`settings.prompt` (a line end where it is empty) and `settings.sample_bytes` more bytes; every rank gets the same text.

    The window is always filled up to seq_length, so that sequence parallelism can divide it. Attention is causal, so the
    filling after the last byte changes nothing.
    """
    model.trained.eval()
    generator = torch.Generator().manual_seed(settings.seed)
    tokens = [*(settings.prompt or "\n").encode()]
    for _ in range(settings.sample_bytes):
        logits = _next_byte(model, tokens[-settings.seq_length :], settings.seq_length, device)
        tokens.append(_choose(logits.cpu(), settings.temperature, generator))
    return bytes(tokens)


def _next_byte(model: Model, window: list[int], seq_length: int, device: torch.device) -> torch.Tensor:
    """Logits [256] in fp32 of the byte after `window`; the last pipeline stage sends them to the others."""
    tokens = torch.zeros(1, seq_length, dtype=torch.long, device=device)
    tokens[0, : len(window)] = torch.tensor(window)
    positions = torch.arange(seq_length, device=device).unsqueeze(0)
    known = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, tokens, positions),
        data_iterator=None,
        model=[model.trained],
        num_microbatches=1,
        seq_length=seq_length,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not known:  # not the last stage
        return _from_last_stage(torch.empty(BYTES, device=device))
    group = parallel_state.get_tensor_model_parallel_group()
    logits = gather_from_tensor_model_parallel_region(row_of_all(known[0][0], len(window) - 1), group=group)
    return _from_last_stage(logits[:BYTES].float().contiguous())


def _forward_step(
    tokens: torch.Tensor, positions: torch.Tensor, _: Iterator[Any] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Any]:
    """Megatron's pair: the output of the model, on the last stage logits [1, s/cp, V/W], and how to make a result of it."""
    part = part_of_rank({"tokens": tokens, "positions": positions})
    return model(part["tokens"], part["positions"], None), lambda logits, non_loss_data: logits


def _from_last_stage(logits: torch.Tensor) -> torch.Tensor:
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(logits, last, group=parallel_state.get_pipeline_model_parallel_group())
    return logits


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
