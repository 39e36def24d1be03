"""The engines of groups that span nodes, in the table of operators."""

from ..ops.table import register
from ..schedule.order import A2A_GEMM, GATHER, GEMM_A2A, SCATTER
from . import ops, process_ops


def register_engines() -> None:
    """Add them, once."""
    register(
        "nodes of CPU processes",
        {
            GATHER: {"chunked": process_ops.NodeGather, "fused": process_ops.FusedNodeGather},
            SCATTER: {"chunked": process_ops.NodeScatter, "fused": process_ops.FusedNodeScatter},
            GEMM_A2A: {"chunked": process_ops.NodeGemmAllToAll, "fused": process_ops.FusedNodeGemmAllToAll},
            A2A_GEMM: {"chunked": process_ops.NodeAllToAllGemm, "fused": process_ops.FusedNodeAllToAllGemm},
        },
    )
    register(
        "nodes of GPUs",
        {
            GATHER: {"chunked": ops.NodeStreamGather, "fused": ops.FusedNodeStreamGather},
            SCATTER: {"chunked": ops.NodeStreamScatter, "fused": ops.FusedNodeStreamScatter},
            GEMM_A2A: {"chunked": ops.NodeStreamGemmAllToAll, "fused": ops.FusedNodeStreamGemmAllToAll},
            A2A_GEMM: {"chunked": ops.NodeStreamAllToAllGemm, "fused": ops.FusedNodeStreamAllToAllGemm},
        },
    )
