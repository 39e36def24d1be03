"""Who sends which piece to whom, and after what. Nothing else knows an order.

    gather (AG + GEMM)    rank R sends its shard to R+1, R+2, ...; it multiplies its own shard, then those of R-1, R-2, ...:
                          the order in which they arrive
    scatter (GEMM + RS)   rank R computes the rows of R+1, R+2, ... and its own last; rows leave when they are complete
    gemm_a2a              as scatter, but what rank R computes for R+1, R+2, ... are their columns of its own rows
    a2a_gemm              rank R sends chunk 0 of their rows to R+1, R+2, ..., then chunk 1; every tile of its own rows multiplies
                          its own columns, then those of R-1, R-2, ..., in one accumulator

Across nodes blocks of far nodes go first (docs/design.md, Several nodes). Tests hold the order in which kernels take tiles to
tests/tile_orders.py, which says in which order they have to.
"""
