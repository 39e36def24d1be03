"""Forward and backward of a whole step as one CUDA graph; the optimizer stays outside.

The first steps run eagerly, so that kernels are compiled, NCCL has connected and symmetric memory is there. Then all passes of a
global batch, from the zeroing of gradients to their reduction, are captured on copies of its micro-batches. A later step copies
its own micro-batches over these and replays. Megatron does the same in megatron/core/full_cuda_graph.py, but once in a process.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import torch
from megatron.core.tensor_parallel.random import get_all_rng_states

import overlap_train
from gpt.data import Batch
from gpt.errors import RecipeError
from gpt.streams import on_stream
from gpt.training import Trainer, micro_batches
from overlap_train.integrations.megatron import graphed_model

EAGER_STEPS = 3


@dataclass
class Passes:
    """How far it is: eager calls so far, and then the graph with the tensors that it reads and the one that it writes."""

    eager_calls: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    inputs: list[Batch] = field(default_factory=list)  # of each micro-batch
    total: torch.Tensor | None = None  # (Σ nats, Σ bytes) [2]


@dataclass(frozen=True)
class GraphedTrainer(Trainer):
    """A Trainer whose passes are replayed from the call after the eager ones on. Its model was built with `--cuda-graph 1`."""

    passes: Passes

    def forward_backward(self, batches: Iterator[Batch]) -> torch.Tensor:
        """As Trainer's. All ranks capture at the same call.

        Raises:
            OverlapTimeoutError: a wait in an earlier replay has given up.
        """
        taken = list(islice(batches, micro_batches(self.settings)))
        if self.passes.graph is None and self.passes.eager_calls < EAGER_STEPS:
            self.passes.eager_calls += 1
            with on_stream(self.model.stream):
                return super().forward_backward(iter(taken))
        if self.passes.graph is None:
            self.capture(taken)
        return self._replay(taken)

    def capture(self, batches: Sequence[Batch]) -> None:
        """Capture the passes of a global batch; nothing runs, so gradients stay what they are. Once, after the eager calls."""
        graph = torch.cuda.CUDAGraph()
        inputs = [{key: value.clone() for key, value in batch.items()} for batch in batches]
        for state in get_all_rng_states().values():
            graph.register_generator_state(state)
        gc.collect()  # what is freed in the middle of a capture may end it
        torch.cuda.synchronize()
        # thread_local: NCCL's watchdog and autograd's threads go on calling CUDA
        capture = torch.cuda.graph(graph, stream=self.model.stream, capture_error_mode="thread_local")
        with capture, graphed_model(self.model.bare):
            total = super().forward_backward(iter(inputs))
        self.passes.graph, self.passes.inputs, self.passes.total = graph, inputs, total

    def release(self) -> None:
        """Free the graph and its memory; the next call captures again."""
        if self.passes.graph is not None:
            torch.cuda.synchronize()
            self.passes.graph.reset()
        self.passes.graph, self.passes.inputs, self.passes.total = None, [], None

    def _replay(self, batches: Sequence[Batch]) -> torch.Tensor:
        passes = self.passes
        assert passes.graph is not None and passes.total is not None
        overlap_train.check()  # a replay raises nothing itself
        for kept, batch in zip(passes.inputs, batches, strict=True):
            for key, value in kept.items():
                value.copy_(batch[key], non_blocking=True)
        passes.graph.replay()
        return passes.total.clone()  # the next replay writes over it


def with_graph(trainer: Trainer) -> Trainer:
    """The same trainer, graphed where its settings say so."""
    if not trainer.settings.cuda_graph:
        return trainer
    return GraphedTrainer(trainer.settings, trainer.model, trainer.optimizer, trainer.schedule, Passes())


@contextmanager
def released(trainer: Trainer) -> Iterator[None]:
    """Free the trainer's graph, if it has one, behind the block: NCCL does not end while a graph holds calls of it.

    Not when a peer is missing: waiting for the device could then last for ever.
    """
    try:
        yield
    except RecipeError:
        _release(trainer)
        raise
    _release(trainer)


def _release(trainer: Trainer) -> None:
    if isinstance(trainer, GraphedTrainer):
        trainer.release()
