"""The layer benchmark: forward and backward of one column and one row linear with sequence parallelism.

    y = column(x)  x [s/W, K1], w1 [N1/W, K1] -> [s, N1/W]        z = row(h)  h [s, K2/W], w2 [N2, K2/W] -> [s/W, N2]

h and both output gradients are given: what a model computes between the two linears is not part of the figure.
Gradients of x, w1, h and w2 are taken by autograd, the row linear's first, and returned in the dtype of the weights.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from ...linear import all_gather_linear, linear_reduce_scatter
from ...runtime.graph import forget_graphs, graphed
from ...runtime.registry import check as check_timeouts
from ..measure.check import Reference, check, product_reference, scatter_reference
from ..measure.operands import gathered
from ..measure.results import Row
from ..measure.runs import Session, Settings
from ..measure.timing import Call, Timing
from ..measure.world import World
from .async_tp import AsyncColumn, AsyncRow
from .shapes import Layer

Linear = Callable[[torch.Tensor], torch.Tensor]
Outcome = tuple[torch.Tensor, ...]  # y, z, dx, dw1, dh, dw2
Maker = Callable[["Data"], tuple[Linear, Linear]]  # linears with the weights of the data
NAMES = ("y", "z", "dx", "dw1", "dh", "dw2")
AUTO, GRAPH = "auto", "auto_graph"
MEGATRON_LINEARS = "overlap_train.integrations.megatron.bench_baseline"


@dataclass(frozen=True)
class Data:
    """Inputs, weights and output gradients of one layer on this rank; inputs and weights are leaves of autograd."""

    x: torch.Tensor
    w1: torch.nn.Parameter
    dy: torch.Tensor
    h: torch.Tensor
    w2: torch.nn.Parameter
    dz: torch.Tensor

    @classmethod
    def make(cls, layer: Layer, sequence: int, world: World, dtype: torch.dtype, seed: int) -> Data:
        generator, shards = torch.Generator(world.device).manual_seed(1000 * seed + world.rank), world.size

        def normal(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, dtype=dtype, device=world.device, generator=generator)

        n1, k2 = layer.column_n // shards, layer.row_k // shards
        return cls(
            normal(sequence // shards, layer.column_k).requires_grad_(),
            torch.nn.Parameter(normal(n1, layer.column_k)),
            normal(sequence, n1),
            normal(sequence, k2).requires_grad_(),
            torch.nn.Parameter(normal(layer.row_n, k2)),
            normal(sequence // shards, layer.row_n),
        )


def run(layers: Sequence[tuple[Layer, int]], session: Session) -> None:
    """Measure every layer and add its rows to the session's results, which are saved after each of them. Collective."""
    elements = max(sequence * max(layer.column_k, layer.row_n) for layer, sequence in layers)
    session.domain(elements * session.settings.dtype.itemsize)
    for number, (layer, sequence) in enumerate(layers):
        rows = measure_layer(layer, sequence, session)
        session.results.add(rows)
        times = ", ".join(f"{row['method']} {row['ms']:.3f} ms" for row in rows)
        session.world.say(f"[{number + 1}/{len(layers)}] {layer.name} s={sequence}: {times or 'no result'}")


def measure_layer(layer: Layer, sequence: int, session: Session) -> list[Row]:
    """Check, then time, every method and baseline of one layer."""
    settings, world, title = session.settings, session.world, f"{layer.name} s={sequence}"
    data, decoy = (Data.make(layer, sequence, world, settings.dtype, seed) for seed in (0, 99))
    makers: dict[str, Maker] = {method: partial(overlapped, settings, method, world) for method in settings.methods}
    makers |= {"megatron": partial(megatron, world), "async_tp": partial(async_tp, world)}
    calls: dict[str, Call] = {"gemms": six_gemms_alone(data, world)}
    references = references_of(data, world)
    for name, make in makers.items():
        problem = world.attempt(partial(check_linears, name, make, data, decoy, references))
        if problem is None:
            calls[name] = forward_backward(*make(data), data)
        else:
            session.results.note(f"{title}: {name}: {problem}", failure=name in settings.methods)
    if AUTO in calls and world.device.type == "cuda":
        add_graph(title, calls, references, session)
    timings = session.time(calls, layer.flops(sequence, world.size))
    forget_graphs(world.group)
    return [row(layer, sequence, name, timings, world.size) for name in (*settings.methods, GRAPH) if name in timings]


def add_graph(title: str, calls: dict[str, Call], references: dict[str, Reference], session: Session) -> None:
    """The call of `auto` once more, as a CUDA graph: what the GPU needs, whatever the host does meanwhile."""
    world = session.world
    problem = world.attempt(lambda: calls.update({GRAPH: captured(calls[AUTO], world)}))
    if problem is None:  # else the replays of those where it worked would wait for the others
        problem = world.attempt(lambda: check_replays(calls[GRAPH], references))
    if problem is not None:
        session.results.note(f"{title}: {GRAPH}: {problem}", failure=True)
        calls.pop(GRAPH, None)  # on some ranks it may have worked


def captured(call: Call, world: World) -> Call:
    """A call that has run before as a CUDA graph; its replays return what it returned."""
    call(0)
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog asks for events in a thread of its own, which a capture need not forbid.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"), graphed(world.group):
        outcome = cast(Outcome, call(0))

    def replay(index: int) -> Outcome:
        graph.replay()
        return outcome

    return replay


def check_replays(replay: Call, references: dict[str, Reference]) -> None:
    """Two of them: the second sends other epochs than the first."""
    replay(0)
    check_outcome(GRAPH, cast(Outcome, replay(1)), references)


def overlapped(settings: Settings, method: str, world: World, data: Data) -> tuple[Linear, Linear]:
    """Ours."""
    config = replace(settings.config, method=method)
    return (
        lambda x: all_gather_linear(x, data.w1, group=world.group, config=config),
        lambda h: linear_reduce_scatter(h, data.w2, group=world.group, config=config),
    )


def async_tp(world: World, data: Data) -> tuple[Linear, Linear]:
    return lambda x: AsyncColumn.apply(x, data.w1, world.group), lambda h: AsyncRow.apply(h, data.w2, world.group)


def megatron(world: World, data: Data) -> tuple[Linear, Linear]:
    """Megatron-Core's own linears on the same weights. Loaded by name: this package does not depend on Megatron."""
    if importlib.util.find_spec("megatron") is None:
        raise RuntimeError("megatron-core is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a page about what is not installed
        return importlib.import_module(MEGATRON_LINEARS).linears(data.w1, data.w2, world.group)


def forward_backward(column: Linear, row: Linear, data: Data) -> Call:
    """The call that is timed; returns an Outcome."""
    leaves, gradients = [data.x, data.w1, data.h, data.w2], [data.dy, data.dz]

    def call(index: int) -> Outcome:
        y, z = column(data.x), row(data.h)
        # In this thread: training wakes autograd's own thread, which takes 0.3 ms, once a step and not once a layer.
        with torch.autograd.set_multithreading_enabled(False):
            return (y.detach(), z.detach(), *torch.autograd.grad([y, z], leaves, gradients))

    return call


def six_gemms_alone(data: Data, world: World) -> Call:
    """The same products on data in place; z and dx are this rank's partial sums."""
    whole_x, whole_dz = gathered(data.x.detach(), world), gathered(data.dz, world)

    @torch.no_grad()
    def call(index: int) -> Outcome:
        y, z = whole_x @ data.w1.t(), data.h @ data.w2.t()
        dh, dw2 = whole_dz @ data.w2, whole_dz.t() @ data.h
        dx, dw1 = data.dy @ data.w1, data.dy.t() @ whole_x
        return y, z, dx, dw1, dh, dw2

    return call


@torch.no_grad()
def references_of(data: Data, world: World) -> dict[str, Reference]:
    whole_x, whole_dz = gathered(data.x, world), gathered(data.dz, world)
    return {
        "y": product_reference(whole_x, data.w1.t()),
        "z": scatter_reference(data.h, data.w2.t(), world.group),
        "dx": scatter_reference(data.dy, data.w1, world.group),
        "dw1": product_reference(data.dy.t(), whole_x),
        "dh": product_reference(whole_dz, data.w2),
        "dw2": product_reference(whole_dz.t(), data.h),
    }


def check_linears(name: str, make: Maker, data: Data, decoy: Data, references: dict[str, Reference]) -> None:
    """Run twice on other inputs, so that whatever is left in slots and freed memory is wrong, then check all results."""
    other = forward_backward(*make(decoy), decoy)
    for index in range(2):
        other(index)
    check_outcome(name, cast(Outcome, forward_backward(*make(data), data)(0)), references)


def check_outcome(name: str, outcome: Outcome, references: dict[str, Reference]) -> None:
    """Raises WrongResult."""
    check_timeouts()
    for result_name, result in zip(NAMES, outcome, strict=True):
        check(f"{name}: {result_name}", result, references[result_name])


def row(layer: Layer, sequence: int, method: str, timings: dict[str, Timing], world: int) -> Row:
    """One line of layers.json; times in milliseconds of one forward and backward, host_us in microseconds."""
    megatron, async_tp = timings.get("megatron"), timings.get("async_tp")
    return {
        "layer": layer.name, "world": world, "seq": sequence, "method": method, "ms": timings[method].ms,
        "megatron_ms": megatron and megatron.ms, "async_tp_ms": async_tp and async_tp.ms,
        "gemms_ms": timings["gemms"].ms, "host_us": timings[method].host_us,
    }  # fmt: skip
