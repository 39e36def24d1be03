"""The side stream of models whose passes are captured into a CUDA graph.

Everything of such a model that autograd remembers must have been made in the stream that is captured. DDP keeps the nodes that
collect gradients, and these run in the stream in which DDP was built: if that were the default stream, backward would leave the
capture. DDP, the eager steps and the capture therefore share one stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from gpt.settings import Settings


def prepare_random_states(settings: Settings) -> None:
    """With `--cuda-graph 1`, let a capture switch between Megatron's random states. Call it before a model is built.

    The states draw the same numbers as before. All models of this process use them, also those that are built already.
    """
    if settings.cuda_graph:
        initialize_rng_tracker(use_cudagraphable_rng=True, force_reset=True)


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Enqueue the block into `stream`: after what the caller's stream has, before what it gets next. None: change nothing."""
    if stream is None:
        yield
        return
    caller = torch.cuda.current_stream()
    stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        yield
    caller.wait_stream(stream)
