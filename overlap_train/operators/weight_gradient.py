"""The weight gradient, returned or added into `weight.main_grad`.

    dw [N, K] = dy [M, N].T @ x [M, K]

Megatron's data parallelism keeps gradients in fp32 buffers: each parameter has `main_grad`, and `grad_added_to_main_grad` says
that backward has put its gradient there already.
"""

from __future__ import annotations

import torch


def weight_gradient(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, main_grad: str) -> torch.Tensor | None:
    """dw for autograd; None, or a placeholder where a hook insists on a gradient, if it went into `weight.main_grad`.

    Args:
        main_grad: "accumulate" or "off", as in OverlapConfig.
    """
    target = getattr(weight, "main_grad", None) if main_grad == "accumulate" else None
    if target is None:
        return dy.t() @ x
    accumulate(target, dy, x)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    placeholder = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return placeholder(weight)


def accumulate(target: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """target [N, K] += dy [M, N].T @ x [M, K], with the products summed in fp32 and added without rounding to dy's dtype."""
    if target.dtype == dy.dtype:
        target.addmm_(dy.t(), x)
    elif target.dtype != torch.float32:
        target.add_(dy.t() @ x)
    elif target.device.type == "cuda":
        torch.addmm(target, dy.t(), x, out_dtype=torch.float32, out=target)
    else:
        target.addmm_(dy.t().float(), x.float())
