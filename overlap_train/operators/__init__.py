"""The engines that forward and backward share: AllGather + GEMM and GEMM + ReduceScatter, each by several methods.

An engine is started, and finished later, so that an autograd pass can put other work (the weight gradient) in between.
Matrices are 2-D here; `b_kn` is the right operand as a [K, N] view of whatever layout the weight has.
"""
