"""overlap_train: tensor- and sequence-parallel linears whose communication hides behind their matrix products.

Importing this package touches no device and needs neither a GPU, nor NVSHMEM, nor Megatron.
"""

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
