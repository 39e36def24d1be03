"""Model FLOPs of a training step, and the peak that they are compared with.

Counted as Megatron-LM counts them (`num_floating_point_operations` in megatron/training/training.py, after the appendix of
arXiv 2104.04473): products of matrices only, each three times (forward and two in backward), the causal half of attention, and
nothing that is computed a second time. For B samples of s tokens, with q = heads x head width and k = groups x head width:

    6 B s [ layers ( h (q + 2 k) + s q + q h + MLPs a token x 3 h ffn ) + h x padded vocabulary ]      s q: 2 (s / 2) q
"""

from __future__ import annotations

import torch

from gpt.settings import Settings
from overlap_train.select.system import system_of


def step_flops(settings: Settings) -> float:
    """Floating-point operations of one optimizer step of the model, over all ranks."""
    hidden, width = settings.hidden_size, settings.head_width
    queries, keys = settings.num_attention_heads * width, settings.num_query_groups * width
    attention = hidden * (queries + 2 * keys) + settings.seq_length * queries + queries * hidden
    mlp = max(1, settings.experts_per_token) * 3 * hidden * settings.ffn_hidden_size
    tokens = settings.global_batch_size * settings.seq_length
    return 6.0 * tokens * (settings.num_layers * (attention + mlp) + hidden * settings.vocabulary_rows)


def peak_tflops(device: torch.device) -> float | None:
    """Peak TFLOP/s of one GPU in dense bf16; None for a device that select/system.py does not list."""
    found = system_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if found is None else found.peak_tflops
