"""Device code: `@triton.jit` functions and the constants they need. Imports nothing else of this project."""
