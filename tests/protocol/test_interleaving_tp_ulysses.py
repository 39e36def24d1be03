"""TP x Ulysses on simulated GPUs: products of one group under exchanges of another, right under seeded schedules, with one
hardware queue and with many.

What is sent is overwritten two exchanges later, as a caching allocator would give it to others when its operator has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("greenlet")

from tests.protocol.explore import Build, assert_passes
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import integers
from tests.protocol.simulated_grid import GridRank, GridSimulation
from tests.protocol.simulated_ranks import TILE, core
from tests.protocol.test_interleaving_leaving import without_room
from tests.protocol.test_interleaving_spared_sms import sparing

PARTS = 4  # more than there are slots


class Blocks:
    """Blocks [W, rows, C] of each part, given and taken."""

    def __init__(self, blocks: list[torch.Tensor]) -> None:
        self._blocks, self.taken = blocks, {}

    def give(self, part: Any) -> torch.Tensor:
        return self._blocks[part.first // TILE].clone()

    def take(self, part: Any, received: torch.Tensor) -> None:
        self.taken[part.first // TILE] = received.clone()


def problem(which: str, machine: GridSimulation, method: str = "chunked") -> Build:
    """Two calls of one pass after each other. Of rank t + 2 r: x or dy [PARTS, rows of t, TILE], w of t, blocks to each rank."""
    ranks = machine.world_size // 2  # of Ulysses
    rows = integers(2, ranks, PARTS, TILE, TILE, seed=1)  # [t, r, part, ...]: of a TP rank's shard
    # [t, from, to, part, rows of both TP ranks, columns]
    blocks = integers(2, ranks, ranks, PARTS, 2 * TILE, TILE // ranks, seed=2)
    w = integers(2, TILE, TILE, seed=3)  # of a TP rank: [N, K]

    def build(scheduler: Scheduler) -> Callable[[], None]:
        results: dict[tuple[int, int], list[torch.Tensor]] = {}

        def host(rank: GridRank) -> None:
            t, r = rank.tensor.rank, rank.ulysses.rank
            linear, mine = _linear(rank, w[t], method), rows[t, r].flatten(0, 1)
            for number in range(2):
                given = Blocks(list(blocks[t, r].transpose(0, 1)))
                results[number, rank.rank] = PASSES[which](linear, mine, given)

        machine.spawn_grid(scheduler, host)
        scheduler.patch(core("ulysses.parts").Step, "start", _overwriting(core("ulysses.parts").Step.start))

        def check() -> None:
            assert len(results) == 2 * machine.world_size
            for (number, rank), found in results.items():
                right = RIGHT[which](rows, blocks, w, rank % 2, rank // 2)
                same = [torch.equal(a, b) for a, b in zip(found, right, strict=True)]
                assert all(same), f"call {number}, rank {rank}: {same}"

        return check

    return build


def _overwriting(start: Callable[..., Any]) -> Callable[..., Any]:
    """Of each group's rank what it has sent, all of which stays allocated: simulated copies go by address."""
    sent_by: dict[int, list[torch.Tensor]] = {}

    def started(step: Any, sent: torch.Tensor) -> Any:
        earlier = sent_by.setdefault(id(step.domain), [])
        if len(earlier) > 1:
            earlier[-2].fill_(torch.nan)
        earlier.append(sent)
        return start(step, sent)

    return started


def _linear(rank: GridRank, w: torch.Tensor, method: str) -> Any:
    """As two_groups.py plans it. method: of the products."""
    plan_book, two_groups, parts_of = core("ops.planned"), core("ulysses.two_groups"), core("ulysses.parts")
    shard, both = w.new_empty(TILE, TILE), w.new_empty(2 * TILE, TILE)
    of_all = w.new_empty(rank.ulysses.world_size * 2 * TILE, TILE)
    settings: dict[str, Any] = dict(main_grad="off")
    column = plan_book.Planned(rank.tensor, rank.tensor.plan(method, shard, w, "ALL_GATHER_LINEAR", **settings))
    row = plan_book.Planned(rank.tensor, rank.tensor.plan(method, both, w, "LINEAR_REDUCE_SCATTER", **settings))
    exchanged = plan_book.Planned(rank.ulysses, rank.ulysses.plan("chunked", of_all, w, "ALL_TO_ALL", **settings))

    def linear(planned: Any) -> Any:
        product = planned.beside(exchanged.plan.fprop.sm_margin).linear("linear")
        parts = tuple(
            parts_of.Part(first, first + TILE, exchanged.linear("linear"), product)
            for first in range(0, PARTS * TILE, TILE)
        )
        return two_groups.ShardedLinear(parts, w, w, None, 1)

    return {"column": linear(column), "row": linear(row)}


def _to_heads(linear: Any, x: torch.Tensor, kept: Blocks) -> list[torch.Tensor]:
    linear["column"].to_heads(x, kept)
    return [kept.taken[part] for part in range(PARTS)]


def _heads_backward(linear: Any, x: torch.Tensor, kept: Blocks) -> list[torch.Tensor]:
    return list(linear["column"].heads_backward(x, kept, True))


def _to_rows(linear: Any, x: torch.Tensor, kept: Blocks) -> list[torch.Tensor]:
    return [linear["row"].to_rows(kept, False)[0]]


def _rows_backward(linear: Any, dy: torch.Tensor, kept: Blocks) -> list[torch.Tensor]:
    dw = linear["row"].rows_backward(kept, dy, kept)
    return [dw, *(kept.taken[part] for part in range(PARTS))]


PASSES = {
    "to_heads": _to_heads,
    "heads_backward": _heads_backward,
    "to_rows": _to_rows,
    "rows_backward": _rows_backward,
}

Right = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int], list[torch.Tensor]]


def _gathered(rows: torch.Tensor, r: int, part: int) -> torch.Tensor:
    """[2 TILE, TILE], of both tensor-parallel ranks."""
    return rows[:, r, part].flatten(0, 1)


def _received(blocks: torch.Tensor, t: int, r: int, part: int) -> torch.Tensor:
    """[2 TILE, TILE]: both ranks' columns, side by side."""
    return torch.cat(list(blocks[t, :, r, part]), dim=1)


def _sent(product: torch.Tensor, to: int, ranks: int) -> torch.Tensor:
    return product.chunk(ranks, 1)[to]


def _right_to_heads(rows: torch.Tensor, blocks: torch.Tensor, w: torch.Tensor, t: int, r: int) -> list[torch.Tensor]:
    ranks = rows.shape[1]
    return [
        torch.stack([_sent(_gathered(rows, s, part) @ w[t].t(), r, ranks) for s in range(ranks)])
        for part in range(PARTS)
    ]


def _right_heads_backward(
    rows: torch.Tensor, blocks: torch.Tensor, w: torch.Tensor, t: int, r: int
) -> list[torch.Tensor]:
    dx = [sum(_received(blocks, u, r, part) @ w[u] for u in range(2)).chunk(2)[t] for part in range(PARTS)]
    dw = sum(_received(blocks, t, r, part).t() @ _gathered(rows, r, part) for part in range(PARTS))
    return [torch.cat(dx), dw]


def _right_to_rows(rows: torch.Tensor, blocks: torch.Tensor, w: torch.Tensor, t: int, r: int) -> list[torch.Tensor]:
    y = [sum(_received(blocks, u, r, part) @ w[u].t() for u in range(2)).chunk(2)[t] for part in range(PARTS)]
    return [torch.cat(y)]


def _right_rows_backward(
    rows: torch.Tensor, blocks: torch.Tensor, w: torch.Tensor, t: int, r: int
) -> list[torch.Tensor]:
    dw = sum(_gathered(rows, r, part).t() @ _received(blocks, t, r, part) for part in range(PARTS))
    ranks = rows.shape[1]
    dx = [
        torch.stack([_sent(_gathered(rows, s, part) @ w[t], r, ranks) for s in range(ranks)]) for part in range(PARTS)
    ]
    return [dw, *dx]


RIGHT: dict[str, Right] = {
    "to_heads": _right_to_heads,
    "heads_backward": _right_heads_backward,
    "to_rows": _right_to_rows,
    "rows_backward": _right_rows_backward,
}


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("which", PASSES)
def test_passes_of_two_groups(which: str, one_queue: bool) -> None:
    assert_passes(problem(which, GridSimulation(one_queue=one_queue)), range(2))


@pytest.mark.parametrize(
    ("world", "node_ranks", "puts", "one_queue"), [(4, 1, False, False), (4, 1, True, True), (8, 2, False, True)]
)
@pytest.mark.parametrize("which", PASSES)
def test_ulysses_across_nodes(which: str, world: int, node_ranks: int, puts: bool, one_queue: bool) -> None:
    """Products leave NCCL its SMs. NVSHMEM needs none."""
    machine, beside = GridSimulation(world, one_queue=one_queue, node_ranks=node_ranks, puts=puts), []
    build = problem(which, machine)
    assert_passes(build if puts else sparing(machine, build, beside), range(8 // world))
    assert puts or any(beside), "no product ran beside an exchange, so nothing was shown"


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("which", PASSES)
def test_products_by_kernels_with_one_resident_cta(which: str, one_queue: bool) -> None:
    """A product's kernel holds the GPU while it waits for its own group, and the other group's copies go on."""
    assert_passes(problem(which, GridSimulation(one_queue=one_queue), "fused"), range(1), resident=1)


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("which", PASSES)
def test_kernels_that_take_the_sms_of_the_network(which: str, one_queue: bool) -> None:
    """Across nodes an exchange may find SMs only when the product beside it has ended: that product does not need it."""
    machine = GridSimulation(node_ranks=1, one_queue=one_queue)
    assert_passes(without_room(problem(which, machine, "fused")), range(1))
