"""The table of a model's linears, printed once, when sizes are known: at the first gradient that reaches one of its linears.

At that time every linear that takes part in a step has had its forward: backward begins after the forward of all layers and, in a
virtual pipeline, of all chunks. That holds with recomputation, whose first forward has no gradient, with several micro-batches in
flight, and for graphs, which are captured after eager steps. Validation and inference have no gradient and print nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from overlap_train.integrations.megatron.enabling.reporting import report
from overlap_train.integrations.megatron.enabling.table import Report
from overlap_train.integrations.megatron.linears.in_model import Model, chunks_of, overlapped_linears


class FirstTable:
    """Prints the table of a model when it is called, once. Linears call it with their outputs' gradients."""

    def __init__(self, model: Model) -> None:
        self._chunks = chunks_of(model)
        for linear in overlapped_linears(self._chunks):
            linear.overlap.on_gradient = self

    def __call__(self, gradient: torch.Tensor | None = None) -> None:
        chunks, self._chunks = self._chunks, []
        for linear in overlapped_linears(chunks):
            linear.overlap.on_gradient = None
        if chunks and _prints():
            found = report(chunks)
            print(f"{heading(found)}\n{found}", flush=True)


def print_table(model: Model) -> None:
    """Print the table of an enabled model now, unless it has been printed: after a run without a backward, for instance."""
    for linear in overlapped_linears(model):
        if linear.overlap.on_gradient is not None:
            linear.overlap.on_gradient()


def heading(found: Report) -> str:
    """A line that is found among the thousands that Megatron prints, and says at once whether overlap acts."""
    ours = sum(linear.overlapped_calls > 0 for linear in found.linears)
    exposed = sum(linear.is_collective for linear in found.linears)
    where = f"{stage()}, layers counted within it: " if stage() else ""
    without = f", {exposed} of them not overlapped (collective)" if exposed else ""
    return f"overlap_train: {where}{ours} of {len(found.linears)} linears run our operators{without}"


def _prints() -> bool:
    """Whether this rank speaks for the ranks whose table is the same: global rank 0, and the first rank of each other stage."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        return True
    if not stage():
        return False
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return parallel_state.get_tensor_model_parallel_rank() == 0 and replica == 0


def stage() -> str:
    """This rank's pipeline stage in words, for example "pipeline stage 0 of 2"; empty without a pipeline."""
    if not parallel_state.model_parallel_is_initialized():
        return ""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return f"pipeline stage {parallel_state.get_pipeline_model_parallel_rank()} of {stages}" if stages > 1 else ""
