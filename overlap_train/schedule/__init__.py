"""Who sends which piece to whom, after what, and in which order tiles are computed. Nothing else knows an order.

The engines execute the legs (legs.py; crossings.py pairs those that cross the network), on several nodes of GPUs in turns with
products (turns.py), with few under way at once (in_flight.py). Tests hold the order in which kernels
take tiles to `tile_order`, and to `strip_order` those of Hopper, whose tiles may cross from one chunk into the next (order.py).

    gather (AG + GEMM)    rank R sends its shard to R+1, R+2, ...; it multiplies its own shard, then those of R-1, R-2, ...:
                          the order in which they arrive
    scatter (GEMM + RS)   rank R computes the rows of R+1, R+2, ... and its own last; rows leave when they are complete
    gemm_a2a              as scatter, but what rank R computes for R+1, R+2, ... are their columns of its own rows
    a2a_gemm              rank R sends chunk 0 of their rows to R+1, R+2, ..., then chunk 1; every tile of its own rows multiplies
                          its own columns, then those of R-1, R-2, ..., in one accumulator

Across nodes each byte crosses the network once, between ranks of equal local rank (twins). Gather and scatter go in two steps:

    gather                a shard goes to the twins first, then to the own node; what arrives from a twin is passed on inside the
                          node. Tiles in order of arrival: own, own node, then far node by far node, of each the first chunk of
                          all its ranks, then the second
    scatter               for each node, far ones first and the own one last: the blocks of its ranks go to their twins inside
                          this node, which add them up; the sum goes to the far twin
    a2a_gemm, gemm_a2a    blocks of far nodes go first, and of each node that of the twin last. The twin takes them from the
                          network and puts each into the memory of the rank that it is for: CPU processes at once, GPUs by a
                          copy out of memory beside the slot. a2a_gemm multiplies the blocks of the own node first, then far
                          node by far node. A persistent kernel multiplies one chunk of all of them after the other, the library
                          whole blocks
"""
