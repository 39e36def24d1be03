"""What a kernel across nodes may claim: tiles whose chunks the network has brought.

A kernel that waited for the network would hold its SMs meanwhile. NCCL's kernels need SMs, too. Where others have taken those
that are left to them (gradients that are reduced at the same time), ranks would wait for each other in a circle. So a kernel that
`leaves` takes tiles in their order (order.py) up to the first chunk of another node that is not here, and ends. It is launched
again behind a wait of its stream, and goes on where it stopped, because tiles are claimed from the same counter
(operators/fused_node_streams.py). Chunks of its own node it waits for: they come by copies, which need no SM.

The last launch does not leave: all chunks are here, or a wait has given up, and then its own waits write NaN.
"""

import triton
import triton.language as tl

from .order import gather_tile, received_block
from .signal import claim, has_arrived, signal_word


@triton.jit
def first_units(leaves, OWN: tl.constexpr, ALL: tl.constexpr, LEAVES: tl.constexpr):
    """How many chunks, in their order, may be claimed at the beginning. OWN: those for which no kernel leaves.

    LEAVES: whether kernels of this group leave at all; inside one node none does.
    """
    if LEAVES:
        return tl.where(leaves != 0, OWN, ALL)
    else:
        return tl.cast(ALL, tl.int32)


@triton.jit
def gathered_units(units, rank, signals_ptr, expected, WORLD: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr):
    """`units` and the chunks of AG + GEMM that follow and are here."""
    if LOCAL < WORLD:
        looking = units < WORLD * CHUNKS
        while looking:
            source, chunk = gather_tile(units, rank, WORLD, LOCAL, CHUNKS)
            here = is_here(signals_ptr, source, chunk, expected)
            units += here.to(tl.int32)
            looking = here & (units < WORLD * CHUNKS)
    return units


@triton.jit
def received_chunks(blocks, rank, signals_ptr, expected, WORLD: tl.constexpr, LOCAL: tl.constexpr,
                    CHUNKS: tl.constexpr):  # fmt: skip
    """As gathered_units, of A2A + GEMM, whose tiles need their chunk from every rank: (blocks of other nodes that are here,
    chunks of which all are). Of all blocks the first chunk counts first, then the second."""
    if LOCAL < WORLD:
        FAR: tl.constexpr = WORLD - LOCAL
        looking = blocks < FAR * CHUNKS
        while looking:
            source = received_block(LOCAL + blocks % FAR, rank, WORLD, LOCAL)
            here = is_here(signals_ptr, source, blocks // FAR, expected)
            blocks += here.to(tl.int32)
            looking = here & (blocks < FAR * CHUNKS)
        return blocks, blocks // FAR
    else:
        return blocks, tl.cast(CHUNKS, tl.int32)


@triton.jit
def is_here(signals_ptr, source, chunk, expected):
    """Whether a chunk has come. An atomic, whose result all threads of a CTA share: of a load each thread would have its own."""
    return has_arrived(tl.atomic_add(signals_ptr + signal_word(source, chunk), 0, sem="acquire", scope="sys"), expected)


@triton.jit
def claim_below(counter_ptr, guess, bound, LEAVES: tl.constexpr):
    """The next tile of the schedule, as `claim`; if that is not below `bound`, there is none. LEAVES: then it is left to the
    next launch, and nothing is claimed.

    guess: at most the number of tiles that are claimed. The first exchange tells how many they are, if there are more.
    """
    if LEAVES:
        index = tl.cast(guess, tl.int64)
        looking = index < bound
        while looking:
            seen = tl.atomic_cas(counter_ptr, index, index + 1, sem="relaxed", scope="gpu")
            looking = (seen != index) & (seen < bound)
            index = seen
    else:
        index = claim(counter_ptr)
    return index.to(tl.int32)
