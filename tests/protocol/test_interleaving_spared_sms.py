"""Products of GPUs across nodes leave the network its SMs: all that run beside an exchange do, and go back to all SMs afterwards.

NCCL's kernels hold SMs while they wait. A product that counts on these takes up to twice as long (gpu/driver.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("greenlet")

import overlap_train.linear  # before a fault is planted in what it imports
import overlap_train.ulysses.exchange  # noqa: F401
from tests.protocol.explore import Build, assert_passes
from tests.protocol.interleaving import Scheduler
from tests.protocol.simulated_blas import NETWORK_SMS, SMS
from tests.protocol.simulated_nodes import NodeSimulation
from tests.protocol.simulated_ranks import core
from tests.protocol.test_interleaving_linear import mlp
from tests.protocol.test_interleaving_nodes import PROBLEMS
from tests.protocol.test_interleaving_parts import passes

PARTS = 3
LESS = SMS - NETWORK_SMS


OPERATORS: dict[str, Callable[[NodeSimulation], Build]] = {
    **{name: lambda machine, make=make: make("chunked", machine, 2) for name, make in PROBLEMS.items()},
    "column and row": lambda machine: mlp("chunked", machine, steps=1),
    "parts to rows": lambda machine: passes("chunked", machine),
    "backward of heads": lambda machine: passes("chunked", machine, backward=True),
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


@pytest.mark.parametrize(("puts", "spared"), [(False, NETWORK_SMS + 3), (True, 3)])
def test_weight_gradients_spare_sms_only_while_something_crosses(
    puts: bool, spared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of sums, too; NVSHMEM needs none for itself. A row linear's weight gradient has all SMs."""
    machine, found = NodeSimulation(4, node_ranks=2, puts=puts, reduce_sms=3), defaultdict[int, list[int]](list)
    gradient = core("ops.wgrad").WeightGradient
    add = gradient.add

    def noted(self: Any, dy: torch.Tensor, x: torch.Tensor) -> None:
        seen = len(machine.blas.products)
        add(self, dy, x)
        (product,) = machine.blas.products[seen:]
        found[product.rank].append(product.sms)

    monkeypatch.setattr(gradient, "add", noted)
    assert_passes(OPERATORS["column and row"](machine), range(1))
    assert found == dict.fromkeys(range(4), [SMS, SMS - spared] * 2)
