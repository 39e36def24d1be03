"""Model FLOPs of a training step, and the peak that they are compared with.

Counted as Megatron-LM counts them (`num_floating_point_operations` in megatron/training/training.py, after the appendix of
arXiv 2104.04473): products of matrices only, each three times (forward and two in backward), the causal half of attention, and
nothing that is computed a second time. For B samples of s tokens, with q = heads x head width and k = groups x head width:

    6 B s [ layers ( h (q + 2 k) + s q + q h + MLPs a token x 3 h ffn ) + h x padded vocabulary ]      s q: 2 (s / 2) q
"""

from __future__ import annotations

import torch

from gpt.architectures import Architecture
from gpt.settings import Settings, architecture_of
from gpt.tokenizer import padded_vocab_size

# Dense bf16, in TFLOP/s, from NVIDIA's data sheets; the first name that the device's name contains counts.
PEAKS = {"H200": 989.4, "H100 PCIe": 756.0, "H100": 989.4, "H20": 148.0, "B200": 2250.0, "A100": 312.0}


def step_flops(settings: Settings) -> float:
    """Floating-point operations of one optimizer step of the model, over all ranks."""
    architecture = architecture_of(settings)
    tokens = settings.global_batch_size * settings.seq_length
    vocabulary = padded_vocab_size(settings.tp, architecture.vocab_size)
    layer = _layer(architecture, settings.seq_length)
    return 6.0 * tokens * (architecture.num_layers * layer + architecture.hidden_size * vocabulary)


def _layer(architecture: Architecture, seq_length: int) -> int:
    """Multiplications of a forward pass through one layer, for a token."""
    hidden, width = architecture.hidden_size, architecture.head_width
    queries, keys = architecture.num_attention_heads * width, architecture.num_query_groups * width
    mlps = architecture.experts_per_token if architecture.experts else 1
    attention = hidden * (queries + 2 * keys) + seq_length * queries + queries * hidden
    return attention + mlps * 3 * hidden * architecture.ffn_hidden_size


def peak_tflops(device: torch.device) -> float | None:
    """Of one GPU; None for a device that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAKS.items() if known in name), None)
