"""Forward and backward of a whole step as one CUDA graph; the optimizer stays outside.

The first steps run eagerly: kernels compile, NCCL connects and symmetric memory is allocated. Then all passes of a global batch,
from the zeroing of gradients to their reduction, are captured on copies of its micro-batches. A later step copies its own
micro-batches over these and replays. Megatron does the same in megatron/core/full_cuda_graph.py, but once in a process, and
compare_mfu has several models in one.
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
from gpt.program import RecipeError
from gpt.streams import on_stream
from gpt.training import Trainer, micro_batches
from overlap_train.integrations.megatron import graphed_model

EAGER_STEPS = 3


@dataclass
class GraphedTrainer(Trainer):
    """A Trainer that replays its passes once the eager calls are done. Its model was built with `--cuda-graph 1`.

    inputs, total: the tensors that the graph reads, and the one that it writes.
    """

    eager_calls: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    inputs: list[Batch] = field(default_factory=list)  # of each micro-batch
    total: torch.Tensor | None = None  # (Σ nats, Σ bytes) [2]

    def forward_backward(self, batches: Iterator[Batch]) -> torch.Tensor:
        """Do as Trainer.forward_backward. All ranks capture at the same call.

        Raises:
            OverlapTimeoutError: a wait in an earlier replay has given up.
        """
        taken = list(islice(batches, micro_batches(self.settings)))
        if self.graph is None and self.eager_calls < EAGER_STEPS:
            self.eager_calls += 1
            with on_stream(self.model.stream):
                return super().forward_backward(iter(taken))
        if self.graph is None:
            self.capture(taken)
        return self._replay(taken)

    def capture(self, batches: Sequence[Batch]) -> None:
        """Capture the passes of a global batch, once, after the eager calls. Nothing runs, so gradients stay as they are."""
        graph = torch.cuda.CUDAGraph()
        inputs = [{key: value.clone() for key, value in batch.items()} for batch in batches]
        for state in get_all_rng_states().values():
            graph.register_generator_state(state)
        gc.collect()  # freeing memory during a capture may end it
        torch.cuda.synchronize()
        # thread_local: NCCL's watchdog and autograd's threads go on calling CUDA
        capture = torch.cuda.graph(graph, stream=self.model.stream, capture_error_mode="thread_local")
        with capture, graphed_model(self.model.bare):
            total = super().forward_backward(iter(inputs))
        self.graph, self.inputs, self.total = graph, inputs, total

    def release(self) -> None:
        """Free the graph and its memory; the next call captures again."""
        if self.graph is not None:
            torch.cuda.synchronize()
            self.graph.reset()
        self.graph, self.inputs, self.total = None, [], None

    def _replay(self, batches: Sequence[Batch]) -> torch.Tensor:
        assert self.graph is not None and self.total is not None
        overlap_train.check()  # a replay raises nothing itself
        for kept, batch in zip(self.inputs, batches, strict=True):
            for key, value in kept.items():
                value.copy_(batch[key], non_blocking=True)
        self.graph.replay()
        return self.total.clone()  # the next replay writes over it


def with_graph(trainer: Trainer) -> Trainer:
    """The trainer itself, or a GraphedTrainer of the same parts if its settings ask for a CUDA graph."""
    if not trainer.settings.cuda_graph:
        return trainer
    return GraphedTrainer(trainer.settings, trainer.model, trainer.optimizer, trainer.schedule)


@contextmanager
def released(trainer: Trainer) -> Iterator[None]:
    """Free the trainer's graph, if it has one, after the block: NCCL does not end while a graph holds calls of it.

    After an OverlapTimeoutError the graph stays: a peer is missing, and waiting for the device could last for ever.
    """
    try:
        yield
    except RecipeError:
        trainer.release()
        raise
    trainer.release()
