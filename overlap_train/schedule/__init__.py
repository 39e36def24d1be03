"""Who sends which piece to whom, after what, and in which order tiles are computed. Nothing else knows an order.

The engines execute the transfers (order.py; inter_node.py has those of groups that span nodes, pairs what a rank sends there
with what it receives, and says in which turns all of it is enqueued). Tests hold the order in which kernels take tiles to
`tile_order`, and to `strip_order` those of Hopper, whose tiles may cross from one chunk into the next (order.py).

    gather (AG + GEMM)    rank R sends its shard to R+1, R+2, ...; it multiplies its own shard, then those of R-1, R-2, ...:
                          the order in which they arrive
    scatter (GEMM + RS)   rank R computes the rows of R+1, R+2, ... and its own last; rows leave when they are complete
    gemm_a2a              as scatter, but what rank R computes for R+1, R+2, ... are their columns of its own rows
    a2a_gemm              rank R sends chunk 0 of their rows to R+1, R+2, ..., then chunk 1; every tile of its own rows multiplies
                          its own columns, then those of R-1, R-2, ..., in one accumulator

Across nodes each byte crosses the network once, between ranks of equal local rank, its rail peers. Gather and scatter go in two
steps:

    gather                a shard goes to the rail peers first, then to the own node; what arrives from one is passed on inside
                          the node. Tiles in order of arrival: own, own node, then far node by far node, of each the first chunk
                          of all its ranks, then the second
    scatter               for each node, far ones first and the own one last: the blocks of its ranks go to their rail peers
                          inside this node, which add them up; the sum goes to the far one
    a2a_gemm, gemm_a2a    blocks of far nodes go first, and of each node that of the rail peer last. It takes them from the
                          network and puts each into the memory of the rank that it is for: CPU processes at once, GPUs by a
                          copy out of a receive buffer. a2a_gemm multiplies the blocks of the own node first, then far
                          node by far node. A persistent kernel multiplies one chunk of all of them after the other, the library
                          whole blocks
"""
