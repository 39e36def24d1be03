"""The CUDA driver, launches of kernels that have run before, and the check of what Triton has compiled."""
