"""The layer benchmark: forward and backward of one column and one row linear with sequence parallelism.

    y = column(x)  x [s/W, K1], w1 [N1/W, K1] -> [s, N1/W]        z = row(h)  h [s, K2/W], w2 [N2, K2/W] -> [s/W, N2]

h and both output gradients are given: what a model computes between the two linears is not part of the figure.
Gradients of x, w1, h and w2 are taken by autograd, the row linear's first, and returned in the dtype of the weights.

Beside ours are Megatron-Core's linears, PyTorch's async-TP and TransformerEngine's linears:

    te          NCCL, nothing overlapped
    te_default  userbuffers as they come: gathers by ring exchange, the forward scatter in a pipeline, the backward's in bulk
    te_ring     userbuffers with every scatter by ring exchange, too

A process has one set of userbuffers, of one shape [s, hidden]. The set has a communicator for each product of a transformer, by
name, and each can be told how to work. So one set has both configurations: linears called fc1 and fc2 run by default, qkv and
proj by ring exchange.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from ...group.registry import check as check_timeouts
from ...group.registry import forget_graphs, graphed
from ...linear import all_gather_linear, linear_reduce_scatter
from ...select import table
from ..measure.check import Reference, check, product_reference, scatter_reference
from ..measure.operands import gathered
from ..measure.results import Row
from ..measure.runs import Session, Settings
from ..measure.shapes import Layer
from ..measure.timing import Call, Timing
from ..measure.world import World
from . import transformer_engine
from .async_tp import AsyncColumn, AsyncRow

Linear = Callable[[torch.Tensor], torch.Tensor]
Outcome = tuple[torch.Tensor, ...]  # y, z, dx, dw1, dh, dw2
Maker = Callable[["Data"], tuple[Linear, Linear]]  # linears with the weights of the data
NAMES = ("y", "z", "dx", "dw1", "dh", "dw2")


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
    """The call of a layer's six GEMMs without communication, on data in place; z and dx are this rank's partial sums."""
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


Flags = dict[str, Any]
USERBUFFERS = ("te_default", "te_ring")
_ROW: Flags = {"ub_overlap_ag": True, "ub_overlap_rs": True}
# What the column and the row linear are told; the order of USERBUFFERS
_FLAGS: dict[str, tuple[Flags, Flags]] = {
    "te_default": (
        {"ub_overlap_ag": True, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True, "ub_name": "fc1"},
        {**_ROW, "ub_name": "fc2"},
    ),
    "te_ring": (
        {"ub_overlap_ag": True, "ub_overlap_rs_dgrad": True, "ub_name": "qkv"},
        {**_ROW, "ub_name": "proj"},
    ),
}


@contextmanager
def te_userbuffers(te: Any, layer: Layer, sequence: int, world: World, dtype: torch.dtype) -> Iterator[str | None]:
    """Buffers for one layer, given back at the end; yields what went wrong, or None. Collective.

    All GPUs must be idle before buffers go, and all ranks must have let go before others are made: peers map them.
    """
    problem = world.attempt(partial(_initialise, te, layer, sequence, world.size, dtype))
    yield problem
    gc.collect()  # whoever outlives the others would close the communicator of the next layer
    _idle(world)
    te.destroy_ub()
    _idle(world)


def _initialise(te: Any, layer: Layer, sequence: int, ranks: int, dtype: torch.dtype) -> None:
    if layer.column_k != layer.row_n:
        raise RuntimeError(
            f"userbuffers have one shape, and this layer has {layer.column_k} and {layer.row_n} features"
        )
    ring = {"method": "ring_exchange", "num_sm": 1, "cga_size": 1, "set_sm_margin": False, "num_splits": ranks}
    te.initialize_ub(
        [sequence, layer.column_k], ranks, quantization_modes=[te.UserBufferQuantizationMode.NONE], dtype=dtype,
        ub_cfgs={"qkv_dgrad": dict(ring), "proj_fprop": dict(ring)}, bootstrap_backend=dist.get_backend(),
    )  # fmt: skip


def _idle(world: World) -> None:
    world.synchronize()
    dist.barrier(world.group)
    world.synchronize()


def te_makers(te: Any, world: World, with_userbuffers: bool) -> dict[str, Maker]:
    """What makes TransformerEngine's linears, by the names above."""
    found: dict[str, Maker] = {"te": partial(_te_linears, te, world, ({}, {}))}
    if with_userbuffers:
        found |= {name: partial(_te_linears, te, world, _FLAGS[name]) for name in USERBUFFERS}
    return found


def _te_linears(te: Any, world: World, flags: tuple[Flags, Flags], data: Data) -> tuple[Linear, Linear]:
    common: Flags = dict(
        bias=False, sequence_parallel=True, tp_group=world.group, tp_size=world.size, params_dtype=data.w1.dtype,
        device=world.device,
    )  # fmt: skip
    (n1, k1), (n2, k2) = data.w1.shape, data.w2.shape
    column = te.Linear(k1, n1 * world.size, parallel_mode="column", **common, **flags[0])
    row = te.Linear(k2 * world.size, n2, parallel_mode="row", **common, **flags[1])
    column.weight, row.weight = data.w1, data.w2
    return column, row


AUTO, GRAPH, TUNED = "auto", "auto_graph", "tuned"
BASELINES = ("megatron", "async_tp", "te")
MEGATRON_LINEARS = "overlap_train.integrations.megatron.bench_baseline"


def run(layers: Sequence[tuple[Layer, int]], session: Session, tuned: str = "") -> None:
    """Measure every layer and add its rows to the session's results, which are saved after each of them. Collective.

    tuned: a folder of winners, by which `auto` is measured once more.
    """
    by_winners = {TUNED: tuned_auto(session, tuned)} if tuned else {}
    elements = max(sequence * max(layer.column_k, layer.row_n) for layer, sequence in layers)
    session.domain([elements * session.settings.dtype.itemsize])
    for number, (layer, sequence) in enumerate(layers):
        rows = measure_layer(layer, sequence, session, by_winners)
        session.world.say(f"[{number + 1}/{len(layers)}] {layer.name} s={sequence}: {session.results.outcome(rows)}")


def measure_layer(layer: Layer, sequence: int, session: Session, more: Mapping[str, Maker]) -> list[Row]:
    """Check, then time, every method and baseline of one layer, and `more`; its rows, which are saved."""
    settings, world = session.settings, session.world
    data, decoy = (Data.make(layer, sequence, world, settings.dtype, seed) for seed in (0, 99))
    case = Checked(f"{layer.name} s={sequence}", data, decoy, references_of(data, world), session)
    makers: dict[str, Maker] = {method: partial(overlapped, settings, method, world) for method in settings.methods}
    makers |= {"megatron": partial(megatron, world), "async_tp": partial(async_tp, world), **more}
    calls = {"gemms": six_gemms_alone(data, world)} | case.calls(makers)
    if AUTO in calls and world.device.type == "cuda":
        add_graph(case, calls)
    began = time.monotonic()
    rows = rows_of(layer, sequence, calls, session)
    session.results.add(rows)
    took = time.monotonic() - began
    if rows and (te := transformer_engine.load(session)):
        with transformer_engine.limited(took):
            rows = with_te(te, layer, sequence, calls, case)
    forget_graphs(world.group)
    return rows


@dataclass(frozen=True)
class Checked:
    """One layer: its data, other data, and what the results must be."""

    title: str
    data: Data
    decoy: Data
    references: dict[str, Reference]
    session: Session

    def calls(self, makers: Mapping[str, Maker]) -> dict[str, Call]:
        """The calls of those linears that compute the right results on every rank; the results get notes about the others.
        Collective."""
        results, found = self.session.results, {}
        for name, make in makers.items():
            check = partial(check_linears, name, make, self.data, self.decoy, self.references)
            problem = self.session.world.attempt(check)
            if problem is None:
                found[name] = forward_backward(*make(self.data), self.data)
            else:
                results.note(f"{self.title}: {name}: {problem}", failure=name in self.session.settings.methods)
        return found


def rows_of(layer: Layer, sequence: int, calls: Mapping[str, Call], session: Session) -> list[Row]:
    """All calls in turns; a row for each method of ours."""
    world, timings = session.world, session.time(calls, layer.flops(sequence, session.world.size))
    names = (*session.settings.methods, GRAPH)
    return [row(layer, sequence, name, timings, world.size) for name in names if name in timings]


def with_te(te: Any, layer: Layer, sequence: int, calls: Mapping[str, Call], case: Checked) -> list[Row]:
    """The rows of all calls once more, with TransformerEngine's linears among them; saved instead of those of before."""
    session = case.session
    with te_userbuffers(te, layer, sequence, session.world, session.settings.dtype) as problem:
        if problem is not None:
            session.results.note(f"{case.title}: te_userbuffers: {problem}", failure=False)
        baselines = case.calls(te_makers(te, session.world, with_userbuffers=problem is None))
        rows = rows_of(layer, sequence, {**calls, **baselines}, session)
    session.results.revise(rows)
    return rows


def add_graph(case: Checked, calls: dict[str, Call]) -> None:
    """The call of `auto` once more, as a CUDA graph: what the GPU needs, whatever the host does meanwhile."""
    world = case.session.world
    problem = world.attempt(lambda: calls.update({GRAPH: captured(calls[AUTO], world)}))
    if problem is None:  # else the replays of those where it worked would wait for the others
        problem = world.attempt(lambda: check_replays(calls[GRAPH], case.references))
    if problem is not None:
        case.session.results.note(f"{case.title}: {GRAPH}: {problem}", failure=True)
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
    """Replay a captured call twice and check the second result: its replay sends other epochs than the first."""
    replay(0)
    check_outcome(GRAPH, cast(Outcome, replay(1)), references)


def overlapped(settings: Settings, method: str, world: World, data: Data) -> tuple[Linear, Linear]:
    """A layer's column and row linear by one of our methods."""
    config = replace(settings.config, method=method)
    return (
        lambda x: all_gather_linear(x, data.w1, group=world.group, config=config),
        lambda h: linear_reduce_scatter(h, data.w2, group=world.group, config=config),
    )


def tuned_auto(session: Session, folder: str) -> Maker:
    """`auto` by the winners in a folder. In a group of its own: all calls of a group go by one table. Collective.

    Raises:
        ValueError: on every rank, if rank 0 finds none there.
    """
    settings, world = session.settings, session.world
    has_none = world.rank == 0 and not table.read(folder, table.key_of(world.device, world.size)).winners
    if world.any(has_none):
        raise ValueError(
            f"--tuned {folder}: rank 0 finds no winners there of this GPU, {world.size} ranks and these versions; run "
            f"overlap-train tune --tuning-dir {folder} first"
        )
    by_winners = replace(settings, config=replace(settings.config, tuning_dir=folder))
    return partial(overlapped, by_winners, AUTO, replace(world, group=dist.new_group()))


def async_tp(world: World, data: Data) -> tuple[Linear, Linear]:
    return lambda x: AsyncColumn.apply(x, data.w1, world.group), lambda h: AsyncRow.apply(h, data.w2, world.group)


def megatron(world: World, data: Data) -> tuple[Linear, Linear]:
    """Megatron-Core's own linears on the same weights. Loaded by name: this package does not depend on Megatron."""
    if importlib.util.find_spec("megatron") is None:
        raise RuntimeError("megatron-core is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a page about what is not installed
        return importlib.import_module(MEGATRON_LINEARS).linears(data.w1, data.w2, world.group)


def row(layer: Layer, sequence: int, method: str, timings: Mapping[str, Timing], world: int) -> Row:
    """One line of layers.json; times in milliseconds of one forward and backward, host_us in microseconds."""
    baselines = {name: timings[name].ms for name in (*BASELINES, *USERBUFFERS) if name in timings}
    tuned = timings.get(TUNED)
    userbuffers = [baselines[name] for name in USERBUFFERS if name in baselines]
    return {
        "layer": layer.name, "world": world, "seq": sequence, "method": method, "ms": timings[method].ms,
        "tuned_ms": tuned and tuned.ms,
        **{f"{name}_ms": baselines.get(name) for name in BASELINES}, "te_userbuffers_ms": min(userbuffers, default=None),
        "gemms_ms": timings["gemms"].ms, "host_us": timings[method].host_us,
    }  # fmt: skip
