"""Overlapped linears inside a CUDA graph of all passes of a step: Megatron's full-iteration graph, or one's own.

Megatron's FullCudaGraphWrapper calls its forward_backward_func while it captures, and our launcher brackets that call. The
operators refuse to be captured into graphs of single layers (`--cuda-graph-impl local` and `transformer_engine`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from overlap_train import graphed
from overlap_train.integrations.megatron.linears import Model, overlapped_linears
from overlap_train.integrations.megatron.ulysses_linears import groups_of


@contextmanager
def graphed_model(model: Model) -> Iterator[None]:
    """Bracket of the capture of a model's passes, or of its chunks': `overlap_train.graphed` of each group whose linears overlap.

        with torch.cuda.graph(graph), graphed_model(model):
            forward_and_backward(model)

    Run the same at least twice before: which linears overlap is known from their calls so far. Without any it does nothing.
    """
    calling = [linear for linear in overlapped_linears(model) if linear.overlap.overlapped_calls]
    groups = dict.fromkeys(group for linear in calling for group in groups_of(linear))
    with ExitStack() as brackets:
        for group in groups:
            brackets.enter_context(graphed(group))
        yield


def graphed_passes(forward_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's forward_backward_func, bracketed while it is captured: for FullCudaGraphWrapper(graphed_passes(func)). Megatron
    captures validation (forward_only), too."""

    @functools.wraps(forward_backward)
    def bracketed(*args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_current_stream_capturing():
            return forward_backward(*args, **kwargs)
        with graphed_model(kwargs["model"]):
            return forward_backward(*args, **kwargs)

    return bracketed


def release_full_iteration_graphs() -> None:
    """Destroy the graphs that Megatron's wrapper keeps in its class: NCCL's communicators would wait for them at the end."""
    module = sys.modules.get("megatron.core.full_cuda_graph")
    graphs: dict[str, Any] = {} if module is None else module.FullCudaGraphWrapper.cuda_graph
    for stage, graph in graphs.items():
        if graph is not None:
            graph.reset()
            graphs[stage] = None
