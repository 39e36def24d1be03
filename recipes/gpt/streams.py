"""The side stream of models whose passes are captured into a CUDA graph.

Everything of such a model that autograd remembers must have been made in the stream that is captured. DDP keeps the nodes that
collect gradients, and they run in the stream in which DDP was built: were that the default stream, backward would leave the
capture. So DDP, the eager steps and the capture share one stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpt.settings import Settings


def graph_stream(settings: Settings) -> torch.cuda.Stream | None:
    """A new stream with `--cuda-graph 1`, else None: whatever stream is current."""
    return torch.cuda.Stream() if settings.cuda_graph else None


def random_states(settings: Settings) -> dict[str, Any]:
    """Arguments of Megatron's model_parallel_cuda_manual_seed: states that a captured model may switch between.

    They draw the same numbers. They stay for all models that are built afterwards in this process.
    """
    return {"use_cudagraphable_rng": True, "force_reset_rng": True} if settings.cuda_graph else {}


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """What the block enqueues goes into `stream`, behind the caller's stream, which goes on behind it. None: nothing changes."""
    if stream is None:
        yield
        return
    caller = torch.cuda.current_stream()
    stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        yield
    caller.wait_stream(stream)
