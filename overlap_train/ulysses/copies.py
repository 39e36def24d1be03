"""KV heads that several ranks need, where a group has more ranks than there are KV heads: the gradients of their copies.

AttentionHeads.sent_rows says which rows of the weight are sent, some of them to several ranks.
"""

from __future__ import annotations

import torch


def summed_copies(dy_blocks: torch.Tensor, copies: torch.Tensor, n: int) -> torch.Tensor:
    """dy [rows, N] from [W, rows, N'/W], column i of which belongs to row copies[i] of the weight.

    Copies are added in fp32 and in the order of ranks.
    """
    total = dy_blocks.new_zeros(dy_blocks.shape[1], n, dtype=torch.float32)
    for block, columns in zip(dy_blocks, copies.chunk(len(dy_blocks)), strict=True):
        total[:, columns] += block  # within a block each column comes once
    return total.to(dy_blocks.dtype)
