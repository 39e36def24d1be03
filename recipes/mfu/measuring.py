"""The comparison of one model: all variants side by side in one job, in turns, so that all see the same clocks.

Each variant has its own model, optimizer and gradients at the same time. If one model were rebuilt between the turns, it would
be timed with cold caches, and its losses would not go on.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state

import overlap_train
from gpt.program import RecipeError
from gpt.settings import Settings
from mfu import layer_timeline
from mfu.current import Layouts
from mfu.names import AGAIN, OVERLAP, bare, is_graph, is_transformer_engine, speed_baseline
from mfu.plan import Plan, settings_for
from mfu.trained import Shared, Trained, start
from mfu.variants import obstacle
from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import report
from overlap_train.integrations.megatron.enabling.counters import counters
from overlap_train.runtime.graph import forget_graphs
from overlap_train.tools.measure.timing import Pace, measure
from overlap_train.tools.measure.world import World, heat

EXPOSED_BURST = 3


@dataclass
class Measured:
    """What is known of one model. Keys are names of variants; times are milliseconds, the slowest rank's."""

    settings: Settings
    absent: dict[str, str] = field(default_factory=dict)  # why a variant did not run
    step_ms: dict[str, list[float]] = field(default_factory=dict)  # of each round
    passes_ms: dict[str, float] = field(default_factory=dict)  # forward and backward, without the optimizer
    alone_ms: dict[str, float] = field(default_factory=dict)  # and without the linears' communication; see has_alone
    losses: dict[str, list[float]] = field(default_factory=dict)  # of each step
    same: dict[str, bool] = field(default_factory=dict)  # whether a repeated variant ended with the same bits
    held_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    symmetric_bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)  # overlapped, fallen back
    spans: dict[str, list[layer_timeline.Span]] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        """The variant that the times of others are compared with."""
        return speed_baseline(self.step_ms) or next(iter(self.step_ms), OVERLAP)

    def exposed_ms(self, name: str) -> float | None:
        """How much shorter forward and backward are without the linears' communication; None where that is unknown."""
        return self.passes_ms[name] - self.alone_ms[name] if name in self.alone_ms else None

    def median_ms(self, name: str) -> float:
        return statistics.median(self.step_ms[name])


def compare(plan: Plan, number: int, overlap: OverlapConfig, world: World, layouts: Layouts) -> Measured:
    """Train and time every variant of the plan's model of this number; collective."""
    measured = Measured(settings_for(plan, number, world.size))
    shared = Shared(measured.settings, overlap, world.device, layouts)
    trained = start_all(plan, shared, measured, world)
    capture_all(trained, measured, world)
    heat(world.device)
    train_in_turns(plan, trained, measured, world)
    collect(trained, measured, world)
    problem = world.attempt(lambda: time_without_communication(plan, trained, measured, world))
    if problem is not None:  # step times and losses are worth keeping
        world.say(f" {measured.settings.model}: exposed communication is unknown: {problem}")
    if world.device.type == "cuda":
        record_timelines(trained, measured, world)
    for run in trained.values():
        run.release()  # NCCL does not end while a graph holds its calls
    layouts.use(measured.settings)
    forget_captured()
    return measured


def forget_captured() -> None:
    """Let symmetric memory be replaced again, for the next model: graphs may have captured that of either parallelism."""
    for group in (parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()):
        forget_graphs(group)


def start_all(plan: Plan, shared: Shared, measured: Measured, world: World) -> dict[str, Trained]:
    """Every variant that runs here, after its first steps. Those that do not start from the weights of the first are left out.

    Raises:
        RecipeError: no variant runs.
    """
    trained: dict[str, Trained] = {}
    for name in plan.names:
        problem = obstacle(name, shared.settings, world.device)
        if problem is None:
            world.say(f" {shared.settings.model}: building {name}")
            problem = world.attempt(lambda name=name: trained.update({name: start(name, shared)}))
            _begin_anew(problem, trained, world)
        problem = problem or _other_weights(trained, name, world)
        if problem is not None:
            trained.pop(name, None)
            _leave_out(name, problem, measured, world)
    if not trained:
        raise RecipeError(f"--model {shared.settings.model}: no variant can be trained here: {_reasons(measured)}")
    return trained


def _other_weights(trained: dict[str, Trained], name: str, world: World) -> str | None:
    """What is wrong with the initial weights of this variant, or None; collective."""
    first = next(iter(trained.values()))
    differ = world.any(not torch.equal(first.fingerprint, trained[name].fingerprint))
    return f"it did not start from the weights of {first.name}" if differ else None


def capture_all(trained: dict[str, Trained], measured: Measured, world: World) -> None:
    """Capture the graphs of those variants that have one, when all variants have taken their first steps.

    Raises:
        RecipeError: nothing is left to compare.
    """
    for name in [name for name in trained if is_graph(name)]:
        world.say(f" {measured.settings.model}: capturing {name}")
        problem = world.attempt(trained[name].capture)
        if problem is not None:
            trained.pop(name).release()  # on some ranks it may have worked
            _leave_out(name, problem, measured, world)
    if not trained:
        raise RecipeError(f"--model {measured.settings.model}: no variant can be captured here: {_reasons(measured)}")


def _leave_out(name: str, problem: str, measured: Measured, world: World) -> None:
    world.say(f" {measured.settings.model}: without {name}: {problem}")
    measured.absent[name] = problem


def _reasons(measured: Measured) -> str:
    return "; ".join(f"{name}: {problem}" for name, problem in measured.absent.items())


def train_in_turns(plan: Plan, trained: dict[str, Trained], measured: Measured, world: World) -> None:
    """Rounds of timed steps; another variant begins each round. One that fails has no more turns.

    Raises:
        RecipeError: all have failed.
    """
    names = list(trained)
    measured.step_ms |= {name: [] for name in names}
    for turn in range(plan.rounds):
        first = turn % len(names)
        for name in [name for name in names[first:] + names[:first] if name in trained]:
            problem = world.attempt(lambda name=name: _take_turn(plan, trained[name], measured, world))
            if problem is not None:
                trained.pop(name)
                measured.step_ms.pop(name)
                _leave_out(name, problem, measured, world)
                _begin_anew(problem, trained, world)
        if not trained:
            raise RecipeError(f"--model {measured.settings.model}: every variant failed: {_reasons(measured)}")
        times = ", ".join(f"{name} {measured.step_ms[name][-1]:.1f}" for name in trained)
        world.say(f" {measured.settings.model}: round {turn + 1}/{plan.rounds}, ms a step: {times}")


def _take_turn(plan: Plan, run: Trained, measured: Measured, world: World) -> None:
    timings = measure({run.name: run.step}, Pace(1, plan.round_steps), world.group, world.device)
    overlap_train.check()  # a wait that gave up in these steps has left NaN
    measured.step_ms[run.name].append(timings[run.name].ms)


def _begin_anew(problem: str | None, trained: dict[str, Trained], world: World) -> None:
    """Where a wait has given up: give the other variants new symmetric memory, since in the old one every call would raise that
    again. Not under graphs, which hold its addresses. Collective."""
    if world.any(problem is not None and "Overlap" in problem) and not any(map(is_graph, trained)):
        world.attempt(overlap_train.shutdown)


def has_alone(name: str) -> bool:
    """Whether it can run without its linears' communication: TransformerEngine's modules cannot, and a graph's host time would
    show."""
    return not is_graph(name) and not is_transformer_engine(name)


def time_without_communication(plan: Plan, trained: dict[str, Trained], measured: Measured, world: World) -> None:
    """Time forward and backward with and, of those that `has_alone`, without the linears' communication, in turns; not of
    repetitions."""
    once = {name: run for name, run in trained.items() if not name.endswith(AGAIN)}
    calls = {name: run.forward_backward for name, run in once.items()}
    alone = {f"{name}, alone": run.forward_backward_alone for name, run in once.items() if has_alone(name)}
    timings = measure(calls | alone, Pace(3 if plan.quick else 5, EXPOSED_BURST), world.group, world.device)
    for name in once:
        measured.passes_ms[name] = timings[name].ms
        times = f"{timings[name].ms:.1f}"
        if has_alone(name):
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
        fallen_back = sum(count for linear in linears for _, count in linear.fallback_calls)
        measured.calls[name] = sum(linear.overlapped_calls for linear in linears), fallen_back
        if linears:
            held = counters(run.trainer.model.bare)["overlap_train/symmetric_mib"]
            measured.symmetric_bytes[name] = round(held * 2**20)
        first = trained.get(bare(name))
        if name.endswith(AGAIN) and first is not None:
            measured.same[name] = are_the_same(first, run, measured.losses, world)


def are_the_same(one: Trained, other: Trained, losses: dict[str, list[float]], world: World) -> bool:
    """Equal losses at every step and equal weights at the end, bitwise and on every rank; collective."""
    weights = zip(one.trainer.model.bare.parameters(), other.trainer.model.bare.parameters(), strict=True)
    differ = losses[one.name] != losses[other.name] or not all(torch.equal(a, b) for a, b in weights)
    return not world.any(differ)


def record_timelines(trained: dict[str, Trained], measured: Measured, world: World) -> None:
    """One layer of each variant by the profiler. If the profiler does not work, only the picture is lost."""
    for name in (name for name in trained if not name.endswith(AGAIN)):
        problem: str | None = "a replay does not launch the layers' markers"
        if not is_graph(name):
            problem = world.attempt(
                lambda name=name: measured.spans.update({name: layer_timeline.record(trained[name])})
            )
        if problem is not None:
            world.say(f" {measured.settings.model}: no timeline of {name}: {problem}")
            measured.spans.pop(name, None)
    dist.barrier()
