"""The comparison of one model: all variants side by side in one job, in turns, so that all see the same clocks.

Each variant has its own model, optimizer and gradients at the same time. If one model were rebuilt between the turns, it would
be timed with cold caches, and its losses would not go on.
"""

from __future__ import annotations

import gc
import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

import overlap_train
from gpt.data import Batch, batches, read_samples
from gpt.model import build_model
from gpt.program import RecipeError, say
from gpt.settings import Settings
from gpt.training import Trainer, micro_batches, per_byte
from mfu.linears import Wholes, use_async_tp, without_communication
from mfu.plan import AGAIN, USERBUFFERS, WARM_UP_STEPS, Plan, bare, is_graph
from mfu.results import Row, row_of
from overlap_train import OverlapConfig
from overlap_train.tools.measure.timing import Pace, measure
from overlap_train.tools.measure.world import World

EXPOSED_BURST = 3


class Variant:
    """A variant in training. Times are milliseconds, the slowest rank's; `data`: all micro-batches, on the device."""

    def __init__(self, name: str, settings: Settings, config: OverlapConfig | None, data: Sequence[Batch]) -> None:
        self.name, self.data = name, data
        self.trainer = build_variant(name, settings, config, data[0]["tokens"].device)
        adds_in_place = settings.gradient_accumulation_fusion if config is None else config.main_grad == "accumulate"
        self.wholes = Wholes(settings.tp, adds_in_place)
        self.totals: list[torch.Tensor] = []  # (Σ nats, Σ bytes) of each step
        self.step_ms: list[float] = []  # of each round
        self.passes_ms: float | None = None  # forward and backward, without the optimizer
        self.alone_ms: float | None = None  # and without the linears' communication

    def step(self, _: int = 0) -> None:
        """One optimizer step on the next global batch. A timed call is given an index, which means nothing here."""
        total, _ = self.trainer.step(iter(self.micro_batches(len(self.totals))))
        self.totals.append(total)

    def forward_backward(self, _: int = 0) -> None:
        """Gradients of the first global batch; weights stay as they are."""
        self.trainer.forward_backward(iter(self.micro_batches(0)))

    def forward_backward_alone(self, _: int = 0) -> None:
        """As forward_backward, without the communication of the linears."""
        with without_communication(self.trainer.bare, self.wholes):
            self.forward_backward()

    def micro_batches(self, step: int) -> Sequence[Batch]:
        count = micro_batches(self.trainer.settings)
        return self.data[step * count : (step + 1) * count]


class Comparison:
    """All variants of a model; every method is collective. Keys are names of variants and their repetitions."""

    def __init__(self, plan: Plan, settings: Settings, overlap: OverlapConfig, world: World) -> None:
        self.plan, self.settings, self.overlap, self.world = plan, settings, overlap, world
        self.absent: dict[str, str] = {}  # why a variant did not run
        self.running: dict[str, Variant] = {}
        self.weights: list[float] = []  # the fingerprint with which all start
        stream = batches(read_samples(settings, is_held_out=False), 0, settings, world.device, is_trained=True)
        # On the device before anything is timed.
        self.data = list(islice(stream, settings.train_iters * micro_batches(settings)))

    def rows(self) -> list[Row]:
        """Train and time every variant. Raises RecipeError where none runs."""
        for name in self.plan.names:
            self.attempt(name, self.start)
        for name in filter(is_graph, list(self.running)):  # not before the heap, which all share, has its size
            self.attempt(name, lambda name: self.running[name].trainer.capture(self.running[name].micro_batches(0)))
        self.train()
        problem = self.world.attempt(self.time_without_communication)
        if problem is not None:  # step times and losses are worth keeping
            say(f" {self.settings.model}: exposed communication is unknown: {problem}")
        rows = self.collect()
        for variant in self.running.values():
            variant.trainer.release()  # NCCL does not end while a graph holds its calls
        self.running.clear()
        if megatron_te.HAVE_TE:  # userbuffers must not outlive the process groups
            importlib.import_module("transformer_engine.pytorch.module.base").destroy_ub()
        overlap_train.shutdown()  # the next model has symmetric memory of its own
        self.free()
        return rows

    def start(self, name: str) -> None:
        """Build a variant and take its first steps, in which kernels compile and the optimizer's state is made."""
        if bare(name).startswith("te") and not megatron_te.HAVE_TE:
            raise RecipeError("TransformerEngine is not installed; leave this variant out of --variants")
        if (bare(name) == "async_tp" or is_graph(name)) and self.world.device.type != "cuda":
            raise RecipeError(f"{bare(name)} needs CUDA devices")
        say(f" {self.settings.model}: building {name}")
        variant = Variant(name, self.settings, overlap_of(name, self.overlap), self.data)
        weights = fingerprint(variant.trainer.bare)
        self.weights = self.weights or weights
        if self.world.any(weights != self.weights):
            raise RecipeError("it did not start from the weights of the first variant")
        for _ in range(WARM_UP_STEPS):
            variant.step()
        overlap_train.check()
        self.running[name] = variant

    def train(self) -> None:
        """Rounds of timed steps, each in another order. A variant that fails has no more turns."""
        model, rounds = self.settings.model, self.plan.rounds
        for turn in range(rounds):
            for name in random.Random(turn).sample(list(self.running), len(self.running)):
                self.attempt(name, self.take_turn)
            if not self.running:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in self.absent.items())
                raise RecipeError(f"--model {model}: no variant can be trained here: {reasons}")
            times = ", ".join(f"{name} {variant.step_ms[-1]:.1f}" for name, variant in self.running.items())
            say(f" {model}: round {turn + 1}/{rounds}, ms a step: {times}")

    def take_turn(self, name: str) -> None:
        variant, pace = self.running[name], Pace(1, self.plan.round_steps)
        timings = measure({name: variant.step}, pace, self.world.group, self.world.device)
        overlap_train.check()  # a wait that gave up in these steps has left NaN
        variant.step_ms.append(timings[name].ms)

    def attempt(self, name: str, work: Callable[[str], None]) -> None:
        """Where work fails: go on without the variant, say why, and give the others its memory at once."""
        problem = self.world.attempt(lambda: work(name))
        if problem is None:
            return
        problem = problem.removeprefix("RecipeError: ")
        if "OutOfMemoryError" in problem:
            way_out = "all variants are in memory side by side: name fewer (--variants), or fewer layers (--layers)"
            problem = f"{problem.partition('. ')[0]}; {way_out}"
        if name in self.running:
            self.running.pop(name).trainer.release()
        say(f" {self.settings.model}: without {name}: {problem}")
        self.absent[name] = problem
        self.free()
        # After a wait that gave up every call would raise that again. Graphs hold addresses of the old memory.
        if self.world.any("Overlap" in problem) and not any(map(is_graph, self.running)):
            self.world.attempt(overlap_train.shutdown)

    def free(self) -> None:
        gc.collect()  # a model and its optimizer refer to each other
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def time_without_communication(self) -> None:
        """Time forward and backward with and without the linears' communication, in turns; not of repetitions.

        TransformerEngine's modules cannot run without, Ulysses' all-to-alls move data that the next GEMM needs, and of a graph
        host time would show.
        """
        once = {name: variant for name, variant in self.running.items() if not name.endswith(AGAIN)}
        calls = {name: variant.forward_backward for name, variant in once.items()}
        for name, variant in once.items() if self.settings.cp == 1 else ():
            if not (is_graph(name) or name.startswith("te")):
                calls[f"{name}, alone"] = variant.forward_backward_alone
        timings = measure(calls, Pace(3 if self.plan.quick else 5, EXPOSED_BURST), self.world.group, self.world.device)
        for name, variant in once.items():
            variant.passes_ms = timings[name].ms
            variant.alone_ms = timings[f"{name}, alone"].ms if f"{name}, alone" in timings else None

    def collect(self) -> list[Row]:
        """A row for each variant and repetition. Losses are of every step, over all replicas and parts of sequences."""
        losses = {name: per_byte(torch.stack(variant.totals)) for name, variant in self.running.items()}
        same: dict[str, bool] = {}  # whether a repeated variant ended with the same bits on every rank
        for name, variant in self.running.items():
            if name.endswith(AGAIN) and (once := self.running.get(bare(name))) is not None:
                weights = zip(once.trainer.bare.parameters(), variant.trainer.bare.parameters(), strict=True)
                differ = losses[name] != losses[bare(name)] or not all(torch.equal(a, b) for a, b in weights)
                same[name] = not self.world.any(differ)
        return [row_of(self, name, losses, same.get(name)) for name in self.plan.names]


@torch.no_grad()
def fingerprint(model: torch.nn.Module) -> list[float]:
    """The sum of squares of each parameter, the smallest first: TransformerEngine's modules have them in another order."""
    return sorted(parameter.float().square().sum().item() for parameter in model.parameters())


def build_variant(name: str, settings: Settings, overlap: OverlapConfig | None, device: torch.device) -> Trainer:
    """The trainer of a variant; collective. Raises RecipeError where enable() refuses."""
    variant, settings = bare(name), replace(settings, cuda_graph=int(is_graph(name)))
    build = partial(build_model, settings, overlap, device)
    if variant.startswith("te"):
        ring = variant == "te_userbuffers_ring"
        own = {"tp_comm_overlap": True, "tp_comm_overlap_rs_dgrad": ring} if variant in USERBUFFERS else {}
        model = build(partial(get_gpt_decoder_block_spec, use_transformer_engine=True), own)
        if variant in USERBUFFERS:
            name_userbuffers(model, settings, ring)
    else:
        model = use_async_tp(build()) if variant == "async_tp" else build()
    return Trainer(settings, model)


def overlap_of(name: str, overlap: OverlapConfig) -> OverlapConfig | None:
    """The settings of a variant's overlapped linears; None: it has none."""
    variant = bare(name).removesuffix("_graph")
    if variant in ("megatron", "async_tp", "te", *USERBUFFERS):
        return None
    if variant in ("overlap", "te_overlap"):
        return overlap
    return overlap.by("collective" if variant == "nccl" else variant)


def name_userbuffers(model: GPTModel, settings: Settings, is_ring: bool) -> None:
    """Let a model's linears take TransformerEngine's communication buffers, made as Megatron-LM makes them (--tp-comm-overlap).

    Needs TransformerEngine 2.7 or newer. A process can have one set, which has a communicator for each product of a transformer,
    by name. So one set has both configurations: linears named fc1 and fc2 run by TransformerEngine's defaults, qkv and proj by
    ring exchange for every scatter.
    """
    base = importlib.import_module("transformer_engine.pytorch.module.base")
    if base._ub_communicators is None:
        ring = dict(method="ring_exchange", num_sm=1, cga_size=1, set_sm_margin=False, num_splits=settings.tp)
        base.initialize_ub(
            shape=[settings.seq_length * settings.micro_batch_size, settings.hidden_size],
            tp_size=settings.tp,
            quantization_modes=[base.UserBufferQuantizationMode.NONE],
            ub_cfgs={"qkv_dgrad": dict(ring), "proj_fprop": dict(ring)},
            bootstrap_backend="nccl",
        )
    column, row = ("qkv", "proj") if is_ring else ("fc1", "fc2")
    for module in model.modules():
        if getattr(module, "ub_name", None) is not None:
            module.ub_name = row if module.parallel_mode == "row" else column
