"""The comparison of one model: all variants side by side in one job, in turns, so that all see the same clocks.

Each variant has its own model, optimizer and gradients at the same time. If one model were rebuilt between the turns, it would
be timed with cold caches, and its losses would not go on.
"""

from __future__ import annotations

import gc

import torch
from megatron.core import parallel_state

import overlap_train
from gpt.program import RecipeError
from mfu.after_training import collect, record_timelines, time_without_communication
from mfu.current import Layouts
from mfu.measured import Measured
from mfu.names import is_graph
from mfu.plan import Plan, settings_for
from mfu.trained import Shared, Trained, start
from mfu.variants import obstacle
from overlap_train import OverlapConfig
from overlap_train.group.registry import forget_graphs
from overlap_train.tools.measure.timing import Pace, measure, order_of
from overlap_train.tools.measure.world import World, heat


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
            go_on_without(name, problem, trained, measured, world)
    if not trained:
        raise RecipeError(f"--model {shared.settings.model}: no variant can be trained here: {measured.reasons}")
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
            trained[name].release()  # on some ranks it may have worked
            go_on_without(name, problem, trained, measured, world)
    if not trained:
        raise RecipeError(f"--model {measured.settings.model}: no variant can be captured here: {measured.reasons}")


def train_in_turns(plan: Plan, trained: dict[str, Trained], measured: Measured, world: World) -> None:
    """Rounds of timed steps, each in another order. A variant that fails has no more turns.

    Raises:
        RecipeError: all have failed.
    """
    names = list(trained)
    measured.step_ms |= {name: [] for name in names}
    for turn in range(plan.rounds):
        for name in [name for name in order_of(names, turn) if name in trained]:
            problem = world.attempt(lambda name=name: _take_turn(plan, trained[name], measured, world))
            if problem is not None:
                measured.step_ms.pop(name)
                go_on_without(name, problem, trained, measured, world)
                _begin_anew(problem, trained, world)
        if not trained:
            raise RecipeError(f"--model {measured.settings.model}: every variant failed: {measured.reasons}")
        times = ", ".join(f"{name} {measured.step_ms[name][-1]:.1f}" for name in trained)
        world.say(f" {measured.settings.model}: round {turn + 1}/{plan.rounds}, ms a step: {times}")


def go_on_without(name: str, problem: str, trained: dict[str, Trained], measured: Measured, world: World) -> None:
    """Leave a variant out, if it is among the trained ones, and say why. Its memory is free for the others at once: of five
    variants that just fitted into 80 GB all failed, one after the other, when the first had."""
    trained.pop(name, None)
    measured.leave_out(name, _explained(problem), world)
    gc.collect()  # a model and its optimizer refer to each other
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def _explained(problem: str) -> str:
    """What is wrong, for memory with the way out."""
    if "OutOfMemoryError" not in problem:
        return problem
    what = problem.partition(". ")[0]
    return f"{what}; all variants are in memory side by side: name fewer (--variants), or fewer layers (--layers)"


def _take_turn(plan: Plan, run: Trained, measured: Measured, world: World) -> None:
    timings = measure({run.name: run.step}, Pace(1, plan.round_steps), world.group, world.device)
    overlap_train.check()  # a wait that gave up in these steps has left NaN
    measured.step_ms[run.name].append(timings[run.name].ms)


def _begin_anew(problem: str | None, trained: dict[str, Trained], world: World) -> None:
    """Where a wait has given up: give the other variants new symmetric memory, since in the old one every call would raise that
    again. Not under graphs, which hold its addresses. Collective."""
    if world.any(problem is not None and "Overlap" in problem) and not any(map(is_graph, trained)):
        world.attempt(overlap_train.shutdown)
