"""What the variants are called, and what each is compared with."""

from __future__ import annotations

from collections.abc import Collection

from overlap_train.config import METHODS

AGAIN = " again"  # ends the name of what is trained a second time
ONE_METHOD = tuple(method for method in METHODS if method not in ("auto", "collective"))

# name: how tables and the picture call it, in their order: baselines first, ours last, the default last of all
VARIANTS = {
    "megatron": "Megatron-Core",
    "megatron_graph": "Megatron-Core, CUDA graph",
    "async_tp": "PyTorch async-TP",
    "nccl": "NCCL, then cuBLAS",  # our modules by NCCL and cuBLAS, one after the other: method collective
    "nccl_graph": "NCCL, then cuBLAS, CUDA graph",
    "te": "TransformerEngine",
    "te_userbuffers": "TE userbuffers",
    "te_userbuffers_ring": "TE userbuffers, ring",
    "te_overlap": "overlap_train on TE",
    **{method: f"overlap_train, {method} only" for method in ONE_METHOD},
    "overlap": "overlap_train",
    "overlap_graph": "overlap_train, CUDA graph",
}
GRAPHS = {name: name.removesuffix("_graph") for name in VARIANTS if name.endswith("_graph")}  # what is captured
USERBUFFERS = ("te_userbuffers", "te_userbuffers_ring")
DEFAULTS = ("megatron", "overlap", "async_tp")
ULYSSES_DEFAULTS = ("nccl", "chunked", "fused", "direct", "overlap")


def bare(name: str) -> str:
    """The name of a variant, given its own or that of its repetition."""
    return name.removesuffix(AGAIN)


def label_of(name: str) -> str:
    """How tables call a variant or a repetition."""
    return VARIANTS[bare(name)] + name[len(bare(name)) :]


def is_graph(name: str) -> bool:
    """Whether a variant, or its repetition, replays a CUDA graph."""
    return bare(name) in GRAPHS


def is_transformer_engine(name: str) -> bool:
    """Whether it is built of TransformerEngine's modules."""
    return bare(name).startswith("te")


def baseline_of(names: Collection[str], name: str) -> str | None:
    """What a variant is compared with: the first baseline among `names`. A graph is compared with a graph."""
    baselines = ("megatron_graph", "nccl_graph") if is_graph(name) else ("megatron", "nccl", "te")
    return next((baseline for baseline in baselines if baseline in names), None)


def ulysses_problem(name: str) -> str | None:
    """Why a variant has no context parallelism, and what to take; None: it has."""
    if bare(name) in ("megatron", "megatron_graph", "async_tp"):
        return f"this baseline has no context parallelism; take nccl{'_graph' if is_graph(name) else ''}"
    return "userbuffers overlap tensor parallelism only; take te" if bare(name) in USERBUFFERS else None
