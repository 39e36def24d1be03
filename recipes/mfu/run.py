"""The comparison of one model: all variants side by side in one job, in turns, so that all see the same clocks.

Each variant has its own model, optimizer and gradients at the same time. If one model were rebuilt between the turns, it would
be timed with cold caches, and its losses would not go on.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers, mappings

import overlap_train
from gpt.data import Batch, batches, read_samples
from gpt.model import build_model
from gpt.program import RecipeError, refused_by_rule, say
from gpt.settings import Settings
from gpt.training import Trainer, micro_batches
from mfu import transformer_engine
from mfu.plan import USERBUFFERS, WARM_UP_STEPS, Plan, is_graph
from overlap_train import OverlapConfig
from overlap_train.tools.measure.profile import spans_of, total, union
from overlap_train.tools.measure.timing import Pace, measure
from overlap_train.tools.measure.world import World

EXPOSED_BURST = 3
PROFILED_STEPS = 3


class Variant:
    """A variant in training. Times are milliseconds, the slowest rank's; `data`: all micro-batches, on the device."""

    def __init__(
        self, name: str, plan: Plan, settings: Settings, config: OverlapConfig | None, data: Sequence[Batch]
    ) -> None:  # fmt: skip
        if is_graph(name) and data[0]["tokens"].device.type != "cuda":
            raise RecipeError(f"--variants {name} needs CUDA devices")
        settings = replace(settings, cuda_graph=int(is_graph(name)))
        self.data = data
        build = partial(transformer_engine.build, name, plan.te_fp8) if name.startswith("te") else build_model
        self.trainer = Trainer(settings, build(settings, config, data[0]["tokens"].device))
        self.totals: list[torch.Tensor] = []  # (Σ nats, Σ bytes) of each step
        self.step_ms: list[float] = []  # of each round
        self.passes_ms = 0.0  # forward and backward, without the optimizer
        self.exposed_ms: float | None = None  # the part of them that communication takes; None: unknown
        self.busy_ms: float | None = None  # of a step, in which a kernel or copy runs on the GPU; None: there is no GPU

    def step(self, _: int = 0) -> None:
        """One optimizer step on the next global batch. A timed call is given an index, which means nothing here."""
        total, _ = self.trainer.step(iter(self.micro_batches(len(self.totals))))
        self.totals.append(total)

    def same_steps(self) -> None:
        """Steps to profile, all on the first global batch; no loss is kept."""
        for _ in range(PROFILED_STEPS):
            self.trainer.step(iter(self.micro_batches(0)))

    def forward_backward(self, _: int = 0) -> None:
        """Gradients of the first global batch; weights stay as they are."""
        self.trainer.forward_backward(iter(self.micro_batches(0)))

    def forward_backward_alone(self, _: int = 0) -> None:
        """As forward_backward, without communication; of Megatron-Core's linears."""
        with without_communication():
            self.forward_backward()

    def micro_batches(self, step: int) -> Sequence[Batch]:
        count = micro_batches(self.trainer.settings)
        return self.data[step * count : (step + 1) * count]


class Comparison:
    """All variants of a model, each with its first steps done; every method is collective."""

    def __init__(self, plan: Plan, settings: Settings, overlap: OverlapConfig, world: World) -> None:
        self.plan, self.settings, self.world = plan, settings, world
        stream = batches(read_samples(settings, is_held_out=False), 0, settings, world.device, is_trained=True)
        # On the device before anything is timed.
        data = list(islice(stream, settings.train_iters * micro_batches(settings)))
        self.variants: dict[str, Variant] = {}
        for name in plan.variants:
            say(f" {settings.model}: building {name}")
            self.variants[name] = variant = Variant(name, plan, settings, config_of(name, overlap), data)
            with refused_by_rule():  # operators refuse settings in the first step
                variant.step()
            for _ in range(1, WARM_UP_STEPS):  # kernels compile, and the optimizer's state is made
                variant.step()
            overlap_train.check()
        for name in filter(is_graph, self.variants):  # not before the heap, which all share, has its size
            self.variants[name].trainer.capture(self.variants[name].micro_batches(0))

    def train(self) -> None:
        """Rounds of timed steps, each in another order."""
        model, pace = self.settings.model, Pace(1, self.plan.round_steps)
        for turn in range(self.plan.rounds):
            for name in random.Random(turn).sample(list(self.variants), len(self.variants)):
                timings = measure({name: self.variants[name].step}, pace, self.world.group, self.world.device)
                overlap_train.check()  # a wait that gave up in these steps has left NaN
                self.variants[name].step_ms.append(timings[name].ms)
            times = ", ".join(f"{name} {variant.step_ms[-1]:.1f}" for name, variant in self.variants.items())
            say(f" {model}: round {turn + 1}/{self.plan.rounds}, ms a step: {times}")

    def time_passes(self) -> None:
        """Time forward and backward, in turns. What a variant exposes is how much longer they take than with Megatron-Core's
        linears without communication.

        Unknown of TransformerEngine's modules, which cannot run without, of Ulysses, whose exchanges move data that the next GEMM
        needs, and of a graph, since host time would show.
        """
        calls = {name: variant.forward_backward for name, variant in self.variants.items()}
        megatron = None if self.settings.cp > 1 else self.variants.get("megatron")
        if megatron is not None:
            calls["alone"] = megatron.forward_backward_alone
        timings = measure(calls, Pace(3 if self.plan.quick else 5, EXPOSED_BURST), self.world.group, self.world.device)
        for name, variant in self.variants.items():
            variant.passes_ms = timings[name].ms
            if megatron is not None and not is_graph(name) and not name.startswith("te"):
                variant.exposed_ms = variant.passes_ms - timings["alone"].ms

    def profile(self) -> None:
        """How long the GPU of rank 0 is busy in a step, by torch's profiler: the host's time does not show. Comes last, since it
        goes on training."""
        for variant in self.variants.values() if self.world.device.type == "cuda" else ():
            variant.same_steps()
            variant.busy_ms = total(union(spans_of(variant.same_steps))) / 1e3 / PROFILED_STEPS
            overlap_train.check()

    def close(self) -> None:
        """Free everything: the next model has symmetric memory of its own."""
        for variant in self.variants.values():
            variant.trainer.release()  # NCCL does not end while a graph holds its calls
        self.variants.clear()
        transformer_engine.release()
        overlap_train.shutdown()
        gc.collect()  # a model and its optimizer refer to each other
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()


def config_of(name: str, overlap: OverlapConfig) -> OverlapConfig | None:
    """The settings of a variant's overlapped linears; None: it has none."""
    variant = name.removesuffix("_graph")
    if variant in ("megatron", "te", "te_again", *USERBUFFERS):
        return None
    if variant == "overlap_fp8":
        return replace(overlap, fp8="tensorwise")
    return (
        overlap if variant in ("overlap", "te_overlap") else overlap.by("collective" if variant == "nccl" else variant)
    )


@contextmanager
def without_communication() -> Iterator[None]:
    """Let Megatron's linears compute without the collectives of tensor parallelism: results are wrong, times are right.

    What was gathered or scattered earlier stays in the buffers, so that GEMMs have numbers of the usual size: a GPU multiplies
    zeros faster.
    """
    all_reduce = dist.all_reduce

    def of_others(tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        # [s, b, h]: activations of linears and the embedding
        return _Done() if tensor.dim() == 3 else all_reduce(tensor, *rest, **named)

    with ExitStack() as patches:
        patches.enter_context(patch.object(dist, "all_reduce", of_others))
        for module in (layers, mappings):
            for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
                patches.enter_context(patch.object(module, name, lambda *_, **__: _Done()))
        yield


class _Done:
    """The handle of a collective that was left out."""

    def wait(self) -> None:
        pass
