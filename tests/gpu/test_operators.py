"""Values on GPUs: exact on integers, within the rounding bound on random numbers, and the same bits on every run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

from overlap_train import all_gather_linear, linear_reduce_scatter
from overlap_train.domain import Demand
from overlap_train.operators.all_gather_gemm import start_all_gather_whole
from overlap_train.operators.gemm_reduce_scatter import start_gemm_reduce_scatter
from overlap_train.protocol.slot import Slot
from overlap_train.registry import domain_of
from overlap_train.tuned.ways import WAYS, Way
from tests.linear_cases import OPERATORS, SHAPES, Case, poison, rounding_bound

SHAPES_OF_TILES = {**SHAPES, "several tiles": ((300, 2), 520, 390), "many tiles": ((1024, 1), 1024, 1536)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_shape_is_exact(case: Case, operator: str, dtype: torch.dtype) -> None:
    shapes = (
        SHAPES_OF_TILES if dtype == torch.bfloat16 else {name: SHAPES_OF_TILES[name] for name in ("odd", "many tiles")}
    )
    for seed, (rows, k, n) in enumerate(shapes.values()):
        OPERATORS[operator](replace(case, dtype=dtype), rows, k, n, seed=seed, bias=seed % 2 == 0)


@pytest.mark.parametrize("operator", OPERATORS)
def test_keeping_the_gathered_input(case: Case, operator: str) -> None:
    keeping = replace(case, config=replace(case.config, gathered_input="keep"))
    for name in ("one row a rank", "several tiles"):
        OPERATORS[operator](keeping, *SHAPES_OF_TILES[name])


def test_the_fused_kernel_really_ran(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels claim tiles from a counter that nothing else touches, direct ones count the epoch of both their calls, which
    the host does for the others: overlap that silently did not happen shows here."""
    domain, method = domain_of(case.group, case.config, case.device), case.config.method
    OPERATORS["column"](case, (256, 1), 256, 256)  # so that slots are there, and then used again
    before = sum(int(slot.epoch) for slot in domain.workspace.slots)
    by_host: list[Slot] = []
    count = Slot.next_epoch
    monkeypatch.setattr(Slot, "next_epoch", lambda slot: (by_host.append(slot), count(slot)))
    OPERATORS["column"](case, (256, 1), 256, 256)
    counted = sum(int(slot.epoch) for slot in domain.workspace.slots) - before
    calls = {"fused": (3, 3), "direct": (3, 1), "chunked": (3, 3), "collective": (0, 0)}
    assert (counted, len(by_host)) == calls[method], "forward; of backward a gather by the copy engine, and a scatter"
    if method == "fused":
        assert sum(int(slot.counters.claimed) for slot in domain.workspace.slots) > 0
    assert domain.heap is not None and case.config.provider in ("auto", domain.heap.provider)


def test_later_launches_go_straight_to_the_driver(case: Case, recwarn: pytest.WarningsRecorder) -> None:
    """A layout that the packing does not know would only be slow."""
    domain = domain_of(case.group, case.config, case.device)
    k = {"fused": 272, "direct": 288, "chunked": 304, "collective": 320}[
        case.config.method
    ]  # slots know it by its shape
    for seed in range(4):
        OPERATORS["column"](replace(case, dtype=torch.bfloat16), (256 * case.world, 1), k, 256, seed=seed)
    calls = [call for slot in domain.workspace.slots for (shape, *_), call in slot.calls.items() if shape[1] == k]
    packed = sum(len(call.launches._packed) for call in calls)
    assert (packed > 0) == (case.config.method != "collective")
    assert not [warning for warning in recwarn if "host time" in str(warning.message)]


def _random(case: Case, *shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(case.device, case.dtype)


@pytest.mark.parametrize("way", [way for way in WAYS if way.deferred], ids=lambda way: way.named("fused"))
def test_a_deferred_reduction_is_exact(case: Case, way: Way) -> None:
    """Of a column's backward, behind the gather of x and before its weight gradient, several times with other numbers."""
    if case.config.method != "fused":
        pytest.skip("the others have nothing to defer, or always do")
    w, domain, op = case.world, domain_of(case.group, case.config, case.device), way.named("deferred")
    domain.prepare(Demand(op, "dx and x", 2048 * w * 4096 * case.dtype.itemsize), None)
    # the last in two chunks of 8 MiB, twice in the same slots
    for seed, (rows, n) in enumerate(((128, 768), (256, 768), (1024, 768), (2048, 4096), (2048, 4096), (2048, 4096))):
        dy, weight = case.integers(rows * w, 128 * w, seed=seed), case.integers(128 * w, n, seed=10 + seed)
        x = case.integers(rows * w, n, seed=20 + seed)
        own_dy, own_weight = (
            part.to(case.dtype) for part in (dy.chunk(w, 1)[case.rank], weight.chunk(w, 0)[case.rank])
        )
        poison(case)
        with domain.operator(op, 2, way.in_step):
            gather = start_all_gather_whole(domain, x.chunk(w, 0)[case.rank].to(case.dtype), "fused", f"{op}/wgrad")
            scatter = start_gemm_reduce_scatter(domain, own_dy, own_weight, "fused", f"{op}/dgrad", way)
            gathered = gather.full().clone()
            dx = scatter.finish()
        assert torch.equal(gathered.double(), x)
        assert torch.equal(dx.double(), (dy @ weight).chunk(w, 0)[case.rank])
    calls = [call for slot in domain.workspace.slots for call in slot.calls.values() if call.op == f"{op}/dgrad"]
    assert {call.chunks for call in calls} == ({1} if way.whole else {1, 2})
    assert all("reduce" in call.launches._packed for call in calls), "the kernel behind it ran"


def test_random_numbers_stay_within_the_rounding_bound(case: Case) -> None:
    if case.config.method == "collective":
        pytest.skip("NCCL rounds each partial sum to bf16; the bound is about our reduction")
    w = case.world
    x, weight = _random(case, 512 * w, 768 * w, seed=1), _random(case, 640, 768 * w, seed=2)
    poison(case)
    y = linear_reduce_scatter(
        x.chunk(w, 1)[case.rank].contiguous(),
        weight.chunk(w, 1)[case.rank].contiguous(),
        group=case.group,
        config=case.config,
    )
    exact = (x.double() @ weight.double().t()).chunk(w, 0)[case.rank]
    bound = rounding_bound(x, weight.t(), case.dtype, w).chunk(w, 0)[case.rank]
    assert bool(((y.double() - exact).abs() <= bound).all())


def test_the_same_bits_on_every_run(case: Case) -> None:
    x = _random(case, 1024 * case.world, 1024, seed=case.rank).requires_grad_()
    weight = _random(case, 768, 1024, seed=10 + case.rank).requires_grad_()
    runs = []
    for _ in range(5):
        x.grad = weight.grad = None
        y = linear_reduce_scatter(x, weight, group=case.group, config=case.config)
        z = all_gather_linear(y, weight.t().contiguous(), group=case.group, config=case.config)
        z.square().sum().backward()
        runs.append([y.detach().clone(), z.detach().clone(), x.grad, weight.grad])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


def test_layouts_freezing_microbatches_and_recomputation(case: Case) -> None:
    """Strided inputs and weights, frozen parts, two microbatches in flight and recomputation give what the plain case gives."""
    x = case.integers(256, 2, 1024, seed=case.rank).to(case.dtype)[:, :, ::2].detach().requires_grad_()
    w = case.integers(512, 384, seed=9 + case.rank).to(case.dtype).t().detach().requires_grad_()
    assert not x.is_contiguous() and not w.is_contiguous()

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        hidden = all_gather_linear(x, w, group=case.group, config=case.config)
        return linear_reduce_scatter(hidden * 0.125, w.t(), group=case.group, config=case.config)

    def grads(y: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(y.float().sum(), leaves)

    plain = grads(block(x, w), x, w)
    dense_x, dense_w = (t.detach().contiguous().requires_grad_() for t in (x, w))
    for left, right in zip(plain, grads(block(dense_x, dense_w), dense_x, dense_w), strict=True):
        torch.testing.assert_close(left, right)
    assert torch.equal(grads(block(x, w.detach()), x)[0], plain[0])
    assert torch.equal(grads(block(x.detach(), w), w)[0], plain[1])
    again = torch.utils.checkpoint.checkpoint(block, x, w, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(grads(again, x, w), plain, strict=True))
    first, second = block(x, w), block(x, w)
    assert all(torch.equal(a, b) for a, b in zip(grads(first, x, w), plain, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(grads(second, x, w), plain, strict=True))


def test_main_grad_accumulates_in_fp32(case: Case) -> None:
    """Adding 1/1024 to 1 is lost in bf16 and kept in fp32."""
    x = torch.ones(4, 64, device=case.device, dtype=case.dtype)
    w = torch.nn.Parameter(torch.ones(32, 64, device=case.device, dtype=case.dtype))
    w.main_grad = torch.ones(32, 64, device=case.device)
    y = all_gather_linear(x, w, group=case.group, config=case.config)
    y.backward(torch.full_like(y, 2.0**-10))
    assert w.grad is None
    assert bool((w.main_grad == 1 + y.shape[0] * 2.0**-10).all())


def test_wrong_arguments_raise_on_every_rank(case: Case) -> None:
    ones = torch.ones(4 * case.world, 8, device=case.device, dtype=case.dtype)
    w = torch.ones(8, 8, device=case.device, dtype=case.dtype)
    odd = ones[:-1] if case.world > 1 and case.rank == 0 else ones  # only one rank is wrong
    with pytest.raises(ValueError, match=r"divisible|same shapes"):
        linear_reduce_scatter(odd, w, group=case.group, config=case.config, name=f"wrong {case.config.method}")
    with pytest.raises(ValueError, match="dtype"):
        all_gather_linear(ones, w.float(), group=case.group, config=case.config)
    big = torch.ones(1 << 16, 1 << 14, device=case.device, dtype=case.dtype)
    with pytest.raises(ValueError, match=r"needs \d+ MiB.*symmetric_mib"):
        all_gather_linear(
            big, torch.ones(8, 1 << 14, device=case.device, dtype=case.dtype), group=case.group, config=case.config
        )
    dist.barrier(case.group)
