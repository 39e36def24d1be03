"""What is wrong with the arguments of an attention's projections, in one line, before anything is planned or sent."""

from __future__ import annotations

import torch

from .attention_layout import QkNorm, Rotary
from .layout import AttentionHeads, SequenceLayout


def sequence_error(
    x: torch.Tensor, rows: int, layout: SequenceLayout, rotary: Rotary | None, world_size: int, name: str
) -> str | None:
    """What is wrong with x and what goes with its rows, or None. rows: of the whole sequence, unless layout has lengths."""
    if not isinstance(layout, SequenceLayout):
        return f"{name}: layout={layout!r} must be a SequenceLayout, such as SequenceLayout('zigzag')"
    if not isinstance(rotary, Rotary | None):
        return f"{name}: rotary is a {type(rotary).__name__}; it must be Rotary(cos, sin), or None"
    if x.dim() != 3:
        return f"{name}: the input has shape {tuple(x.shape)}; it must be [sequence, batch, features]"
    rows = sum(layout.lengths) or rows
    if rotary is not None and (rotary.cos.shape != rotary.sin.shape or rotary.cos.shape[:-1].numel() != rows):
        shapes = f"cos {tuple(rotary.cos.shape)} and sin {tuple(rotary.sin.shape)}"
        return f"{name}: rotary has {shapes}; both must have a row for each of the {rows} rows of all ranks"
    if rotary is not None and (rotary.cos.device != x.device or rotary.sin.device != x.device):
        where = f"cos on {rotary.cos.device} and sin on {rotary.sin.device}"
        return f"{name}: rotary has {where}, the input is on {x.device}; move them there"
    return layout.error(rows, world_size, name)


def lengths_error(x: torch.Tensor, layout: SequenceLayout, rank: int | None, shards: int, name: str) -> str | None:
    """Why x does not have as many rows as layout.lengths says, or None. rank: whose rows they are, of which x has one of `shards`
    equal parts; None: of the whole sequence."""
    if not layout.lengths:
        return None
    if any(length % shards for length in layout.lengths):
        return (
            f"{name}: layout.lengths={layout.lengths} must be divisible by the {shards} ranks of tp_group, which have equal "
            f"parts of a rank's rows"
        )
    expected = sum(layout.lengths) if rank is None else layout.lengths[rank] // shards
    if x.shape[0] == expected:
        return None
    whose = "all ranks together have" if rank is None else f"rank {rank} has"
    return f"{name}: the input has shape {tuple(x.shape)}; by layout.lengths={layout.lengths} {whose} {expected} rows in it"


def heads_error(
    x: torch.Tensor, heads: AttentionHeads, qk_norm: QkNorm | None, rotary: Rotary | None, name: str
) -> str | None:
    """What is wrong with what goes with the features of a head, or None."""
    wrong = not_heads(heads, name)
    if wrong is not None:
        return wrong
    if not isinstance(qk_norm, QkNorm | None):
        return f"{name}: qk_norm is a {type(qk_norm).__name__}; it must be QkNorm(q_weight, k_weight, eps), or None"
    rotated = 0 if rotary is None else rotary.cos.shape[-1]
    if rotary is not None and (rotated % 2 or not 0 < rotated <= heads.dim):
        return f"{name}: rotary turns {rotated} features of each head, which has {heads.dim}; it must be an even number of them"
    return None if qk_norm is None else qk_norm.error(heads.dim, x.device, name)


def weight_error(
    heads: AttentionHeads, w: torch.Tensor, bias: torch.Tensor | None, world_size: int, name: str
) -> str | None:
    """Why `heads` do not fit w, bias or the ranks, or None."""
    wrong = not_heads(heads, name) or heads.error(world_size, name)
    if wrong is not None:
        return wrong
    if w.shape[:1] != (heads.features,):
        rows = f"{w.shape[:1].numel()} rows (shape {tuple(w.shape)})"
        return f"{name}: w has {rows}, {heads} needs {heads.features}; they must be equal"
    if bias is not None and bias.shape != (heads.features,):
        return f"{name}: bias has shape {tuple(bias.shape)}; it must be [{heads.features}], one per row of w"
    return None


def not_heads(heads: AttentionHeads, name: str) -> str | None:
    """Why `heads`, of whatever type, are no AttentionHeads, or None."""
    if isinstance(heads, AttentionHeads):
        return None
    return f"{name}: heads={heads!r} must be AttentionHeads(query=..., kv=..., dim=...)"
