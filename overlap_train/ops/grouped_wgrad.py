"""Weight gradients of all experts of a rank by one kernel, on Hopper in 16 bits (kernels/hopper_grouped_wgrad.py).

    dw [N, K] = dy [rows of expert, N].T @ x [rows of expert, K]

Sums are in fp32, in order of rows: returned, rounded once, or added to fp32 main_grad, wherever that of each expert lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce
from operator import or_
from typing import Any

import torch

from ..gpu.launch import Launch
from ..group.domain import OverlapDomain
from ..select.tiles import tma_reads
from .launch import BLOCK_K, BLOCK_M, BLOCK_N, LAUNCH, PART_M, STAGES, grid_size, shared_layout, stored
from .routing import Places
from .wgrad import note_added, target_of, unmark

_LEAST_EXPERTS = 2  # of four of Mixtral, one GEMM after the other takes 1.08 to 1.15 times as long as all at once
_COUNTERS = 2
_GROUP = 8  # rows of tiles that share columns in L2
_RAGGED = 1 << 30  # rows of a ragged descriptor, as the kernel knows it
_ANY = 0x7FFF_0000  # coordinates that have no edge
_WRAP = (1 << 64) // _RAGGED  # a stride: _RAGGED of these steps are 2**64, so nothing


def grouped_gradients(
    domain: OverlapDomain, weights: Sequence[torch.Tensor], main_grad: str, ctx: Any, dy: torch.Tensor, x: torch.Tensor,
    places: Places,
) -> list[torch.Tensor | None] | None:  # fmt: skip
    """dw [N, K] = dy.T @ x of each expert's rows, of dy [R, N] and x [R, K] in placed order: returned, as views of one tensor, or
    added to main_grad, and the list has None in its place. Returns no list but None where the kernel does not serve: then nothing
    was done.

    main_grad, ctx: see WeightGradient; the weights are its tensors from number 1 on.
    """
    if len(weights) < _LEAST_EXPERTS or not len(x) or not tma_reads(x.device, x.dtype, dy.shape[1], x.shape[1]):
        return None  # before weights are looked at
    targets = [target_of(weight, main_grad, ctx, number) for number, weight in enumerate(weights, 1)]
    main_grads = [target for target in targets if target is not None]
    addresses = tuple(map(torch.Tensor.data_ptr, main_grads))
    if not _fit(dy, x, main_grads, addresses, len(weights)):
        return None
    dws = None if main_grads else x.new_empty(len(weights), dy.shape[1], x.shape[1])
    tensors = (dy, x, dws, _words(domain, addresses), places.ends)
    values = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    key = ("grouped wgrad", len(weights), dy.shape[1], x.shape[1], x.dtype, dws is None, values[-1] % 16)
    domain.launches.run(key, values, _launch, *tensors)
    placeholder = cache(lambda: torch.empty_like(weights[0]))
    for number, weight in enumerate(weights, 1):
        if dws is not None:
            unmark(weight, ctx, number)
        elif ctx is not None:
            note_added(weight, ctx, number, placeholder)
    return [None] * len(weights) if dws is None else [*dws]


def _fit(
    dy: torch.Tensor, x: torch.Tensor, main_grads: Sequence[torch.Tensor], addresses: Sequence[int], experts: int
) -> bool:
    """Whether gradients are of one kind, main_grad in fp32 that no two experts share, and all lie as TMA and `red` want."""
    if len(set(addresses)) not in (0, experts) or reduce(or_, addresses, dy.data_ptr() | x.data_ptr()) % 16:
        return False
    are_fp32 = all(main_grad.dtype is torch.float32 for main_grad in main_grads)
    return are_fp32 and all(map(torch.Tensor.is_contiguous, (dy, x, *main_grads)))


def _words(domain: OverlapDomain, addresses: tuple[int, ...]) -> torch.Tensor:
    """int64: two counters, which are zero before and after the kernel, and the addresses. Those of main_grad are the same in each
    call: they are copied once, and calls that add to one main_grad follow each other. Without addresses the counters are new, as
    calls in other streams may be under way."""
    if not addresses:
        return torch.zeros(_COUNTERS, dtype=torch.int64, device=domain.device)
    known = domain.main_grad_addresses.get(addresses)
    if known is None:
        words = torch.tensor([*[0] * _COUNTERS, *addresses])
        known = domain.main_grad_addresses.put(addresses, words.to(domain.device, non_blocking=True))
    return known


def _launch(
    dy: torch.Tensor, x: torch.Tensor, dws: torch.Tensor | None, words: torch.Tensor, ends: torch.Tensor
) -> Launch:
    from ..kernels.hopper_grouped_wgrad import hopper_grouped_wgrad_kernel

    experts, n, k = len(ends), dy.shape[1], x.shape[1]
    dw_desc = None if dws is None else stored(dws.flatten(0, 1), experts)
    arguments = dict(dy_desc=_ragged(dy, PART_M), x_desc=_ragged(x, BLOCK_N), dw_desc=dw_desc)
    arguments |= dict(words_ptr=words, ends_ptr=ends, experts=experts, n=n, k=k)
    constants = dict(ADDS=dws is None, BLOCK_N=BLOCK_M, BLOCK_K=BLOCK_N, ROWS=BLOCK_K, GROUP_N=_GROUP, STAGES=STAGES)
    grid = grid_size(experts * -(-n // BLOCK_M) * -(-k // BLOCK_N), x.device, 0)
    written = () if dws is None else ("dw_desc",)
    replaced = (("dy_desc",), ("x_desc",), written, ("words_ptr",), ("ends_ptr",))
    return Launch(hopper_grouped_wgrad_kernel, grid, arguments, constants | LAUNCH, replaced)


def _ragged(matrix: torch.Tensor, cols: int) -> Any:
    """The descriptor of a matrix [rows, features] in panels [BLOCK_K, cols]: at (2**30, end, 2**30 - left, column) lie the last
    `left` rows before row `end`, then zeros. It serves any number of rows."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    features, block = matrix.shape[1], (1, 1, BLOCK_K, cols)
    strides = [_WRAP - features, features, features, 1]
    shape = [_ANY, _ANY, _RAGGED, features]
    return TensorDescriptor(matrix, shape, strides, [*block], shared_layout(block, matrix.dtype))
