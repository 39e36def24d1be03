"""Weight gradients of all experts of a rank by one kernel, on Hopper in 16 bits (kernels/hopper_grouped_wgrad.py).

    dw [N, K] = dy [rows of expert, N].T @ x [rows of expert, K]

Sums are in fp32, in order of rows: returned, rounded once, or added to fp32 main_grad, wherever that of each expert lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..gpu.launch import Launch
from ..group.domain import OverlapDomain
from ..select.tiles import tma_reads
from .launch import BLOCK_K, BLOCK_M, BLOCK_N, LAUNCH, PART_M, STAGES, grid_size, shared_layout, stored
from .routing import Places
from .wgrad import WeightGradient

_LEAST_EXPERTS = 2  # of four of Mixtral, one GEMM after the other takes 1.08 to 1.15 times as long as all at once
_COUNTERS = 2
_GROUP = 8  # rows of tiles that share columns in L2
_RAGGED = 1 << 30  # rows of a ragged descriptor, as the kernel knows it
_ANY = 0x7FFF_0000  # coordinates that have no edge
_WRAP = (1 << 64) // _RAGGED  # a stride: _RAGGED of these steps are 2**64, so nothing


def add_grouped(
    domain: OverlapDomain, gradients: Sequence[WeightGradient | None], dy: torch.Tensor, x: torch.Tensor, places: Places
) -> bool:
    """Add the product of each expert's rows of dy [R, N] and x [R, K], both in placed order, to its gradient; None: it has none.
    False: the kernel does not serve, and nothing was done."""
    wanted = [gradient for gradient in gradients if gradient is not None]
    main_grads = [gradient.target for gradient in wanted if gradient.target is not None]
    addresses = tuple(main_grad.data_ptr() for main_grad in main_grads)
    if len(wanted) < len(gradients) or not _has_kernel(dy, x, main_grads, addresses, len(wanted)):
        return False
    dws = None if main_grads else x.new_empty(len(wanted), dy.shape[1], x.shape[1])
    tensors = (dy, x, dws, _words(domain, addresses), places.ends)
    values = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    key = ("grouped wgrad", len(wanted), dy.shape[1], x.shape[1], x.dtype, dws is None, values[-1] % 16)
    domain.launches.run(key, values, _launch, *tensors)
    for number, gradient in enumerate(wanted):
        gradient.take(None if dws is None else dws[number])
    return True


def _has_kernel(
    dy: torch.Tensor, x: torch.Tensor, main_grads: Sequence[torch.Tensor], addresses: Sequence[int], experts: int
) -> bool:
    """Whether the kernel serves: gradients of one kind, matrices that TMA reads, main_grad that no two experts share."""
    if experts < _LEAST_EXPERTS or not len(x) or not tma_reads(x.device, x.dtype, dy.shape[1], x.shape[1]):
        return False
    if len(set(addresses)) not in (0, experts) or any(at % 16 for at in (*addresses, dy.data_ptr(), x.data_ptr())):
        return False
    if any(main_grad.dtype != torch.float32 for main_grad in main_grads):
        return False
    return all(matrix.is_contiguous() for matrix in (dy, x, *main_grads))


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
