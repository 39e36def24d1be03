"""What is measured of trained variants: passes without communication, losses, memory, proof of what ran, and timelines."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mfu import layer_timeline
from mfu.measured import Measured
from mfu.names import AGAIN, bare, is_graph, is_transformer_engine
from mfu.plan import Plan
from mfu.trained import Trained
from overlap_train.integrations.megatron import report
from overlap_train.integrations.megatron.enabling.counters import counters
from overlap_train.tools.measure.timing import Pace, measure
from overlap_train.tools.measure.world import World

EXPOSED_BURST = 3


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
