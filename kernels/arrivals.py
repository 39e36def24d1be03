"""What a kernel across nodes may claim: tiles whose chunks the network has brought.

A kernel that waited for the network would hold its SMs meanwhile. NCCL's kernels need SMs, too. Other communicators, which reduce
gradients at the same time, may have taken the SMs that products spare for the network: then ranks would wait for each other in a
circle. So the stream waits, then count_arrivals_kernel counts the chunks that are here, in their order (order.py), and the
product's kernel takes the tiles of these and ends. The next launch goes on after the next wait, because tiles are claimed from
the same counter (nodes/ops.py). For chunks of its own node a kernel waits: copies bring them, without SMs.

All CTAs of a launch take what was counted before it: a CTA that started late would else see more chunks, and multiply them
alone. The last launch takes all: if a wait has given up, its own waits write NaN.
"""

import triton
import triton.language as tl

from .order import gather_tile, received_block
from .signal import claim, has_arrived, signal_word


@triton.jit
def units_to_take(leaves, here_ptr, OWN: tl.constexpr, ALL: tl.constexpr, LEAVES: tl.constexpr):
    """How many chunks, in their order, a launch takes tiles of: OWN, which every launch may take, or as many as are counted.

    LEAVES: whether kernels of this group leave at all; inside one node none does.
    """
    if LEAVES:
        return tl.where(leaves != 0, tl.maximum(tl.load(here_ptr).to(tl.int32), OWN), ALL)
    else:
        return tl.cast(ALL, tl.int32)


@triton.jit(do_not_specialize=["rank"])
def count_arrivals_kernel(here_ptr, signals_ptr, epoch_ptr, rank, WORLD: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr,
                          EXCHANGE: tl.constexpr):  # fmt: skip
    """One CTA that goes on counting what is here: chunks of AG + GEMM, or (EXCHANGE) of A2A + GEMM."""
    expected, here = tl.load(epoch_ptr), tl.load(here_ptr).to(tl.int32)
    if EXCHANGE:
        here = received_chunks(here, rank, signals_ptr, expected, WORLD, LOCAL, CHUNKS)
    else:
        here = gathered_units(tl.maximum(here, LOCAL * CHUNKS), rank, signals_ptr, expected, WORLD, LOCAL, CHUNKS)
    tl.store(here_ptr, tl.cast(here, tl.int64))


@triton.jit
def gathered_units(units, rank, signals_ptr, expected, WORLD: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr):
    """`units` and the chunks of AG + GEMM that follow and are here."""
    looking = units < WORLD * CHUNKS
    while looking:
        source, chunk = gather_tile(units, rank, WORLD, LOCAL, CHUNKS)
        here = is_here(signals_ptr, source, chunk, expected)
        units += here.to(tl.int32)
        looking = here & (units < WORLD * CHUNKS)
    return units


@triton.jit
def received_chunks(
    chunks, rank, signals_ptr, expected, WORLD: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr
):
    """As gathered_units, of A2A + GEMM, whose tiles need their chunk from every rank."""
    FAR: tl.constexpr = WORLD - LOCAL
    blocks = chunks * FAR
    looking = blocks < FAR * CHUNKS
    while looking:
        source = received_block(LOCAL + blocks % FAR, rank, WORLD, LOCAL)
        here = is_here(signals_ptr, source, blocks // FAR, expected)
        blocks += here.to(tl.int32)
        looking = here & (blocks < FAR * CHUNKS)
    return blocks // FAR


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
