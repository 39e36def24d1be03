"""`overlap-train bench`: our operators and whole layers against what a user could run instead (benchmarks/README.md)."""
