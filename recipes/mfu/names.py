"""What the variants are called, which of them go together, and what each is compared with."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from overlap_train.tools.pictures.style import AGAIN

MEGATRON, OVERLAP, ASYNC_TP = "megatron", "overlap", "async_tp"
NCCL = "nccl"  # our modules by NCCL and cuBLAS, one after the other: method collective
OVERLAP_GRAPH, MEGATRON_GRAPH, NCCL_GRAPH = "overlap_graph", "megatron_graph", "nccl_graph"
GRAPHS = {
    OVERLAP_GRAPH: OVERLAP,
    MEGATRON_GRAPH: MEGATRON,
    NCCL_GRAPH: NCCL,
}  # the variant whose passes are in a CUDA graph
DATA_PARALLEL = "data_parallel"  # context parallelism 1: every rank has whole sequences of its own
TE, TE_OVERLAP = "te", "te_overlap"
TE_USERBUFFERS, TE_RING = "te_userbuffers", "te_userbuffers_ring"
USERBUFFERS = (TE_USERBUFFERS, TE_RING)
TRANSFORMER_ENGINE = (TE, *USERBUFFERS, TE_OVERLAP)

TENSOR_PARALLEL_DEFAULTS = (MEGATRON, OVERLAP, ASYNC_TP)
ULYSSES_DEFAULTS = (NCCL, "chunked", "fused", "direct", OVERLAP)
OTHERS = (NCCL, DATA_PARALLEL, *TRANSFORMER_ENGINE)  # only when asked for

_BASELINES, _GRAPH_BASELINES = (MEGATRON, NCCL, TE), (MEGATRON_GRAPH, NCCL_GRAPH)
_NOT_ULYSSES = {
    MEGATRON: f"Megatron-Core's own modules have no context parallelism; take {NCCL}, or {DATA_PARALLEL} for its losses",
    ASYNC_TP: f"PyTorch's async-TP has no all-to-all; take {NCCL}",
    MEGATRON_GRAPH: f"Megatron-Core's own modules have no context parallelism; take {NCCL_GRAPH}",
    **dict.fromkeys(USERBUFFERS, f"userbuffers overlap tensor parallelism only; take {TE}"),
}


def pairing_problem(names: Sequence[str], cp: int, models: int) -> str | None:
    """Why variants and repetitions cannot be compared over `cp` context-parallel ranks, on so many models; or None."""
    for name in names:
        if cp > 1 and name in _NOT_ULYSSES:
            return f"--variants {name} with --cp {cp}: {_NOT_ULYSSES[name]}"
        if cp == 1 and name == DATA_PARALLEL:
            return (
                f"--variants {name} without --cp: there is no context parallelism to compare it with; take {MEGATRON}"
            )
        if bare(name) in USERBUFFERS and (models > 1 or name.endswith(AGAIN)):
            return f"{bare(name)}: userbuffers are made once a process, for one --model and without --repeat"
    return None


def bare(name: str) -> str:
    """The name of a variant, given its own or that of its repetition."""
    return name.removesuffix(AGAIN)


def is_graph(name: str) -> bool:
    """Whether a variant, or its repetition, replays a CUDA graph."""
    return bare(name) in GRAPHS


def is_transformer_engine(name: str) -> bool:
    return bare(name) in TRANSFORMER_ENGINE


def speed_baseline(names: Collection[str], of: str = "") -> str | None:
    """What the step of the variant `of` is compared with: the first baseline that ran. A graph is compared with a graph."""
    baselines = _GRAPH_BASELINES if is_graph(of) else _BASELINES
    return next((name for name in baselines if name in names), None)


def loss_baseline(names: Collection[str]) -> str:
    """What losses are compared with: the run without context parallelism, else the baseline of speed, else the first."""
    return DATA_PARALLEL if DATA_PARALLEL in names else speed_baseline(names) or next(iter(names))
