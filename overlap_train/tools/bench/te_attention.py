"""TransformerEngine's attention with its own exchanges (context parallelism by `a2a`), as a baseline of the Ulysses blocks:

    te        x [s/W, 1, hidden] -> q, k, v [s/W, 1, heads, dim], rotated -> DotProductAttention -> y [s/W, 1, hidden]
    te_alone  the same attention of this rank's heads and all rows, without exchanges

Projections are cuBLAS's, and one pass splits and rotates, as in the other baselines. TransformerEngine takes it that each rank
holds two chunks of the sequence, a zigzag, and puts them in order between its exchanges and the attention. So x is read as such
rows here, and the result must be that of torch's block on the same rows. Its core attention is cuDNN's or FlashAttention's, that
of all others torch's: te / te_alone and ms / alone say what the exchanges cost.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...ulysses.attention_layout import Rotary
from ...ulysses.layout import AttentionHeads, SequenceLayout
from ..measure.world import World
from .attention_data import Block, Data
from .attention_parts import Unpacked

LAYOUT = SequenceLayout("zigzag")


def exchanging(te: Any, world: World, data: Data) -> Block:
    """The baseline `te`: TransformerEngine's attention with its own exchanges."""
    attention, tokens = _attention(te, data.heads), len(data.x) * world.size
    stream = torch.cuda.Stream() if world.device.type == "cuda" else None  # where it reorders what has arrived
    ranks = dist.get_process_group_ranks(world.group)
    attention.set_context_parallel_group(world.group, ranks, stream, "a2a")
    own = LAYOUT.rows_of_ranks(tokens, world.size, world.device)[world.rank]
    angles = Rotary(data.rotary.cos[own], data.rotary.sin[own])

    def block(data: Data) -> torch.Tensor:
        q, k, v = Unpacked.apply(F.linear(data.x, data.w_qkv), data.heads, angles)
        return F.linear(attention(q, k, v), data.w_proj)

    return block


def alone(te: Any, world: World, data: Data) -> Block:
    """The baseline `te_alone`: what a rank has is taken for what it would receive, as in `alone`."""
    heads = data.heads.of_rank(world.size)
    attention = _attention(te, heads)

    def block(data: Data) -> torch.Tensor:
        y = F.linear(data.x, data.w_qkv).view(-1, 1, data.w_qkv.shape[0] // world.size)
        out = attention(*Unpacked.apply(y, heads, data.rotary))
        return F.linear(out.reshape(len(data.x), 1, -1), data.w_proj)

    return block


def _attention(te: Any, heads: AttentionHeads) -> Any:
    return te.DotProductAttention(
        heads.query,
        heads.dim,
        num_gqa_groups=heads.kv,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
    )
