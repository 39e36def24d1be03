"""Text from a trained model, one byte at a time, with the whole window computed anew for each byte."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from gpt.model import Model
from gpt.settings import Settings
from gpt.tokenizer import BYTES, EOD


@torch.no_grad()
def generate(model: Model, settings: Settings, device: torch.device) -> bytes:
    """`settings.prompt` and `settings.sample_bytes` more bytes. Every rank calls it and gets the same text.

    The window is always filled up to seq_length, so that sequence parallelism can divide it; attention is causal, hence
    the filling behind the last byte changes nothing.
    """
    model.trained.eval()
    generator = torch.Generator().manual_seed(settings.seed)
    tokens = [EOD, *settings.prompt.encode()]
    for _ in range(settings.sample_bytes):
        logits = _next_byte(model, tokens[-settings.seq_length :], settings.seq_length, device)
        tokens.append(_choose(logits.float().cpu(), settings.temperature, generator))
    return bytes(tokens[1:])


def _next_byte(model: Model, window: list[int], seq_length: int, device: torch.device) -> torch.Tensor:
    """Logits [256] of the byte behind `window`."""
    tokens = torch.zeros(1, seq_length, dtype=torch.long, device=device)
    tokens[0, : len(window)] = torch.tensor(window)
    positions = torch.arange(seq_length, device=device).unsqueeze(0)
    shard = model.trained(tokens, positions, None)[0, len(window) - 1]
    group = parallel_state.get_tensor_model_parallel_group()
    return gather_from_tensor_model_parallel_region(shard, group=group)[:BYTES]


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
