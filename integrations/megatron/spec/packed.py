"""Attention within the documents of a packed sequence, by torch: rows of no document get zeros, and give no gradient."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from overlap_train.integrations.megatron.packed import Documents


@dataclass(frozen=True)
class Softmax:
    """How scores become weights."""

    scale: float
    is_causal: bool
    dropout: float


def packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, softmax: Softmax
) -> torch.Tensor:
    """[t, n, d] from q [t, n, d] and k, v [t, g, d] with n a multiple of g.

    torch's variable-length attention has one kernel for all documents, for 16 bits on GPUs and without dropout. Elsewhere each
    document is a call of its own.
    """
    attend = (
        _at_once if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and not softmax.dropout else _one_by_one
    )
    places = documents.places(q.device)
    if places is None:
        context = attend(q[: documents.end], k[: documents.end], v[: documents.end], documents, softmax)
        return F.pad(context, (0, 0, 0, 0, 0, len(q) - documents.end))
    q_rows, k_rows, v_rows = (x.index_select(0, places) for x in (q, k, v))
    context = attend(q_rows, k_rows, v_rows, documents, softmax)
    return torch.zeros_like(q).index_copy(0, places, context)


def _at_once(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, softmax: Softmax) -> torch.Tensor:
    """Rows beyond the last document would give it NaN gradients (pytorch #176793), therefore there are none."""
    offsets, longest = documents.offsets(q.device), max(documents.lengths)
    options: dict[str, object] = {"scale": softmax.scale, "window_size": (-1, 0 if softmax.is_causal else -1)}
    if q.size(1) != k.size(1):
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.12
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
    return varlen_attn(q, k, v, offsets, offsets, longest, longest, **options)  # type: ignore[arg-type,return-value]


def _one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, softmax: Softmax
) -> torch.Tensor:
    parts = zip(*(x.transpose(0, 1).split(documents.lengths, dim=1) for x in (q, k, v)), strict=True)
    contexts = [
        F.scaled_dot_product_attention(
            q_rows, k_rows, v_rows, dropout_p=softmax.dropout, is_causal=softmax.is_causal, scale=softmax.scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        for q_rows, k_rows, v_rows in parts
    ]  # fmt: skip
    return torch.cat(contexts, dim=1).transpose(0, 1)
