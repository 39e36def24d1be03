"""The layout of a fault record, as plain numbers: shared by kernels and host, importable without Triton."""

FAULT_SET = 0
FAULT_TAG = 1
FAULT_CHUNK = 2
FAULT_EXPECTED = 3
FAULT_SEEN = 4
FAULT_WORDS = 5
