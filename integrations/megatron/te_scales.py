"""TransformerEngine's delayed scaling for overlapped linears. Its modules' quantizers have the scales, which its state manager
works out from the largest elements of earlier calls, of all ranks. Ours take these scales, and note what is largest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from overlap_train.ops.quantize import Given, GivenScales

_STATE, _RECOMPUTATION = "transformer_engine.pytorch.fp8", "transformer_engine.pytorch.distributed"
_INPUT, _WEIGHT, _GRADIENT = 0, 1, 0  # of a module with one product, among its quantizers of forward, and of backward


def has_delayed_scales(config: Any) -> bool:
    """Whether TransformerEngine's modules of a model give the scales."""
    return bool(getattr(config, "fp8", None)) and getattr(config, "fp8_recipe", None) == "delayed"


@contextmanager
def scales_of(linear: Any, x: torch.Tensor) -> Iterator[None]:
    """From here on the weight of TE's module `linear` has the scales of this call, from which backward takes them, too; where
    layers are recomputed, those of the first time. Within, the module is as in a call of its own: TE's manager knows it, and
    updates its scales."""
    prepared = getattr(linear, "prepare_forward_ctx", linear.prepare_forward)  # one name or the other, by TE's version
    with prepared(x, allow_non_contiguous=True):
        forward, backward = (linear.quantizers[f"scaling_{way}"] for way in ("fwd", "bwd"))
        of = forward[_INPUT], forward[_WEIGHT], backward[_GRADIENT]
        linear.weight.fp8_scales = GivenScales(*(Given(one.scale, one.amax) for one in of))
        yield


def update_after_backward(y: torch.Tensor) -> None:
    """Let the scales of gradients be updated where TE does it: when backward has passed the first module of a forward pass. y:
    the output of one."""
    if y.grad_fn is not None and _is_first():
        manager = sys.modules[_STATE].FP8GlobalStateManager
        y.grad_fn.register_hook(lambda *_: manager.reduce_and_update_fp8_tensors(forward=False))


def _is_first() -> bool:
    """Whether this is the first module in fp8 of a forward pass, as TE counts them: only one is, but in recomputation."""
    manager = sys.modules[_STATE].FP8GlobalStateManager
    state, name = manager, "IS_FIRST_FP8_MODULE"
    if hasattr(manager, "quantization_state"):  # 2.15 and later
        state, name = manager.quantization_state, "is_first_fp8_module"
    is_first = bool(getattr(state, name))
    if not sys.modules[_RECOMPUTATION].in_fp8_activation_recompute_phase():
        setattr(state, name, False)
    return is_first
