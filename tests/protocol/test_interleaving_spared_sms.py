"""Products of GPUs across nodes leave the network its SMs: all that run beside an exchange do, and go back to all SMs afterwards.

NCCL's kernels hold SMs while they wait. A product that counts on these takes up to twice as long (gpu/blas.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("greenlet")

import overlap_train.linear  # before a fault is planted in what it imports
import overlap_train.ulysses.exchange  # noqa: F401
from tests.protocol.explore import Build, assert_passes
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import integers
from tests.protocol.simulated_blas import NETWORK_SMS, SMS
from tests.protocol.simulated_nodes import NodeSimulation
from tests.protocol.simulated_ranks import TILE, SimulatedDomain, core
from tests.protocol.test_interleaving_linear import mlp
from tests.protocol.test_interleaving_nodes import PROBLEMS
from tests.protocol.test_interleaving_parts import passes

PARTS = 3
LESS = SMS - NETWORK_SMS


def output_backward(machine: NodeSimulation, x_is: str = "sent again", wants_dx: bool = True) -> Build:
    """Of Ulysses' output projection, in parts: dw [TILE, W * TILE] = dy.T @ x. x_is: "sent again" or "kept"."""
    world = machine.world_size
    x, dy = integers(world, world, PARTS * TILE, TILE, seed=1), integers(world, PARTS * TILE, TILE, seed=2)
    w = integers(TILE, world * TILE, seed=3)
    received = x.permute(1, 2, 0, 3).flatten(2)  # [to, rows, W * TILE]

    def build(scheduler: Scheduler) -> Callable[[], None]:
        found: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}

        def host(domain: SimulatedDomain) -> None:
            rank = domain.rank
            planned = core("ops.plan_cache").Planned(
                domain, domain.plan("chunked", x[rank, :, :TILE].flatten(0, 1), w, "ALL_TO_ALL_LINEAR", main_grad="off")
            )
            parts = [
                core("ulysses.parts").Part(first, first + TILE, planned.linear("linear"))
                for first in range(0, PARTS * TILE, TILE)
            ]
            rows, dx = core("ulysses.exchange").RankRows, torch.full((world * PARTS * TILE, TILE), torch.nan)
            if x_is == "kept":
                given: Any = [x[:, rank, part.first : part.last].contiguous() for part in parts]
            else:
                given = rows(x[rank].flatten(0, 1), world, 1)
            backward = core("ulysses.exchange").Linear(tuple(parts), w, w, None, 1).rows_backward
            found[rank] = backward(given, dy[rank], rows(dx, world, 1) if wants_dx else None), dx

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            sent = (dy @ w).unflatten(2, (world, TILE)).permute(2, 0, 1, 3).flatten(1, 2)
            for rank, (dw, dx) in found.items():
                assert torch.equal(dw, dy[rank].t() @ received[rank]), f"dw of rank {rank}"
                assert not wants_dx or torch.equal(dx, sent[rank]), f"dx of rank {rank}"
            assert len(found) == world

        return check

    return build


OPERATORS: dict[str, Callable[[NodeSimulation], Build]] = {
    **{name: lambda machine, make=make: make("chunked", machine, 2) for name, make in PROBLEMS.items()},
    "column and row": lambda machine: mlp("chunked", machine, steps=1),
    "parts to rows": lambda machine: passes("chunked", machine),
    "backward of heads": lambda machine: passes("chunked", machine, backward=True),
    "backward of rows": output_backward,
    "backward of rows, x kept": partial(output_backward, x_is="kept"),
}


def sparing(machine: NodeSimulation, problem: Build, beside: list[int] | None = None) -> Build:
    """The problem, in which products have to spare SMs. beside: gets how many ran beside an exchange."""

    def build(scheduler: Scheduler) -> Callable[[], None]:
        right = problem(scheduler)

        def check() -> None:
            right()
            machine.blas.check()
            if beside is not None:
                beside.append(sum(product.beside for product in machine.blas.products))

        return check

    return build


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", OPERATORS)
def test_products_leave_the_network_its_sms(name: str, world: int) -> None:
    machine, beside = NodeSimulation(world, node_ranks=world // 2), []
    assert_passes(sparing(machine, OPERATORS[name](machine), beside), range(8 // world))
    assert any(beside), "no product ran beside an exchange, so nothing was shown"


WEIGHT_GRADIENTS: dict[str, tuple[Callable[[NodeSimulation], Build], list[int]]] = {
    "column and row, two microbatches": (OPERATORS["column and row"], [SMS, LESS] * 2),
    "column and row, x frozen": (lambda machine: mlp("chunked", machine, steps=1, wants_dx=False), [SMS] * 4),
    "backward of heads": (OPERATORS["backward of heads"], ([LESS] * 4 + [SMS]) * 2),
    "backward of rows": (OPERATORS["backward of rows"], [LESS] * PARTS),
    "backward of rows, x frozen": (partial(output_backward, wants_dx=False), [SMS] * PARTS),
    "backward of rows, x kept": (OPERATORS["backward of rows, x kept"], [LESS] * PARTS),
    "backward of rows, x kept and frozen": (
        partial(output_backward, x_is="kept", wants_dx=False), [SMS] * PARTS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHT_GRADIENTS)
def test_weight_gradients_spare_sms_only_while_something_crosses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row linear's, the last part's, and those without dx have all SMs."""
    make, expected = WEIGHT_GRADIENTS[name]
    assert of_weight_gradients(make, NodeSimulation(2), monkeypatch) == dict.fromkeys(range(2), expected)


@pytest.mark.parametrize(("puts", "spared"), [(False, NETWORK_SMS + 3), (True, 3)])
def test_they_spare_the_sms_of_sums_too(puts: bool, spared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVSHMEM needs none for itself."""
    machine = NodeSimulation(4, node_ranks=2, puts=puts, reduce_sms=3)
    found = of_weight_gradients(OPERATORS["column and row"], machine, monkeypatch)
    assert found == dict.fromkeys(range(4), [SMS, SMS - spared] * 2)


def of_weight_gradients(
    make: Callable[[NodeSimulation], Build], machine: NodeSimulation, monkeypatch: pytest.MonkeyPatch
) -> dict[int, list[int]]:
    """How many SMs each weight gradient counts on, by rank."""
    found: dict[int, list[int]] = defaultdict(list)
    gradient = core("ops.wgrad").WeightGradient
    add = gradient.add

    def noted(self: Any, dy: torch.Tensor, x: torch.Tensor) -> None:
        seen = len(machine.blas.products)
        add(self, dy, x)
        added = machine.blas.products[seen:]
        found[added[0].rank].append(added[0].sms)
        assert len({product.sms for product in added}) == 1

    monkeypatch.setattr(gradient, "add", noted)
    assert_passes(make(machine), range(1))
    return dict(found)
