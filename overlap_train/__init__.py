"""overlap_train: tensor- and sequence-parallel linears whose communication is hidden by their matrix products.

Importing this package touches no device and needs neither a GPU, nor NVSHMEM, nor Megatron.
"""

from importlib import import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

if not (_Path(__file__).parent / "kernels").is_dir():
    # A checkout, where kernels/ and integrations/ lie beside this folder; installed they are in it (pyproject.toml). `python -m
    # overlap_train` in its root finds this folder first, whatever is installed.
    __path__.append(str(_Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    from .all_reduce import linear_all_reduce, linear_dgrad_all_reduce
    from .config import OverlapConfig
    from .experts import dispatch_linear, expert_routing, linear_combine
    from .group.registry import check, forget_graphs, graphed, shutdown
    from .linear import all_gather_linear, linear_reduce_scatter
    from .ops.quantize import Fp8Copies
    from .ops.routing import Routing
    from .ranks.peers import OverlapMismatchError, OverlapPeerError, OverlapTimeoutError
    from .select.choose import Choice, choose
    from .select.method import Pass
    from .ulysses.attention_layout import QkNorm, Rotary
    from .ulysses.layout import AttentionHeads, SequenceLayout, SequenceShards
    from .ulysses.linears import all_to_all_linear, attention_output_linear, linear_all_to_all, qkv_all_to_all

# Loaded at their first use: without torch the command line still starts, and says in one line that it is missing.
_MODULES = {
    "config": ("OverlapConfig",),
    "experts": ("dispatch_linear", "expert_routing", "linear_combine"),
    "all_reduce": ("linear_all_reduce", "linear_dgrad_all_reduce"),
    "linear": ("all_gather_linear", "linear_reduce_scatter"),
    "ops.quantize": ("Fp8Copies",),
    "ops.routing": ("Routing",),
    "select.choose": ("Choice", "choose"),
    "select.method": ("Pass",),
    "group.registry": ("check", "forget_graphs", "graphed", "shutdown"),
    "ranks.peers": ("OverlapMismatchError", "OverlapPeerError", "OverlapTimeoutError"),
    "ulysses.attention_layout": ("QkNorm", "Rotary"),
    "ulysses.layout": ("AttentionHeads", "SequenceLayout", "SequenceShards"),
    "ulysses.linears": ("all_to_all_linear", "attention_output_linear", "linear_all_to_all", "qkv_all_to_all"),
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AttentionHeads",
    "Choice",
    "Fp8Copies",
    "OverlapConfig",
    "OverlapMismatchError",
    "OverlapPeerError",
    "OverlapTimeoutError",
    "Pass",
    "QkNorm",
    "Rotary",
    "Routing",
    "SequenceLayout",
    "SequenceShards",
    "all_gather_linear",
    "all_to_all_linear",
    "attention_output_linear",
    "check",
    "choose",
    "dispatch_linear",
    "expert_routing",
    "forget_graphs",
    "graphed",
    "linear_all_reduce",
    "linear_all_to_all",
    "linear_combine",
    "linear_dgrad_all_reduce",
    "linear_reduce_scatter",
    "qkv_all_to_all",
    "shutdown",
]
__version__ = "0.1.0"
