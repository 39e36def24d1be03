"""Whose chunk comes next: the orders of schedule/order.py as kernels work them out, each rank from its own number.

LOCAL: ranks of a node, numbered node by node; WORLD in a group inside one node.
"""

import triton
import triton.language as tl


@triton.jit
def rank_at(rank, nodes, places, WORLD: tl.constexpr, LOCAL: tl.constexpr):
    """The rank so many nodes, and places in a node, further; nodes and places follow one another in a circle."""
    return (rank // LOCAL + nodes) % (WORLD // LOCAL) * LOCAL + (rank % LOCAL + places) % LOCAL


@triton.jit
def gather_tile(unit, rank, WORLD: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr):
    """The unit-th chunk to be multiplied -> (source rank, its chunk): own shard, then rank-1's, rank-2's, ... of the node.

    Then far node by far node: of each the first chunk of all its ranks, then the second, as the network brings them.
    """
    if LOCAL == WORLD:
        return (rank + WORLD - unit // CHUNKS) % WORLD, unit % CHUNKS
    else:
        nodes = unit // (LOCAL * CHUNKS)
        within = unit % (LOCAL * CHUNKS)
        places = tl.where(nodes == 0, within // CHUNKS, within % LOCAL)
        chunk = tl.where(nodes == 0, within % CHUNKS, within // LOCAL)
        return rank_at(rank, WORLD // LOCAL - nodes, LOCAL - places, WORLD, LOCAL), chunk


@triton.jit
def received_block(step, rank, WORLD: tl.constexpr, LOCAL: tl.constexpr):
    """The step-th block that a tile of A2A + GEMM multiplies -> its source rank: rank, rank-1, rank-2, ... of the node, then far
    node by far node, of each the rail peer last."""
    if LOCAL == WORLD:
        return (rank + WORLD - step) % WORLD
    else:
        places = step % LOCAL + (step >= LOCAL)
        return rank_at(rank, WORLD // LOCAL - step // LOCAL, LOCAL - places, WORLD, LOCAL)


@triton.jit
def scatter_unit(unit, rank, WORLD: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr):
    """The unit-th chunk to be multiplied -> (target rank, its chunk): rank+1's, then rank+2's, ...; the own node last, and of
    each node the rail peer."""
    if LOCAL == WORLD:
        return (rank + 1 + unit // CHUNKS) % WORLD, unit % CHUNKS
    else:
        step = unit // CHUNKS
        return rank_at(rank, step // LOCAL + 1, step % LOCAL + 1, WORLD, LOCAL), unit % CHUNKS


@triton.jit
def scatter_tile(index, per_chunk, rank, WORLD: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr,
                 INTERLEAVED: tl.constexpr):  # fmt: skip
    """The index-th tile to be multiplied, or piece to be sent -> (target rank, its chunk, number in the chunk); own rows last.

    One chunk after the other (scatter_unit). INTERLEAVED, of tiles that are stored at the peers of one node: for all peers in
    turn, because ranks that are not in step would otherwise meet at one peer, whose link then gives each of them half.
    """
    if INTERLEAVED and WORLD > 1:
        foreign = per_chunk * CHUNKS * (WORLD - 1)
        is_own = index >= foreign
        target = tl.where(is_own, rank, (rank + 1 + index % (WORLD - 1)) % WORLD)
        place = tl.where(is_own, index - foreign, index // (WORLD - 1))
        return target, place // per_chunk, place % per_chunk
    else:
        target, chunk = scatter_unit(index // per_chunk, rank, WORLD, LOCAL, CHUNKS)
        return target, chunk, index % per_chunk


@triton.jit
def exchange_piece(index, per_chunk, rank, WORLD: tl.constexpr):
    """The index-th piece to be sent before an A2A + GEMM -> (target rank, chunk, number in the chunk).

    The first chunk of every peer's rows, then the second: a tile needs its chunk from every rank.
    """
    PEERS: tl.constexpr = WORLD - 1 if WORLD > 1 else 1
    unit = index // per_chunk
    return (rank + 1 + unit % PEERS) % WORLD, unit // PEERS, index % per_chunk
