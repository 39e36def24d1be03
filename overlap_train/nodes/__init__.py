"""Groups that span nodes: their slots, engines, transports, plans, and operators, which are added to the table of operators.

Loaded by group/span.py for the first group that spans nodes; ops/plan.py asks for the plan of such a group before.
"""

from ..ops.table import register
from ..schedule.order import A2A_GEMM, GATHER, GEMM_A2A, SCATTER
from . import ops
from .connect import SeveralNodes

__all__ = ["SeveralNodes"]

register(
    SeveralNodes.reach,
    {
        GATHER: {"chunked": ops.InterNodeAllGatherGemm, "fused": ops.FusedInterNodeAllGatherGemm},
        SCATTER: {"chunked": ops.InterNodeGemmReduceScatter, "fused": ops.FusedInterNodeGemmReduceScatter},
        GEMM_A2A: {"chunked": ops.InterNodeGemmAllToAll, "fused": ops.FusedInterNodeGemmAllToAll},
        A2A_GEMM: {"chunked": ops.InterNodeAllToAllGemm, "fused": ops.FusedInterNodeAllToAllGemm},
    },
)
