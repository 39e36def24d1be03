"""Tables of experts as the kernel makes them in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch

from overlap_train.gpu.launch import LaunchCache
from overlap_train.ops.expert_tables import Tables, expert_tables

INTERPRETED = LaunchCache(None, 0)


def tables_of(counts: Any, rank: int) -> Tables:
    """Those of `rank`, as long as they are filled. counts: rows [W, W, E/W] from a rank to another's experts."""
    rows, most_pairs = int(counts[rank].sum()), int((-(-counts[:, rank].sum(0) // 128)).sum())
    flat = torch.as_tensor(counts).to(torch.int32).flatten(1)
    tables = expert_tables(INTERPRETED, flat, rank, rows, most_pairs)
    assert int(tables.pairs[0, 0]) == most_pairs
    return tables._replace(pieces=tables.pieces[: 1 + int(tables.pieces[0, 0])])
