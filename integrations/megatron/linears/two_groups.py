"""TP x Ulysses: linears of a Ulysses attention whose weights tensor parallelism (TP) divides.

    linear_qkv    AG(x) + GEMM over TP, then all-to-all over the context-parallel ranks
    linear_proj   all-to-all, then GEMM + RS over TP

A long sequence passes in parts: the product of one hides the exchange of another (overlap_train/ulysses/two_groups.py).
Where that cannot be, the linear overlaps over TP alone, and the exchange is a collective.
"""

from __future__ import annotations

from typing import Any

import torch

from overlap_train.config import flag_name
from overlap_train.integrations.megatron.linears.exchange import Exchange
from overlap_train.ulysses.two_groups import Groups, Sizes, nodes_of_groups, sizes_of_heads, sizes_of_rows


def why_apart(linear: Any, x: torch.Tensor, exchange: Exchange) -> str | None:
    """Why a linear over TP and the exchange of this call do not hide each other; None: they do.

    The same on all ranks of both groups. On GPUs the first call that is long enough communicates.
    """
    is_qkv = linear.overlap.slot == "qkv"
    if is_qkv and linear.weight.shape[0] != exchange.heads.features:
        return "fewer KV heads than TP ranks: Megatron gathers the product first"
    if parts_of_call(linear, x, exchange) == 1:
        return "too short to be cut into parts"
    return _why_not_on_gpus(linear, x, exchange) if x.is_cuda else None


def _why_not_on_gpus(linear: Any, x: torch.Tensor, exchange: Exchange) -> str | None:
    config = linear.overlap.config
    if config.method == "auto" and config.provider == "nvshmem":
        return "NVSHMEM serves one group of a process"
    nodes = nodes_of_groups(_groups(linear, exchange), config, x.device, linear.overlap.name)
    if min(nodes) > 1:
        return "both TP and CP ranks span nodes"
    if max(nodes) > 1 and config.method == "auto":
        return f"not measured across nodes of GPUs yet; {flag_name('method')} fused tries it"
    return None


def parts_of_call(linear: Any, x: torch.Tensor, exchange: Exchange) -> int:
    """Into how many parts this call is cut."""
    return len(_sizes(linear, x, exchange).parts(linear.overlap.config))


def _sizes(linear: Any, x: torch.Tensor, exchange: Exchange) -> Sizes:
    groups = _groups(linear, exchange)
    if linear.overlap.slot == "qkv":
        return sizes_of_heads(x, linear.weight, exchange.heads, groups)
    return sizes_of_rows(x, linear.weight, groups, linear.overlap.config)


def _groups(linear: Any, exchange: Exchange) -> Groups:
    assert exchange.group is not None
    return Groups(exchange.group, linear.tp_group)
