"""overlap_train: tensor- and sequence-parallel linears whose communication hides behind their matrix products.

Importing this package touches no device and needs neither a GPU, nor NVSHMEM, nor Megatron.
"""

from pathlib import Path as _Path

if not (_Path(__file__).parent / "kernels").is_dir():
    # A checkout, where kernels/ and integrations/ lie beside this folder; installed they are in it (pyproject.toml). `python -m
    # overlap_train` in its root finds this folder first, whatever is installed.
    __path__.append(str(_Path(__file__).resolve().parents[1]))

from .choice import Choice, Pass, choose
from .config import OverlapConfig
from .graph import forget_graphs, graphed
from .linear import all_gather_linear, linear_reduce_scatter
from .protocol.watchdog import OverlapTimeoutError
from .registry import check, shutdown

__all__ = [
    "Choice",
    "OverlapConfig",
    "OverlapTimeoutError",
    "Pass",
    "all_gather_linear",
    "check",
    "choose",
    "forget_graphs",
    "graphed",
    "linear_reduce_scatter",
    "shutdown",
]
__version__ = "0.1.0"
