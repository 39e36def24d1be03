"""Overlapped linears inside Megatron-Core 0.16 to 0.19.

    enable(model, config)         turn the parallel linears of a built model into overlapped ones, before DDP wraps it
    report(model)                 which linear takes which path, why, and how often each path has run
    print_table(model)            print that now, if no training step has printed it
    provide_accumulation_fusion() let Megatron's gradient accumulation fusion work without Apex; importing `enable` calls it
    graphed_model(model)          bracket for the capture of its passes into a CUDA graph
    gpt_block_spec(config)        layer specs with a norm and an attention that sequence parallelism works with
    run_without_cuda()            let Megatron-Core run on CPU processes

Names are imported on first use: importing this package does not import Megatron-Core.
"""

# ruff: noqa: F401 -- __all__ is computed
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlap_train.integrations.megatron.attention import UlyssesSelfAttention
    from overlap_train.integrations.megatron.cpu import run_without_cuda
    from overlap_train.integrations.megatron.enabling import enable
    from overlap_train.integrations.megatron.graphing import graphed_model, graphed_passes
    from overlap_train.integrations.megatron.linears import OverlappedColumnParallelLinear, OverlappedRowParallelLinear
    from overlap_train.integrations.megatron.main_grad import provide_accumulation_fusion
    from overlap_train.integrations.megatron.norm import LayerNorm, Norm, RMSNorm
    from overlap_train.integrations.megatron.spec import SDPACoreAttention, gpt_block_spec
    from overlap_train.integrations.megatron.table import Report, print_table, report

_HOME = {
    "attention": ("UlyssesSelfAttention",),
    "cpu": ("run_without_cuda",),
    "enabling": ("enable",),
    "graphing": ("graphed_model", "graphed_passes"),
    "linears": ("OverlappedColumnParallelLinear", "OverlappedRowParallelLinear"),
    "main_grad": ("provide_accumulation_fusion",),
    "norm": ("LayerNorm", "Norm", "RMSNorm"),
    "spec": ("SDPACoreAttention", "gpt_block_spec"),
    "table": ("Report", "print_table", "report"),
}
__all__ = [name for names in _HOME.values() for name in names]


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOME.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    except ImportError as error:
        if (text := missing(error)) is None:
            raise
        raise ImportError(f"{__name__}.{name}: {text}", name=error.name) from None


def missing(error: ImportError) -> str | None:
    """What to do about an import that has failed for want of Megatron-Core; None: it has failed for another reason."""
    if error.name in ("megatron", "megatron.core"):
        return "Megatron-Core is not installed in this environment: pip install 'megatron-core>=0.16,<0.20' psutil"
    return None
