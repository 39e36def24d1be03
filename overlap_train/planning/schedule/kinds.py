"""The kinds of pass that have a schedule: AG + GEMM, GEMM + RS, A2A + GEMM, GEMM + A2A."""

GATHER, SCATTER = "gather", "scatter"
A2A_GEMM, GEMM_A2A = "a2a_gemm", "gemm_a2a"
INBOUND = (GATHER, A2A_GEMM)  # what arrives is multiplied; the others multiply what leaves
EXCHANGES = (A2A_GEMM, GEMM_A2A)
