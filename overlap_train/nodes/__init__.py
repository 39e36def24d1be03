"""Groups that span nodes: their slots, engines, transports, plans, and operators, which are added to the table of operators.

Loaded by group/domain.py for the first group that spans nodes. Before, ops/plan.py asks for its plan, and select/cost.py
for its estimates.
"""

from ..ops.table import register
from ..schedule.kinds import Kind
from . import ops
from .connect import SeveralNodes
from .plan import InterNodePlan

__all__ = ["SeveralNodes"]

register(
    InterNodePlan.reach,
    {
        Kind.AG_GEMM: {"chunked": ops.InterNodeAllGatherGemm, "fused": ops.FusedInterNodeAllGatherGemm},
        Kind.GEMM_RS: {"chunked": ops.InterNodeGemmReduceScatter, "fused": ops.FusedInterNodeGemmReduceScatter},
        Kind.GEMM_A2A: {"chunked": ops.InterNodeGemmAllToAll, "fused": ops.FusedInterNodeGemmAllToAll},
        Kind.A2A_GEMM: {"chunked": ops.InterNodeAllToAllGemm, "fused": ops.FusedInterNodeAllToAllGemm},
    },
)
