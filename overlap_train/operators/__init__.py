"""The engines that forward and backward share, each by several methods.

Tensor and sequence parallelism take AllGather + GEMM and GEMM + ReduceScatter; Ulysses takes GEMM + AllToAll and AllToAll + GEMM.

An engine is made, started, and finished later: an autograd pass can put other work (the weight gradient) in between. What it does
is decided by its `EnginePlan`. Matrices are 2-D here; `b_kn` is the right operand as a [K, N] view of whatever layout the weight
has.
"""
