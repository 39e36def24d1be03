"""Time as an adversary: delays on the copy stream and on single ranks, many steps, two models, two streams, a silent peer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from overlap_train import OverlapConfig, OverlapTimeoutError, all_gather_linear, linear_reduce_scatter
from overlap_train.group.copy_engine import Route, StreamCopyEngine
from overlap_train.group.registry import domain_of
from tests.linear_cases import OPERATORS, Case

MILLISECOND = 1_800_000  # cycles


class Layer:
    """One column and one row linear with fresh integer inputs each step; counts wrong elements on the device."""

    def __init__(self, case: Case, seed: int, k: int = 384, n_shard: int = 256) -> None:
        self.case = case
        w = case.integers(n_shard * case.world, k, seed=seed)
        self.w_full = w.float()
        self.column, self.row = case.mine(w, 0), case.mine(w.t().contiguous(), 1)
        self.wrong = torch.zeros((), device=case.device, dtype=torch.int64)

    def step(self, number: int) -> None:
        case, config = self.case, self.case.config
        generator = torch.Generator(case.device).manual_seed(number)
        x = torch.randint(
            -1, 2, (128 * case.world, self.w_full.shape[1]), generator=generator, device=case.device
        ).float()
        x_shard = x.chunk(case.world)[case.rank].to(case.dtype).requires_grad_()
        y = all_gather_linear(x_shard, self.column, group=case.group, config=config)
        exact_y = (x @ self.w_full.t()).chunk(case.world, 1)[case.rank]
        self.wrong += (y != exact_y.to(y.dtype)).sum()
        sign = torch.sign(y.detach()).requires_grad_()
        z = linear_reduce_scatter(sign, self.row, group=case.group, config=config)
        exact_z = torch.sign(x @ self.w_full.t()) @ self.w_full
        shard = exact_z.chunk(case.world)[case.rank]
        self.wrong += ((z.float() - shard).abs() > shard.abs() * 2**-7 + 2).sum()
        y.backward(sign.detach())
        assert x_shard.grad is not None
        self.wrong += ((x_shard.grad.float() - shard).abs() > shard.abs() * 2**-7 + 2).sum()


def finish(*layers: Layer) -> None:
    for layer in layers:
        assert layer.wrong.item() == 0
    dist.barrier(layers[0].case.group)


def test_500_steps_back_to_back(case: Case) -> None:
    layer = Layer(case, seed=1)
    for number in range(500):
        layer.step(number)
    finish(layer)


def test_late_copies(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy of one rank starts late, so that waits have to hold."""
    domain = domain_of(case.group, case.config, case.device)
    engine = domain.engine
    assert isinstance(engine, StreamCopyEngine)
    enqueue = engine._enqueue

    def late(source: torch.Tensor, routes: list[Route]) -> None:
        with torch.cuda.stream(engine.stream):
            torch.cuda._sleep(3 * MILLISECOND)
        enqueue(source, routes)

    layer = Layer(case, seed=2)
    layer.step(0)
    for slow_rank in range(case.world):
        with monkeypatch.context() as patch:
            if case.rank == slow_rank:
                patch.setattr(engine, "_enqueue", late)
            for number in range(6):
                layer.step(number)
    finish(layer)


def test_one_slow_rank(case: Case) -> None:
    layer = Layer(case, seed=3)
    for slow_rank in range(case.world):
        for number in range(6):
            if case.rank == slow_rank:
                torch.cuda._sleep(5 * MILLISECOND)
            layer.step(number)
    finish(layer)


def test_growing_shapes_reallocate_the_heap(case: Case) -> None:
    for size in (64, 640, 1280):
        for _ in range(2):  # so that slots are used again
            OPERATORS["column"](case, (size, 1), 128, 64)
            OPERATORS["row"](case, (size, 1), 64, 128)
            OPERATORS["to_heads"](case, (size, 1), 64, 128)
            OPERATORS["to_rows"](case, (size, 1), 128, 64)


def test_busy_sms_of_another_group(case: Case) -> None:
    """Other kernels hold SMs on one rank while ours wait for a peer: nothing depends on all CTAs being resident (rule 4)."""
    layer = Layer(case, seed=6, k=2048, n_shard=2048)
    side = torch.cuda.Stream(case.device)
    reduced = torch.zeros(1 << 24, device=case.device)
    everyone = dist.group.WORLD
    for number in range(20):
        with torch.cuda.stream(side):
            work = dist.all_reduce(reduced, group=everyone, async_op=True)
        if case.rank == number % case.world:
            torch.cuda._sleep(2 * MILLISECOND)
        layer.step(number)
        work.wait()
    finish(layer)


@pytest.mark.parametrize("method", ["fused", "direct", "low_latency", "chunked"])
def test_a_silent_peer_is_named(group: dist.ProcessGroup, device: torch.device, method: str) -> None:
    """The last rank signals nobody: all others raise the time-out error with its name, and nothing hangs."""
    size = dist.get_world_size(group)
    everyone: list[list[int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dist.get_process_group_ranks(group))
    fresh = None
    for ranks in sorted({tuple(r) for r in everyone if r is not None}):
        made = dist.new_group(list(ranks))
        fresh = made if dist.get_rank() in ranks else fresh
    assert fresh is not None
    # Ranks of a GPU take turns: 2 s were too few for four.
    sharing = max(1, dist.get_world_size() // torch.cuda.device_count())
    config = OverlapConfig(method=method, provider="torch", timeout_s=2.0 * sharing)
    case = replace(Case(fresh, device, config), dtype=torch.bfloat16)
    OPERATORS["column"](case, (64, 1), 64, 64)
    domain = domain_of(fresh, config, device)
    if case.rank == size - 1:
        domain.engine.push = lambda source, routes: None  # type: ignore[method-assign]
        domain.engine.launch = lambda kernel, *pushes: kernel()  # type: ignore[method-assign]
        for slot in domain.workspace.slots:  # kernels that signal themselves tell themselves
            slot.outgoing_at.fill_(slot.outgoing[case.rank].data_ptr())
    x = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    y = all_gather_linear(x, x, group=fresh, config=config)
    torch.cuda.synchronize()
    if case.rank != size - 1:
        assert bool(y.isnan().any())
        with pytest.raises(
            OverlapTimeoutError, match=rf"all_gather_linear/fprop: rank {case.rank} .* of rank {size - 1}"
        ):
            all_gather_linear(x, x, group=fresh, config=config)
    dist.barrier()
