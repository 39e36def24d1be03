"""Benchmarks of the operators and of whole layers against what a user could run instead.

    torchrun --nproc-per-node 4 -m overlap_train.bench operators|layers
    python -m overlap_train.bench plot benchmarks/h200x4

benchmarks/README.md says how a figure is measured and what each column means.
"""
