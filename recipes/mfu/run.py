"""The comparison of one model: all variants side by side in one job, in turns, so that all see the same clocks.

Each variant has its own model, optimizer and gradients at the same time. If one model were rebuilt between the turns, it would
be timed with cold caches, and its losses would not go on.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

import overlap_train
from gpt.data import Batch, batches, read_samples
from gpt.program import RecipeError, say
from gpt.settings import Settings
from gpt.training import GraphedTrainer, Trainer, micro_batches, per_byte
from mfu.linears import Wholes, without_communication
from mfu.plan import AGAIN, WARM_UP_STEPS, Plan, bare, is_graph, is_transformer_engine
from mfu.variants import adds_in_place, build_variant, obstacle, release_userbuffers
from overlap_train import OverlapConfig
from overlap_train.tools.measure.timing import Pace, measure
from overlap_train.tools.measure.world import World

EXPOSED_BURST = 3


@dataclass
class Variant:
    """A variant in training. Times are milliseconds, the slowest rank's; batches are all micro-batches, on the device."""

    name: str
    trainer: Trainer
    batches: Sequence[Batch]
    start: torch.Tensor  # the fingerprint of its initial weights
    wholes: Wholes
    totals: list[torch.Tensor] = field(default_factory=list)  # (Σ nats, Σ bytes) of each step
    step_ms: list[float] = field(default_factory=list)  # of each round
    passes_ms: float | None = None  # forward and backward, without the optimizer
    alone_ms: float | None = None  # and without the linears' communication

    def step(self, _: int = 0) -> None:
        """One optimizer step on the next global batch. A timed call is given an index, which means nothing here."""
        total, _ = self.trainer.step(iter(self._micro_batches(len(self.totals))))
        self.totals.append(total)

    def forward_backward(self, _: int = 0) -> None:
        """Gradients of the first global batch; weights stay as they are."""
        self.trainer.forward_backward(iter(self._micro_batches(0)))

    def forward_backward_alone(self, _: int = 0) -> None:
        """As forward_backward, without the communication of the linears."""
        with without_communication(self.trainer.bare, self.wholes):
            self.forward_backward()

    def capture(self) -> None:
        """Capture the passes of a graph variant; collective."""
        assert isinstance(self.trainer, GraphedTrainer)
        self.trainer.capture(self._micro_batches(0))

    def losses(self) -> list[float]:
        """Nats per byte of every step, over all replicas and parts of sequences; collective."""
        return per_byte(torch.stack(self.totals))

    def _micro_batches(self, step: int) -> Sequence[Batch]:
        count = micro_batches(self.trainer.settings)
        return self.batches[step * count : (step + 1) * count]


@dataclass
class Measured:
    """What is known of one model. Keys are names of variants."""

    settings: Settings
    absent: dict[str, str] = field(default_factory=dict)  # why a variant did not run
    ran: dict[str, Variant] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)  # of each step
    same: dict[str, bool] = field(default_factory=dict)  # whether a repeated variant ended with the same bits

    def median_ms(self, name: str) -> float:
        return statistics.median(self.ran[name].step_ms)


def compare(plan: Plan, settings: Settings, overlap: OverlapConfig, world: World) -> Measured:
    """Train and time every variant of a model; collective.

    Raises:
        RecipeError: no variant runs.
    """
    measured = Measured(settings)
    samples, _ = read_samples(settings, is_validated=False)
    stream = batches(samples, 0, settings, world.device)
    # On the device before anything is timed.
    data = list(islice(stream, settings.train_iters * micro_batches(settings)))
    for name in plan.names:
        problem = obstacle(name, settings, world.device)
        if problem is None:
            say(f" {settings.model}: building {name}")
            problem = world.attempt(lambda name=name: start(name, measured, overlap, data, world))
        leave_out(name, problem, measured, world)
    # Only now: all variants share a heap, which cannot grow once a graph knows it.
    for name in [name for name in measured.ran if is_graph(name)]:
        leave_out(name, world.attempt(measured.ran[name].capture), measured, world)
    train_in_turns(plan, measured, world)
    measured.losses = {name: run.losses() for name, run in measured.ran.items()}
    for name, run in measured.ran.items():
        if name.endswith(AGAIN) and bare(name) in measured.ran:
            measured.same[name] = are_the_same(measured.ran[bare(name)], run, measured.losses, world)
    problem = world.attempt(lambda: time_without_communication(plan, measured, world))
    if problem is not None:  # step times and losses are worth keeping
        say(f" {settings.model}: exposed communication is unknown: {problem}")
    for run in measured.ran.values():
        run.trainer.release()  # NCCL does not end while a graph holds its calls
    release_userbuffers()
    overlap_train.shutdown()  # the next model has symmetric memory of its own
    return measured


def start(name: str, measured: Measured, overlap: OverlapConfig, data: Sequence[Batch], world: World) -> None:
    """Build a variant and take its first steps, in which kernels compile and the optimizer's state is made; collective."""
    settings = measured.settings
    trainer = build_variant(name, settings, overlap, world.device)
    wholes = Wholes(settings.tp, adds_in_place(name, settings, overlap))
    run = Variant(name, trainer, data, fingerprint(trainer.bare), wholes)
    first = next(iter(measured.ran.values()), run)
    if world.any(not torch.equal(first.start, run.start)):
        raise RecipeError(f"it did not start from the weights of {first.name}")
    for _ in range(WARM_UP_STEPS):
        run.step()
    overlap_train.check()
    measured.ran[name] = run


@torch.no_grad()
def fingerprint(model: torch.nn.Module) -> torch.Tensor:
    """The sum of squares of each parameter, fp64 [parameters], the smallest first: TransformerEngine's modules have the same
    parameters in another order."""
    squares = [parameter.float().square().sum().double() for parameter in model.parameters()]
    return torch.stack(squares).sort().values


def train_in_turns(plan: Plan, measured: Measured, world: World) -> None:
    """Rounds of timed steps, each in another order. A variant that fails has no more turns."""
    for turn in range(plan.rounds):
        for name in random.Random(turn).sample(list(measured.ran), len(measured.ran)):
            problem = world.attempt(lambda name=name: take_turn(plan, measured.ran[name], world))
            leave_out(name, problem, measured, world)
        if not measured.ran:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in measured.absent.items())
            raise RecipeError(f"--model {measured.settings.model}: no variant can be trained here: {reasons}")
        times = ", ".join(f"{name} {run.step_ms[-1]:.1f}" for name, run in measured.ran.items())
        say(f" {measured.settings.model}: round {turn + 1}/{plan.rounds}, ms a step: {times}")


def take_turn(plan: Plan, run: Variant, world: World) -> None:
    timings = measure({run.name: run.step}, Pace(1, plan.round_steps), world.group, world.device)
    overlap_train.check()  # a wait that gave up in these steps has left NaN
    run.step_ms.append(timings[run.name].ms)


def leave_out(name: str, problem: str | None, measured: Measured, world: World) -> None:
    """Where there is a problem: go on without the variant, say why, and give the others its memory at once. Collective."""
    if problem is None:
        return
    if "OutOfMemoryError" in problem:
        what = problem.partition(". ")[0]
        problem = (
            f"{what}; all variants are in memory side by side: name fewer (--variants), or fewer layers (--layers)"
        )
    gone = measured.ran.pop(name, None)
    if gone is not None:
        gone.trainer.release()
    del gone
    say(f" {measured.settings.model}: without {name}: {problem}")
    measured.absent[name] = problem
    gc.collect()  # a model and its optimizer refer to each other
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    # After a wait that gave up every call would raise that again. Graphs hold addresses of the old memory.
    if world.any("Overlap" in problem) and not any(map(is_graph, measured.ran)):
        world.attempt(overlap_train.shutdown)


def time_without_communication(plan: Plan, measured: Measured, world: World) -> None:
    """Time forward and backward with and without the linears' communication, in turns; not of repetitions.

    TransformerEngine's modules cannot run without, Ulysses' all-to-alls move data that the next GEMM needs, and of a graph host
    time would show.
    """
    once = {name: run for name, run in measured.ran.items() if not name.endswith(AGAIN)}
    alone = [name for name in once if not (is_graph(name) or is_transformer_engine(name))]
    calls = {name: run.forward_backward for name, run in once.items()}
    if measured.settings.cp == 1:
        calls |= {f"{name}, alone": once[name].forward_backward_alone for name in alone}
    timings = measure(calls, Pace(3 if plan.quick else 5, EXPOSED_BURST), world.group, world.device)
    for name, run in once.items():
        run.passes_ms = timings[name].ms
        run.alone_ms = timings[f"{name}, alone"].ms if f"{name}, alone" in timings else None


def are_the_same(one: Variant, other: Variant, losses: dict[str, list[float]], world: World) -> bool:
    """Equal losses at every step and equal weights at the end, bitwise and on every rank; collective."""
    weights = zip(one.trainer.bare.parameters(), other.trainer.bare.parameters(), strict=True)
    differ = losses[one.name] != losses[other.name] or not all(torch.equal(a, b) for a, b in weights)
    return not world.any(differ)
