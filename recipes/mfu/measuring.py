"""The comparison of one model: all variants side by side in one job, in turns, so that each sees the same clocks.

Every variant has its own model, optimizer and gradients at the same time: rebuilding one model between the turns would be timed
with cold caches, and its losses would not go on.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gpt.errors import RecipeError
from gpt.settings import Settings
from mfu import layer_timeline
from mfu.plan import AGAIN, MEGATRON, OVERLAP, Plan, is_graph, settings_for
from mfu.trained import Trained, have_equal_weights, load_batches, on_every_rank, start
from mfu.variants import obstacle
from overlap_train import OverlapConfig
from overlap_train.bench.timing import Pace, measure
from overlap_train.bench.world import World, heat
from overlap_train.graph import forget_graphs
from overlap_train.integrations.megatron import report
from overlap_train.registry import domain_of

EXPOSED_BURST = 3


@dataclass
class Measured:
    """What is known of one model. Keys are names of variants; times are milliseconds, the slowest rank's.

    step_ms: of each round. passes_ms: forward and backward without the optimizer; alone_ms: without the linears'
    communication, which is unknown of graphs. absent: why a variant did not run. same: whether a repeated variant ended with the
    same bits.
    """

    settings: Settings
    step_ms: dict[str, list[float]] = field(default_factory=dict)
    passes_ms: dict[str, float] = field(default_factory=dict)
    alone_ms: dict[str, float] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    held_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    symmetric_bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)  # overlapped, fallen back
    spans: dict[str, list[layer_timeline.Span]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    same: dict[str, bool] = field(default_factory=dict)

    def exposed_ms(self, name: str) -> float | None:
        """Time of a step's forward and backward that goes when the linears' communication goes; None where that is unknown."""
        return self.passes_ms[name] - self.alone_ms[name] if name in self.alone_ms else None

    def median_ms(self, name: str) -> float:
        return statistics.median(self.step_ms[name])


def compare(plan: Plan, number: int, overlap: OverlapConfig, world: World) -> Measured:
    """Train and time every variant of the plan's model of this number; collective."""
    settings = settings_for(plan, number, world.size)
    measured = Measured(settings)
    trained = start_all(plan, settings, overlap, measured, world)
    capture_all(trained, measured, world)
    heat(world.device, 0.5)
    train_in_turns(plan, trained, measured, world)
    collect(trained, measured, world)
    time_without_communication(plan, trained, measured, world)
    if world.device.type == "cuda":
        record_timelines(trained, measured, world)
        release_all(trained)
    return measured


def start_all(
    plan: Plan, settings: Settings, overlap: OverlapConfig, measured: Measured, world: World
) -> dict[str, Trained]:
    """Every variant that runs here, after its first steps. All start from the same bits, or this is an error.

    Raises:
        RecipeError: no variant runs.
    """
    data, trained = load_batches(settings, world.device), {}
    for name in plan.names:
        problem = obstacle(name.removesuffix(AGAIN), settings, world.device)
        if problem is None:
            world.say(f" {settings.model}: building {name}")
            problem = world.attempt(
                lambda name=name: trained.update({name: start(name, settings, overlap, data, world.device)})
            )
        if problem is not None:
            world.say(f" {settings.model}: without {name}: {problem}")
            trained.pop(name, None)
            measured.absent[name] = problem
    if not trained:
        reasons = "; ".join(f"{name}: {problem}" for name, problem in measured.absent.items())
        raise RecipeError(f"--model {settings.model}: no variant can be trained here: {reasons}")
    first = next(iter(trained.values()))
    for name, other in trained.items():
        if not on_every_rank(torch.equal(first.fingerprint, other.fingerprint), world.device):
            raise RuntimeError(f"{settings.model}: {name} did not start from the weights of {first.name}")
    return trained


def capture_all(trained: dict[str, Trained], measured: Measured, world: World) -> None:
    """The graphs of those variants that have one, when all variants have taken their first steps.

    Raises:
        RecipeError: nothing is left to compare.
    """
    for name in [name for name in trained if is_graph(name)]:
        world.say(f" {measured.settings.model}: capturing {name}")
        problem = world.attempt(trained[name].capture)
        if problem is not None:
            world.say(f" {measured.settings.model}: without {name}: {problem}")
            measured.absent[name] = problem
            trained.pop(name).release()  # on some ranks it may have worked
    if not trained:
        reasons = "; ".join(f"{name}: {problem}" for name, problem in measured.absent.items())
        raise RecipeError(f"--model {measured.settings.model}: no variant can be captured here: {reasons}")


def release_all(trained: dict[str, Trained]) -> None:
    """Free all graphs, so that NCCL can end and the next model may ask for more symmetric memory; collective."""
    for run in trained.values():
        run.release()
    forget_graphs(parallel_state.get_tensor_model_parallel_group())


def train_in_turns(plan: Plan, trained: dict[str, Trained], measured: Measured, world: World) -> None:
    """Rounds of timed steps; who comes first changes from round to round."""
    names = list(trained)
    measured.step_ms |= {name: [] for name in names}
    for turn in range(plan.rounds):
        first = turn % len(names)
        steps = {name: trained[name].step for name in names[first:] + names[:first]}
        timings = measure(steps, Pace(1, plan.round_steps), world.group, world.device)
        for name in names:
            measured.step_ms[name].append(timings[name].ms)
        times = ", ".join(f"{name} {timings[name].ms:.1f}" for name in names)
        world.say(f" {measured.settings.model}: round {turn + 1}/{plan.rounds}, ms a step: {times}")


def time_without_communication(plan: Plan, trained: dict[str, Trained], measured: Measured, world: World) -> None:
    """Forward and backward with and without the linears' communication, in turns; repetitions are left out.

    A graph has no second form, and without one the host's time would show: what it exposes stays unknown.
    """
    once = {name: run for name, run in trained.items() if not name.endswith(AGAIN)}
    calls = {name: run.forward_backward for name, run in once.items()}
    alone = {f"{name}, alone": run.forward_backward_alone for name, run in once.items() if not is_graph(name)}
    timings = measure(calls | alone, Pace(plan.exposed_rounds, EXPOSED_BURST), world.group, world.device)
    for name in once:
        measured.passes_ms[name] = timings[name].ms
        times = f"{measured.passes_ms[name]:.1f}"
        if not is_graph(name):
            measured.alone_ms[name] = timings[f"{name}, alone"].ms
            times += f", without communication {measured.alone_ms[name]:.1f}"
        world.say(f" {measured.settings.model}: {name}: ms of forward and backward: {times}")


def collect(trained: dict[str, Trained], measured: Measured, world: World) -> None:
    """Losses, memory, and proof of what ran."""
    for name, run in trained.items():
        measured.losses[name] = run.losses()
        if world.device.type == "cuda":
            measured.held_bytes[name], measured.peak_bytes[name] = run.held_bytes, run.peak_bytes
        linears = [linear for linear in report(run.trainer.model.bare).linears if linear.overlapped_calls]
        fallen = sum(count for linear in linears for _, count in linear.fallback_calls)
        measured.calls[name] = sum(linear.overlapped_calls for linear in linears), fallen
        if linears:
            measured.symmetric_bytes[name] = symmetric_bytes(world.device)
        if name.endswith(AGAIN) and name.removesuffix(AGAIN) in trained:
            measured.same[name] = are_the_same(trained[name.removesuffix(AGAIN)], run, measured.losses, world.device)


def are_the_same(one: Trained, other: Trained, losses: dict[str, list[float]], device: torch.device) -> bool:
    """Equal losses at every step and equal weights at the end, to the bit and on every rank."""
    equal = have_equal_weights(one, other)
    return on_every_rank(losses[one.name] == losses[other.name], device) and equal


def symmetric_bytes(device: torch.device) -> int:
    """What the tensor-parallel group's heap holds on this rank."""
    return domain_of(parallel_state.get_tensor_model_parallel_group(), None, device).layout.nbytes


def record_timelines(trained: dict[str, Trained], measured: Measured, world: World) -> None:
    """One layer of each variant under the profiler; a profiler that does not work costs the picture only."""
    for name in (name for name in trained if not name.endswith(AGAIN)):
        if is_graph(name):
            world.say(
                f" {measured.settings.model}: no timeline of {name}: a replay does not launch the layers' markers"
            )
            continue
        problem = world.attempt(lambda name=name: measured.spans.update({name: layer_timeline.record(trained[name])}))
        if problem is not None:
            world.say(f" {measured.settings.model}: no timeline of {name}: {problem}")
            measured.spans.pop(name, None)
    dist.barrier()


def baseline_of(measured: Measured) -> str:
    """The variant that others are compared with."""
    return MEGATRON if MEGATRON in measured.step_ms else next(iter(measured.step_ms), OVERLAP)
