"""Layouts that kernels and host share, as plain numbers: importable without Triton."""

# A slot has this many signals per source rank; a call that uses fewer chunks leaves the rest alone.
MAX_CHUNKS = 8

# A signal is one int64: the epoch in the upper half, the fingerprint of the call in the lower half (group/signals.py).
EPOCH_SHIFT = 32

# Tables of experts' rows (ops/expert_tables.py), in words: of a pair, of a piece, of a segment, of a rank, where a rank's pieces
# begin. PIECE: rows that are sent, and counted, at once, at most.
PAIR_WORDS = PIECE_WORDS = SEGMENT_WORDS = 4
PEER_WORDS, FIRST_PIECES = 16, 4
PIECE = 16

# What a GEMM + RS counts of an own tile where its sums are sent on: Hopper's kernel may store its halves apart.
OWN_TILE = 2

# Counters of one product, in this order (group/slots.py, Counters): CTAs that have exited, tiles and pieces that were claimed,
# chunks that are here, then one count of completed tiles for each signal.
FIRST_COUNTERS = 4

# Words of a fault record, which kernels fill and the host reads.
FAULT_SET = 0
FAULT_WORD = 1  # which signal of the slot: source rank x MAX_CHUNKS + chunk
FAULT_EXPECTED = 2  # its lower half names the call that waited
FAULT_SEEN = 3
LATE_WORD = 4  # the same of a wait that takes long, noted again and again
LATE_EXPECTED = 5
LATE_ELAPSED = 6  # for how many nanoseconds by then
HOST_ABORT = 7  # the host sets it to end all waits of the rank
FAULT_WORDS = 8

NOTE_NS = 250_000_000  # from here on a wait notes itself
