"""Text from a trained model, one byte at a time, with the whole window computed anew for each byte."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from gpt.data import BYTES, part_of_rank
from gpt.training import Trainer

PROMPT, TEMPERATURE = "The ", 0.7


@torch.no_grad()
def generate(trainer: Trainer, device: torch.device) -> str:
    """PROMPT and `sample_bytes` more bytes; every rank gets the same text.

    The window is always filled up to seq_length, so that sequence parallelism can divide it. Attention is causal, so the
    filling after the last byte changes nothing.
    """
    settings, tokens = trainer.settings, [*PROMPT.encode()]
    trainer.trained.eval()
    generator = torch.Generator().manual_seed(settings.seed)
    positions = torch.arange(settings.seq_length, device=device).unsqueeze(0)
    for _ in range(settings.sample_bytes):
        known = torch.tensor(tokens[-settings.seq_length :], device=device)
        window = torch.nn.functional.pad(known, (0, settings.seq_length - len(known))).unsqueeze(0)
        logits = _logits_at(trainer, window, positions, len(known) - 1).cpu()
        tokens.append(int(torch.multinomial(torch.softmax(logits / TEMPERATURE, dim=-1), 1, generator=generator)))
    return bytes(tokens).decode("utf-8", errors="replace")


def _logits_at(trainer: Trainer, window: torch.Tensor, positions: torch.Tensor, place: int) -> torch.Tensor:
    """Logits [256] in fp32 after the byte at one place of `window` [1, s]."""
    batch = part_of_rank({"tokens": window, "position_ids": positions, "is_here": (positions == place).float()})
    logits = trainer.trained(batch["tokens"], batch["position_ids"], None)  # [1, s/cp, V/W]
    row = (logits[0].float() * batch["is_here"][0].unsqueeze(1)).sum(0)
    dist.all_reduce(row, group=parallel_state.get_context_parallel_group())
    return gather_from_tensor_model_parallel_region(row, group=parallel_state.get_tensor_model_parallel_group())[:BYTES]
