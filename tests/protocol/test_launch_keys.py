"""Launches that a call remembers under one key differ in nothing that Triton compiles a kernel for, such as alignment.

Nothing is launched: each place that launches a kernel again with other addresses is asked what it would, with each operand on 16
bytes and between two words of 16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("greenlet")

from overlap_train.gpu.launch import Launch, LaunchCache
from overlap_train.gpu.ptx_check import kinds
from overlap_train.kernels.low_latency import UNALIGNED
from overlap_train.nodes.engines import add_blocks
from overlap_train.ops import gemm_rs as gemm_reduce_scatter
from overlap_train.ops import launch as persistent
from overlap_train.ops import low_latency
from overlap_train.ops.ag_gemm import LowLatencyAllGatherGemm
from overlap_train.ops.gemm_rs import LowLatencyGemmReduceScatter
from overlap_train.ops.launch import GatherOperands, ScatterOperands
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import tag_of
from tests.protocol.simulated_nodes import NodeSimulation
from tests.protocol.simulated_ranks import SLOT_BYTES, Memory, SimulatedDomain, SimulatedHeap, Simulation, core

ROWS, COLUMNS, WORLD = 8, 16, 2
BF16, FP32 = torch.bfloat16, torch.float32
TAG = tag_of("call")

Make = Callable[..., torch.Tensor]  # of a shape: an operand, aligned or not
Site = Callable[[SimulatedDomain, Make], None]


def a_domain(machine: Simulation) -> SimulatedDomain:
    """Rank 0 of a machine that does not run. All its calls take one slot."""
    layout = core("group.slots").Layout(WORLD, SLOT_BYTES, 2 * SLOT_BYTES)
    machine.memory[0] = Memory()
    domain = machine.domain(Scheduler(0), SimulatedHeap(WORLD, layout), layout, 0)
    domain.on_gpu = True  # sums are kernels
    domain.workspace.begin(TAG, 1, False)
    open_once = functools.cache(domain.workspace.open)
    domain.workspace.open = lambda shape, dtype, tag: open_once(shape, dtype, tag)
    return domain


def a_call(domain: SimulatedDomain) -> Any:
    return domain.workspace.open(torch.Size((ROWS, COLUMNS)), FP32, TAG)


def gather(domain: SimulatedDomain, make: Make) -> None:
    own, w, y = make(ROWS, COLUMNS), make(COLUMNS, COLUMNS), make(WORLD * ROWS, COLUMNS)
    plan = domain.plan("fused", own, w).fprop
    persistent.receive_and_multiply(domain, a_call(domain), plan, GatherOperands(own, w, y, False))


def exchange(domain: SimulatedDomain, make: Make) -> None:
    own, w, y = make(WORLD, ROWS, COLUMNS), make(WORLD * COLUMNS, COLUMNS), make(ROWS, COLUMNS)
    plan = domain.plan("fused", own.flatten(0, 1), w.t(), "ALL_TO_ALL_LINEAR").fprop
    persistent.receive_and_multiply(domain, a_call(domain), plan, GatherOperands(own, w, y, False))


def scatter(domain: SimulatedDomain, make: Make) -> None:
    a, w = make(WORLD * ROWS, COLUMNS), make(COLUMNS, COLUMNS)
    operands = ScatterOperands(a, w, make(WORLD, ROWS, COLUMNS), make(ROWS, COLUMNS))
    plan = domain.plan("fused", a, w, "LINEAR_REDUCE_SCATTER").fprop
    persistent.multiply_and_send(domain, a_call(domain), plan, operands)


def reduction(domain: SimulatedDomain, make: Make) -> None:
    gemm_reduce_scatter.reduce_partials(domain, a_call(domain), make(ROWS, COLUMNS))


def node_sum(domain: SimulatedDomain, make: Make) -> None:
    call = a_call(domain)
    add_blocks(call, make(ROWS, COLUMNS), call.blocks, [1], make(ROWS, COLUMNS))


def receiving(domain: SimulatedDomain, make: Make) -> None:
    domain.workspace._waits.receive_on_stream(a_call(domain), make(ROWS, COLUMNS))


def few_gathered(domain: SimulatedDomain, make: Make) -> None:
    low_latency.gather(domain, TAG, make(ROWS, COLUMNS, dtype=BF16), sm_margin=0)


def few_scattered(domain: SimulatedDomain, make: Make) -> None:
    low_latency.scatter(domain, TAG, make(WORLD * ROWS, COLUMNS, dtype=BF16), sm_margin=0)


# By kernel: who launches it, and how many operands the caller gives. (Whatever else is written is new memory: aligned.)
SITES: dict[str, tuple[Site, int]] = {
    "all_gather_gemm_kernel": (gather, 3),
    "all_to_all_gemm_kernel": (exchange, 3),
    "gemm_reduce_scatter_kernel": (scatter, 4),
    "reduce_partials_kernel": (reduction, 1),
    "add_blocks_kernel": (node_sum, 2),
    "wait_and_keep_kernel": (receiving, 1),
    "low_latency_gather_kernel": (few_gathered, 1),
    "low_latency_scatter_kernel": (few_scattered, 1),
}


def making(unaligned: int | None) -> Make:
    """Makes operands, all but the n-th of them on 16 bytes; that lies an element further."""
    made = 0

    def make(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        nonlocal made
        first = int(made == unaligned)
        made += 1
        return torch.zeros(torch.Size(shape).numel() + 1, dtype=dtype)[first:][: torch.Size(shape).numel()].view(shape)

    return make


def compiled_for(launch: Launch) -> Hashable:
    """What a launch's kernel is compiled for, and what it is told for good."""
    unaligned = UNALIGNED if launch.kernel.fn.__name__.startswith("low_latency") else ()
    replaced = {name for names in launch.replaced for name in names}
    values = {name: value for name, value in launch.arguments.items() if isinstance(value, torch.Tensor)}
    seen = {name: value.dtype if name in unaligned else kinds({name: value}, {}) for name, value in values.items()}
    kept = {name: value.data_ptr() for name, value in values.items() if name not in replaced}
    return tuple(seen.items()), tuple(kept.items())


@pytest.mark.parametrize("name", SITES)
def test_launches_of_one_key_are_compiled_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site, operands = SITES[name]
    found: dict[Hashable, set[Hashable]] = {}

    def run(cache: Any, key: Hashable, values: tuple[int, ...], describe: Callable[[], Launch]) -> None:
        launch = describe()
        assert len(values) == len(launch.replaced)
        if launch.kernel.fn.__name__ == name:
            found.setdefault(key, set()).add(compiled_for(launch))

    monkeypatch.setattr(LaunchCache, "run", run)
    machine = NodeSimulation(WORLD) if site is node_sum else Simulation(WORLD, device_waits=True)
    domain = a_domain(machine)
    for unaligned in (None, *range(operands)):
        site(domain, making(unaligned))
    assert all(len(binaries) == 1 for binaries in found.values()), "one key, several binaries"
    assert len(set().union(*found.values())) == operands + 1, "every operand was aligned once, and once was not"


def test_few_rows_leave_the_sms_of_an_exchange_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """TP x Ulysses, of which Ulysses spans nodes: CTAs that wait for a peer would hold the SMs that NCCL's are to find."""
    found: list[tuple[Hashable, tuple[int]]] = []

    def run(cache: Any, key: Hashable, values: tuple[int, ...], describe: Callable[[], Launch]) -> None:
        found.append((key, describe().grid))

    monkeypatch.setattr(LaunchCache, "run", run)
    monkeypatch.setattr(low_latency, "grid_size", lambda programs, device, sm_margin: (132 - sm_margin,))
    make, domain = making(None), a_domain(Simulation(WORLD))
    for sm_margin in (0, 5):
        plan: Any = SimpleNamespace(sm_margin=sm_margin)
        LowLatencyAllGatherGemm(domain, plan, TAG, make(ROWS, COLUMNS))
        scatter = LowLatencyGemmReduceScatter(domain, plan, TAG, make(WORLD * ROWS, COLUMNS), make(COLUMNS, COLUMNS))
        scatter.finish()
    keys, grids = zip(*found, strict=True)
    assert grids == ((132,), (132,), (127,), (127,)) and len(set(keys)) == 4
