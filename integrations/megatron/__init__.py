"""Overlapped linears inside Megatron-Core 0.16 to 0.19.

    enable(model, config)         turn the parallel linears of a built model into overlapped ones, before DDP wraps it
    report(model)                 which linear takes which path, why, and how often each path has run
    announce_changes(model)       behind the first step: print it where it is not what enable() has printed
    graphed_model(model)          bracket for the capture of its passes into a CUDA graph
    gpt_block_spec(config)        layer specs with a norm and an attention that sequence parallelism works with
    run_without_cuda()            let Megatron-Core run on CPU processes

Names are imported on first use, so that importing this package does not import Megatron-Core.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlap_train.integrations.megatron.announcing import announce_changes
    from overlap_train.integrations.megatron.attention import SDPACoreAttention
    from overlap_train.integrations.megatron.cpu import run_without_cuda
    from overlap_train.integrations.megatron.enabling import enable
    from overlap_train.integrations.megatron.graphing import graphed_model, graphed_passes
    from overlap_train.integrations.megatron.linear import OverlappedColumnParallelLinear, OverlappedRowParallelLinear
    from overlap_train.integrations.megatron.norm import LayerNorm, Norm, RMSNorm
    from overlap_train.integrations.megatron.reporting import Report, report
    from overlap_train.integrations.megatron.spec import gpt_block_spec, gpt_layer_spec

_HOME = {
    "LayerNorm": "norm",
    "Norm": "norm",
    "OverlappedColumnParallelLinear": "linear",
    "OverlappedRowParallelLinear": "linear",
    "RMSNorm": "norm",
    "Report": "reporting",
    "SDPACoreAttention": "attention",
    "announce_changes": "announcing",
    "enable": "enabling",
    "gpt_block_spec": "spec",
    "gpt_layer_spec": "spec",
    "graphed_model": "graphing",
    "graphed_passes": "graphing",
    "report": "reporting",
    "run_without_cuda": "cpu",
}

__all__ = [
    "LayerNorm",
    "Norm",
    "OverlappedColumnParallelLinear",
    "OverlappedRowParallelLinear",
    "RMSNorm",
    "Report",
    "SDPACoreAttention",
    "announce_changes",
    "enable",
    "gpt_block_spec",
    "gpt_layer_spec",
    "graphed_model",
    "graphed_passes",
    "report",
    "run_without_cuda",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
