"""What an operator is compared with: NCCL and cuBLAS in sequence, PyTorch's async-TP, and each half of the work alone.

Every rival of a kind of pass (operands.py) takes the same operands. Buffers that a framework would reuse are reused.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from ..weight_gradient import accumulate
from .operands import Operands


class Rivals(Protocol):
    """The results of `sequence` and `async_tp` are the pass's own; `gemm` and `communication` are timed only."""

    def sequence(self, o: Operands) -> torch.Tensor: ...

    def async_tp(self, o: Operands) -> torch.Tensor: ...

    def gemm(self, o: Operands) -> torch.Tensor: ...

    def communication(self, o: Operands) -> torch.Tensor: ...


class GatherRivals:
    """y [M, F] = all_gather(left) @ right."""

    def __init__(self, group: dist.ProcessGroup, like: Operands) -> None:
        self._group, self._buffer = group, torch.empty_like(like.whole)

    def communication(self, o: Operands) -> torch.Tensor:
        dist.all_gather_into_tensor(self._buffer, o.left, group=self._group)
        return self._buffer

    def sequence(self, o: Operands) -> torch.Tensor:
        return self.communication(o) @ o.right

    def gemm(self, o: Operands) -> torch.Tensor:
        return o.whole @ o.right

    def async_tp(self, o: Operands) -> torch.Tensor:
        return async_all_gather_matmul(o.left, o.right, self._group)[1]


class ScatterRivals:
    """y [M/W, F] = reduce_scatter(left @ right)."""

    def __init__(self, group: dist.ProcessGroup, like: Operands) -> None:
        self._group, self._world = group, dist.get_world_size(group)

    def _scatter(self, partial: torch.Tensor) -> torch.Tensor:
        y = partial.new_empty(partial.shape[0] // self._world, partial.shape[1])
        dist.reduce_scatter_tensor(y, partial, group=self._group)
        return y

    def communication(self, o: Operands) -> torch.Tensor:
        return self._scatter(o.whole)

    def sequence(self, o: Operands) -> torch.Tensor:
        return self._scatter(o.left @ o.right)

    def gemm(self, o: Operands) -> torch.Tensor:
        return o.left @ o.right

    def async_tp(self, o: Operands) -> torch.Tensor:
        return async_matmul_reduce_scatter(o.left, o.right, self._group)


class ColumnWeightRivals:
    """target [N/W, K] += right.T @ all_gather(left): the column linear's weight gradient, x gathered again."""

    def __init__(self, group: dist.ProcessGroup, like: Operands) -> None:
        self._group, self._buffer = group, torch.empty_like(like.whole)
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)

    def communication(self, o: Operands) -> torch.Tensor:
        dist.all_gather_into_tensor(self._buffer, o.left, group=self._group)
        return self._buffer

    def sequence(self, o: Operands) -> torch.Tensor:
        return into_target(o, o.right, self.communication(o))

    def gemm(self, o: Operands) -> torch.Tensor:
        return into_target(o, o.right, o.whole)

    def async_tp(self, o: Operands) -> torch.Tensor:
        """Async-TP gathers along the first dimension of x.T [K, M], of which each rank keeps K/W rows."""
        x_shard_k = o.whole.chunk(self._world, dim=1)[self._rank]
        _, dw_t = async_all_gather_matmul(x_shard_k.t().contiguous(), o.right, self._group)
        assert o.target is not None
        return o.target.add_(dw_t.t())


class RowWeightRivals:
    """target [N, K/W] += whole.T @ right: the row linear's weight gradient, with the dy gathered for dgrad."""

    def __init__(self, group: dist.ProcessGroup, like: Operands) -> None:
        pass

    def gemm(self, o: Operands) -> torch.Tensor:
        return into_target(o, o.whole, o.right)

    sequence = async_tp = gemm

    def communication(self, o: Operands) -> torch.Tensor:
        return o.whole


def rivals_of(op: str, kind: str, group: dist.ProcessGroup, like: Operands) -> Rivals:
    """The rivals of a pass; `like` is one of its input sets."""
    if kind == "weight":
        return (ColumnWeightRivals if op == "ag_gemm" else RowWeightRivals)(group, like)
    return (GatherRivals if kind == "gather" else ScatterRivals)(group, like)


def into_target(o: Operands, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    assert o.target is not None
    accumulate(o.target, dy, x)
    return o.target


def async_all_gather_matmul(
    a_shard: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """a_shard [M/W, K], b [K, N] -> all_gather(a_shard) [M, K] and its product with b, by PyTorch's async-TP.

    The gathered input is returned, as a backward needs it; without it PyTorch may choose a path over NVLink multicast.
    """
    _load_async_tp(a_shard)
    gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(a_shard, [b], 0, group.group_name)
    return gathered, products[0]


def async_matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """a [M, K/W], b [K/W, N] -> reduce_scatter(a @ b) [M/W, N], by PyTorch's async-TP."""
    _load_async_tp(a)
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, group.group_name)


def _load_async_tp(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cuda":
        raise RuntimeError("PyTorch's async-TP needs CUDA devices")
    import torch.distributed._symmetric_memory  # noqa: F401  registers the operators
