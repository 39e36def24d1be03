"""What a rank of sixteen nodes of eight remembers from call to call.

Nothing runs: the rank enqueues its calls, in which nothing arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("greenlet")

from overlap_train.gpu.launch import Launch, LaunchCache
from overlap_train.group.slots import Layout
from overlap_train.nodes.slots import NodeCall
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import tag_of
from tests.protocol.simulated_nodes import NodeSimulation
from tests.protocol.simulated_ranks import Memory, SimulatedDomain, SimulatedHeap

NODES, LOCAL, CHUNKS, SLOTS = 16, 8, 4, 3
WORLD, RANK = NODES * LOCAL, 11  # a rank in the middle of its node
ROWS, TAG = 16, tag_of("call")
METHODS = ("chunked", "fused")
# What the caller has, [rows, columns], and the specification whose forward is the operator.
OPERATORS = {
    "gather": ((ROWS, ROWS), "ALL_GATHER_LINEAR"),
    "scatter": ((WORLD * ROWS, ROWS), "LINEAR_REDUCE_SCATTER"),
    "to_heads": ((ROWS, ROWS), "LINEAR_ALL_TO_ALL"),
    "to_rows": ((WORLD * ROWS, ROWS), "ALL_TO_ALL_LINEAR"),
}
Run = Callable[[], object]


def a_domain() -> SimulatedDomain:
    machine = NodeSimulation(WORLD, node_ranks=LOCAL, chunks=CHUNKS)
    layout = Layout(WORLD, WORLD * ROWS * ROWS * 4)
    machine.memory[RANK] = Memory()
    domain = machine.domain(Scheduler(0), SimulatedHeap(WORLD, layout), layout, RANK)
    domain.engine._blas = SimpleNamespace(sparing=lambda sms: nullcontext())
    return domain


def a_call(domain: SimulatedDomain, operator: str, method: str) -> Run:
    """Enqueues a call, of one plan."""
    (rows, columns), spec = OPERATORS[operator]
    x = torch.zeros(rows, columns)
    wide = operator == "to_heads", operator == "to_rows"
    b = torch.zeros(WORLD * ROWS if wide[1] else ROWS, WORLD * ROWS if wide[0] else ROWS)
    plan = domain.plan(method, x, b.t(), spec).fprop

    def run() -> None:
        with domain.operator(TAG, slots=1):
            if operator == "gather":
                plan.start(domain, TAG, x).matmul(b)
            elif operator == "scatter":
                plan.start(domain, TAG, x, b).finish()
            elif operator == "to_heads":
                plan.start(domain, TAG, x, b).received()
            else:
                blocks, y = x.unflatten(0, (WORLD, ROWS)), torch.empty(ROWS, ROWS)
                plan.start(domain, TAG, blocks).matmul(b, y)

    return run


def test_later_calls_pack_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they work out the way of a transfer again. Operators of all kinds, which share the calls of a slot."""
    domain, times, route = a_domain(), Counter[Hashable](), NodeCall._route

    def pack(cache: Any, launcher: Any, key: Hashable, values: tuple[int, ...], launch: Launch) -> None:
        times[key] += 1
        cache._packed.put(key, lambda values: None)

    def counted(call: Any, transfer: Any, tiles: int, pitch: int) -> Any:
        times[transfer] += 1
        return route(call, transfer, tiles, pitch)

    monkeypatch.setattr(LaunchCache, "_run_and_pack", pack)
    monkeypatch.setattr(NodeCall, "_route", counted)
    domain.workspace._waits.launcher = object()
    calls = [a_call(domain, operator, method) for operator in OPERATORS for method in METHODS]
    for _ in range(SLOTS):
        for call in calls:
            call()
    assert times.total() > 2 * 256, "more than a small group needs"
    times.clear()
    for _ in range(SLOTS):
        for call in calls:
            call()
    assert not times, times.most_common(3)
