"""The kinds of pass: what a rank multiplies, and what it sends or receives beside that."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """One kind of pass, by its traits. Code asks for traits, not for names.

    gather          AG + GEMM     y = all_gather(x) @ w
    scatter         GEMM + RS     y = reduce_scatter(x @ w)
    scatter, wgrad  GEMM + RS     the dgrad of a column linear, under whose reduce-scatter its weight gradient may run
    a2a_gemm        A2A + GEMM    y = all_to_all(x) @ w
    gemm_a2a        GEMM + A2A    y = all_to_all(x @ w)
    dispatch_gemm   A2A + GEMM    y = x[rows of this rank's experts] @ w[their expert]
    gemm_combine    GEMM + A2A    y = the sum of each token's rows of x @ w[their expert]

    receives: the GEMM multiplies what arrives; else the product leaves. exchanges: by an all-to-all. before_wgrad: a weight
    gradient comes after it.
    """

    receives: bool
    exchanges: bool
    before_wgrad: bool
    gathers: bool  # receives all rows, by an all-gather
    reduces: bool  # adds partial sums of all ranks, by a reduce-scatter
    sums_blocks: bool  # each output is a sum over the blocks of all ranks
    splits_columns: bool  # each rank gets its columns of the output
    engine: Kind  # of the engine that runs it
    dgrad: Kind  # of the input gradient of a linear whose forward pass it is

    AG_GEMM = "gather", True, False
    GEMM_RS = "scatter", False, False
    GEMM_RS_AND_WGRAD = "scatter, wgrad", False, False, True
    A2A_GEMM = "a2a_gemm", True, True
    GEMM_A2A = "gemm_a2a", False, True
    DISPATCH_GEMM = "dispatch_gemm", True, True, False, True
    GEMM_COMBINE = "gemm_combine", False, True, False, True

    def __new__(
        cls, value: str, receives: bool = False, exchanges: bool = False, before_wgrad: bool = False, routed: bool = False,
    ) -> Kind:  # fmt: skip
        kind = str.__new__(cls, value)
        kind._value_ = value
        kind.receives, kind.exchanges, kind.before_wgrad = receives, exchanges, before_wgrad
        kind.gathers, kind.reduces = receives and not exchanges, not receives and not exchanges
        kind.sums_blocks = receives and exchanges and not routed
        kind.splits_columns = exchanges and not (receives or routed)
        return kind


for _kind in Kind:
    _kind.engine = Kind.GEMM_RS if _kind.before_wgrad else _kind
for _kind, _dgrad in (
    (Kind.AG_GEMM, Kind.GEMM_RS_AND_WGRAD),
    (Kind.GEMM_RS, Kind.AG_GEMM),
    (Kind.GEMM_RS_AND_WGRAD, Kind.AG_GEMM),
    (Kind.A2A_GEMM, Kind.GEMM_A2A),
    (Kind.GEMM_A2A, Kind.A2A_GEMM),
    (Kind.DISPATCH_GEMM, Kind.GEMM_COMBINE),
    (Kind.GEMM_COMBINE, Kind.DISPATCH_GEMM),
):
    _kind.dgrad = _dgrad
