"""How a kernel sends this rank's rows itself: it stores them at the peers, piece by piece, and signals each chunk.

    own      [M/W, K], contiguous   what every peer shall have, in CHUNKS chunks of rows; with EXCHANGE [W, M/W, K/W], a block
                                    for each peer
    landing  one block at each peer   this rank's block of the slot there

Pieces go to rank+1 first, then to rank+2, ..., as the copy engine would send them: each peer receives from one rank at a time, in
the order in which it multiplies. With EXCHANGE the first chunk goes to all of them, then the second. Nobody waits here, and
pieces are claimed: any one resident CTA sends them all (rule 4).
"""

import triton
import triton.language as tl

from .order import exchange_piece, scatter_tile
from .signal import claim, notify_peer, signal_word


@triton.jit
def store_at_peers(own_ptr, chunk_size, lane, rank, claimed_ptr, complete_ptr, memory_at_ptr, outgoing_at_ptr, word,
                   WORLD: tl.constexpr, CHUNKS: tl.constexpr, PIECE: tl.constexpr, STEP: tl.constexpr,
                   EXCHANGE: tl.constexpr):  # fmt: skip
    """Send until every piece of PIECE elements has been claimed.

    chunk_size: elements of a chunk. lane: 0 ... STEP - 1, a step's elements in the layout of the storing warps.
    """
    per_chunk = tl.cdiv(chunk_size, PIECE)
    index = claim(claimed_ptr).to(tl.int32)
    while index < per_chunk * CHUNKS * (WORLD - 1):
        if EXCHANGE:
            target, chunk, piece = exchange_piece(index, per_chunk, rank, WORLD)
        else:
            target, chunk, piece = scatter_tile(index, per_chunk, rank, WORLD, WORLD, CHUNKS, INTERLEAVED=False)
        # Where a slot begins is aligned: said here, or every element would be stored by itself.
        slot_ptr = tl.multiple_of(tl.load(memory_at_ptr + target).to(own_ptr.dtype), 16)
        first = chunk.to(tl.int64) * chunk_size
        remote_block_ptr = slot_ptr + tl.cast(rank, tl.int64) * CHUNKS * chunk_size + first
        if EXCHANGE:
            first += tl.cast(target, tl.int64) * CHUNKS * chunk_size
        for start in range(0, PIECE, STEP):
            place = piece * PIECE + start + lane
            inside = place < chunk_size
            values = tl.load(own_ptr + first + place, mask=inside)
            tl.store(remote_block_ptr + place, values, mask=inside)
        signal_ptr = tl.load(outgoing_at_ptr + target).to(complete_ptr.dtype) + chunk
        notify_peer(complete_ptr + signal_word(target, chunk), per_chunk, signal_ptr, word)
        index = claim(claimed_ptr).to(tl.int32)
