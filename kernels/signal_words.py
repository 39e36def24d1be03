"""Layouts that kernels and host share, as plain numbers: importable without Triton."""

# A slot has this many signals per source rank; a call that uses fewer chunks leaves the rest alone.
MAX_CHUNKS = 8

# What the CTAs of one kernel count together, in this order (slot.py, Counters): how many of them have left, tiles and pieces that
# were claimed, and what is complete, a word for each signal.
FIRST_COUNTERS = 3

# Words of a fault record.

FAULT_SET = 0
FAULT_TAG = 1
FAULT_WORD = 2  # which signal of the slot: source rank x MAX_CHUNKS + chunk
FAULT_EXPECTED = 3
FAULT_SEEN = 4
FAULT_WORDS = 5
