"""Values on GPUs: exact on integers, within the rounding bound on random numbers, and the same bits on every run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

from overlap_train import all_gather_linear, all_to_all_linear, linear_all_to_all, linear_reduce_scatter
from overlap_train.group.registry import domain_of
from overlap_train.group.signals import epoch_of
from overlap_train.ops.launch import multiprocessors
from overlap_train.schedule.kinds import Kind
from overlap_train.select.choose import choose
from overlap_train.select.method import Pass
from overlap_train.select.table import UNTUNED
from overlap_train.select.tiles import HOPPER_TILE, SHORTEST_DIRECT, chunk_count, count_waves
from tests.linear_cases import ALL_REDUCING, OPERATORS, SHAPES, Case, cut_into, poison, rounding_bound, same_bits

SHAPES_OF_TILES = {
    **SHAPES,
    "several tiles": ((300, 2), 520, 390),
    "many tiles": ((1024, 1), 1024, 1536),
    "two chunks": ((2048, 1), 4096, 4096),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_shape_is_exact(case: Case, operator: str, dtype: torch.dtype) -> None:
    shapes = (
        SHAPES_OF_TILES if dtype == torch.bfloat16 else {name: SHAPES_OF_TILES[name] for name in ("odd", "many tiles")}
    )
    for seed, (rows, k, n) in enumerate(shapes.values()):
        OPERATORS[operator](replace(case, dtype=dtype), rows, k, n, seed=seed, bias=seed % 2 == 0)


@pytest.mark.parametrize("operator", ALL_REDUCING)
def test_all_reduces_are_exact(case: Case, operator: str) -> None:
    """Twice, so that slots come again; rows that the ranks divide, and others."""
    for seed, (rows, k, n) in enumerate(2 * [*SHAPES_OF_TILES.values()]):
        ALL_REDUCING[operator](case, rows, k, n, seed=seed, bias=seed % 2 == 0)


@pytest.mark.parametrize("operator", ["column", "row"])
def test_fp8_is_exact(case: Case, operator: str) -> None:
    """Twice, so that slots come again. low_latency has its own scatter and gather, and the library's product."""
    for method in (case.config.method, *(["low_latency"] if case.config.method == "chunked" else [])):
        in_fp8 = replace(case, config=replace(case.config, fp8="tensorwise", method=method))
        for seed, shape in enumerate(2 * [((16,), 32, 48), ((304, 2), 528, 400), ((1024, 1), 1024, 1536)]):
            OPERATORS[operator](in_fp8, *shape, seed=seed, bias=seed % 2 == 0)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("operator", ["column", "row"])
def test_fp8_with_scales_of_blocks_is_exact(case: Case, operator: str, kept: bool) -> None:
    """Twice, so that slots come again; with counts of blocks that are multiples of 4, and others."""
    if torch.cuda.get_device_capability(case.device)[0] != 9:
        pytest.skip("scales of blocks are for Hopper")
    config = replace(case.config, fp8="blockwise", gathered_input="keep" if kept else "regather")
    for method in (case.config.method, *(["low_latency"] if case.config.method == "chunked" else [])):
        in_fp8 = replace(case, config=config.by(method))
        for seed, shape in enumerate(2 * [((128,), 128, 128), ((192, 2), 640, 384), ((1024, 1), 1024, 1536)]):
            OPERATORS[operator](in_fp8, *shape, seed=seed, bias=seed % 2 == 0)


@pytest.mark.parametrize("rows", [65, 129, 997, 4100])
@pytest.mark.parametrize("operator", OPERATORS)
def test_rows_that_end_within_a_tile(case: Case, operator: str, rows: int) -> None:
    """Of features that the Hopper kernels serve, in two tiles of columns and more."""
    OPERATORS[operator](case, (rows, 1), 264, 520, seed=rows, bias=True)


@pytest.mark.parametrize(
    ("operator", "features"),
    [("column", (4136, 264)), ("row", (264, 4136)), ("to_heads", (264, 4136)), ("to_rows", (4136, 264))],
)
def test_chunks_that_end_within_a_tile(case: Case, operator: str, features: tuple[int, int]) -> None:
    """Four of 1015 rows that the copy engine sends, two of 2030 that kernels store."""
    if case.world > 4:
        pytest.skip("eight ranks' tensors in fp64 are 8 GB each")
    assert (chunk_count(4060, 2 * 4136, True), chunk_count(4060, 1, True, 8, SHORTEST_DIRECT)) == (4, 2)
    OPERATORS[operator](case, (4060, 1), *features, bias=True)


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("rows", [66, 130, 190, 196])
@pytest.mark.parametrize("operator", OPERATORS)
def test_tiles_that_cross_from_one_chunk_into_the_next(
    case: Case, operator: str, rows: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one to four strips of 64 rows, in two columns of tiles and more; features of each, so that plans are its own."""
    for name, count in cut_into(lambda m_shard: math.gcd(m_shard, chunks)).items():
        monkeypatch.setattr(name, count)
    OPERATORS[operator](case, (rows, 1), 272 + 8 * chunks, 528 + 8 * chunks, seed=rows)


@pytest.mark.parametrize("operator", ["row", "to_heads"])
def test_a_last_wave_of_half_tiles_is_exact(case: Case, operator: str) -> None:
    """Blocks of 1088 rows and 2040 columns are 136 to 144 tiles of two ranks, 272 to 288 of four, 544 to 576 of eight. Later
    calls of a shape find other numbers in slot, staging and outbox, and other weights."""
    tiles = HOPPER_TILE.count(1088, 2040, case.world - 1) + HOPPER_TILE.count(1088, 2040)
    if count_waves(tiles, multiprocessors(case.device), HOPPER_TILE.pairs(1088, 2040)) % 1 != 0.5:
        pytest.skip("on this GPU the last wave is not cut")
    for seed in range(3):
        OPERATORS[operator](case, (1088, 1), 264, 2040, seed=seed, bias=seed > 0)
        if operator == "row":  # whose sums are sent on, by rows of all ranks
            ALL_REDUCING[operator](case, (1088 * case.world, 1), 264, 2040, seed=seed, bias=seed > 0)


@pytest.mark.parametrize("operator", OPERATORS)
def test_keeping_the_gathered_input(case: Case, operator: str) -> None:
    keeping = replace(case, config=replace(case.config, gathered_input="keep"))
    for name in ("one row a rank", "several tiles"):
        OPERATORS[operator](keeping, *SHAPES_OF_TILES[name])


def test_own_rows_share_tiles_with_a_peers_where_that_saves_a_wave(case: Case) -> None:
    """Forward, by a split reduction: 4100 rows of 4096 columns are four waves of tiles instead of four and a half on an H200."""
    if (case.config.method, case.world, multiprocessors(case.device)) != ("fused", 2, 132):
        pytest.skip("4100 rows of fewer or more ranks, or SMs, are other tiles")
    assert choose(
        "fused", Pass(Kind.GEMM_RS, 4100, 4096, 4096, case.dtype, 2), case.device, UNTUNED
    ).how.split_reduction
    for seed in range(3):
        OPERATORS["row"](case, (2050, 1), 4096, 4096, seed=seed, bias=seed > 0)


def test_the_kernels_of_the_method_really_ran(case: Case) -> None:
    """Overlap that silently did not happen shows in a profile, and in what the calls counted."""
    domain, method = domain_of(case.group, case.config, case.device), case.config.method
    OPERATORS["column"](case, (256, 1), 256, 256)  # so that slots are there, and then used again
    slots = [] if domain.heap is None else domain.workspace.slots
    before = sum(epoch_of(int(slot.epoch)) for slot in slots)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        OPERATORS["column"](case, (256, 1), 256, 256)
        torch.cuda.synchronize()
    kernels = {event.name for event in profile.events()}
    assert any("all_gather_gemm" in name for name in kernels) == (method in ("fused", "direct")), kernels
    counted = sum(epoch_of(int(slot.epoch)) for slot in slots) - before
    assert counted == 3 * (method != "collective"), "forward; of backward a gather and a scatter"
    assert domain.heap is None or case.config.provider in ("auto", domain.heap.provider)


def test_later_launches_go_straight_to_the_driver(case: Case, recwarn: pytest.WarningsRecorder) -> None:
    """A layout that the packing does not know would only be slow."""
    domain = domain_of(case.group, case.config, case.device)
    k = {"fused": 272, "direct": 288, "chunked": 304, "collective": 320}[
        case.config.method
    ]  # slots know it by its shape
    for seed in range(4):
        OPERATORS["column"](replace(case, dtype=torch.bfloat16), (256 * case.world, 1), k, 256, seed=seed)
    slots = [] if domain.heap is None else domain.workspace.slots
    calls = [slot.calls.get(key) for slot in slots for key in slot.calls if key[0][1] == k]
    packed = sum(len(call.launches._packed) for call in calls)
    assert (packed > 0) == (case.config.method != "collective")
    assert not [warning for warning in recwarn if "host time" in str(warning.message)]


def _random(case: Case, *shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(case.device, case.dtype)


def test_random_numbers_stay_within_the_rounding_bound(case: Case) -> None:
    if case.config.method == "collective":
        pytest.skip("NCCL rounds each partial sum to bf16; the bound is about our reduction")
    w = case.world
    x, weight = _random(case, 512 * w, 768 * w, seed=1), _random(case, 640, 768 * w, seed=2)
    bias = _random(case, 640, seed=3)
    poison(case)
    y = linear_reduce_scatter(
        x.chunk(w, 1)[case.rank].contiguous(),
        weight.chunk(w, 1)[case.rank].contiguous(),
        bias,
        group=case.group,
        config=case.config,
    )
    exact = (x.double() @ weight.double().t()).chunk(w, 0)[case.rank] + bias
    bound = (
        rounding_bound(x, weight.t(), case.dtype, w).chunk(w, 0)[case.rank] + bias.abs() * torch.finfo(case.dtype).eps
    )
    assert bool(((y.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize(
    ("there", "back"), [(linear_reduce_scatter, all_gather_linear), (linear_all_to_all, all_to_all_linear)]
)
def test_the_same_bits_on_every_run(
    case: Case, there: Callable[..., torch.Tensor], back: Callable[..., torch.Tensor]
) -> None:
    x = _random(case, 1024 * case.world, 1024, seed=case.rank).requires_grad_()
    weight = _random(case, 256 * case.world, 1024, seed=10).requires_grad_()
    bias = _random(case, 256 * case.world, seed=11).requires_grad_()
    runs = []
    for _ in range(5):
        x.grad = weight.grad = bias.grad = None
        y = there(x, weight, bias, group=case.group, config=case.config)
        z = back(y, weight.t(), group=case.group, config=case.config)
        z.square().sum().backward()
        runs.append([y.detach().clone(), z.detach().clone(), x.grad, weight.grad, bias.grad])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("rows", [1, 512, 4100])
def test_all_reduces_have_the_same_bits_on_every_rank_and_run(case: Case, rows: int) -> None:
    same_bits(case, rows)


@pytest.mark.parametrize("operator", [all_gather_linear, linear_reduce_scatter, linear_all_to_all, all_to_all_linear])
def test_operands_anywhere_in_memory(case: Case, operator: Callable[..., torch.Tensor]) -> None:
    """Of one shape, without a bias and with one: each in turn on 16 bytes, or an element beside them. A launch that was packed
    for the one would not serve the other: vectors of 16 bytes cannot be loaded from there."""
    rows, k = 128 * case.world, 192
    features = k * case.world if operator is all_to_all_linear else k
    x, w = case.integers(rows, k, seed=case.rank), case.integers(64 * case.world, features, seed=9)
    bias = case.integers(64 * case.world, seed=10)

    def placed(whole: torch.Tensor, first: int) -> torch.Tensor:
        memory = torch.zeros(whole.numel() + 1, device=case.device, dtype=case.dtype)
        return memory[first:][: whole.numel()].view(whole.shape).copy_(whole).requires_grad_()

    def outcome(*places: int) -> tuple[torch.Tensor, ...]:
        operands = [placed(whole, first) for whole, first in zip((x, w, bias), places, strict=False)]
        y = operator(*operands, group=case.group, config=case.config)
        return y.detach(), *torch.autograd.grad(y, operands, torch.ones_like(y))

    for first, *others in (
        ((0, 0), (1, 0), (0, 1), (1, 1), (0, 0)),
        ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)),
    ):
        expected = outcome(*first)
        for places in others:
            assert all(torch.equal(a, b) for a, b in zip(outcome(*places), expected, strict=True))


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
    """Of rows of the weight, as dy comes, and of its columns, as x comes. Neither the product, 257, nor its sum with 1/1024 is a
    number of bf16."""
    size = 32 * case.world
    w = torch.nn.Parameter(torch.ones(size, size, device=case.device, dtype=case.dtype))
    w.main_grad = torch.full((size, size), 2.0**-10, device=case.device)
    for operator, x in (
        (linear_all_to_all, torch.ones(4, size, device=case.device, dtype=case.dtype)),
        (all_to_all_linear, torch.ones(4 * case.world, 32, device=case.device, dtype=case.dtype)),
    ):
        y = operator(x, w, group=case.group, config=case.config)
        dy = torch.zeros_like(y).unflatten(0, (-1, 4))
        dy[:, 0], dy[:, -1] = 256.0, 1.0
        y.backward(dy.flatten(0, 1))
    assert w.grad is None
    assert bool((w.main_grad == 2 * 257 + 2.0**-10).all())


@pytest.mark.parametrize("fp8", ["tensorwise", "blockwise"])
def test_fp8_is_added_to_main_grad(case: Case, fp8: str) -> None:
    """Twice, within the library's product: the gradient that is returned elsewhere, but for its rounding to bf16. A view that is
    wider than the weight, and one at an odd address, which the library cannot add to, give the same."""
    if torch.cuda.get_device_capability(case.device)[0] != 9:
        pytest.skip("scales of blocks are for Hopper")
    shapes = (128, 256), (128, 256), (128 * case.world, 128)
    x_shard_m, w, dy = (torch.randn(shape, device=case.device, dtype=torch.bfloat16) for shape in shapes)
    w, wide = torch.nn.Parameter(w), torch.full((128, 264), 2.0**-10, device=case.device)
    config = replace(case.config, fp8=fp8, main_grad="accumulate")

    def backward() -> None:
        all_gather_linear(x_shard_m, w, group=case.group, config=config).backward(dy)

    backward()
    returned, found = w.grad.float(), []
    for target in (wide[:, :256], wide.flatten()[1 : 1 + 128 * 256].view(128, 256)):
        w.grad, w.main_grad = None, target.fill_(2.0**-10)
        backward()
        once = target.clone()
        backward()
        torch.testing.assert_close(once - 2.0**-10, returned, rtol=2.0**-8, atol=1e-3)
        torch.testing.assert_close(target, 2 * once - 2.0**-10, rtol=1e-6, atol=1e-5)
        found.append(once)
    assert w.grad is None
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-5)


def test_wrong_arguments_raise_on_every_rank(case: Case) -> None:
    ones = torch.ones(4 * case.world, 8, device=case.device, dtype=case.dtype)
    w = torch.ones(8, 8, device=case.device, dtype=case.dtype)
    odd = ones[:-1] if case.world > 1 and case.rank == 0 else ones  # only one rank is wrong
    with pytest.raises(ValueError, match=r"divisible|same shapes"):
        linear_reduce_scatter(odd, w, group=case.group, config=case.config, name=f"wrong {case.config.method}")
    with pytest.raises(ValueError, match="dtype"):
        all_gather_linear(ones, w.float(), group=case.group, config=case.config)
    if case.config.method != "collective":  # which needs no symmetric memory
        big, few = (torch.ones(rows, 1 << 14, device=case.device, dtype=case.dtype) for rows in (1 << 16, 8))
        with pytest.raises(ValueError, match=r"needs \d+ MiB.*symmetric_mib"):
            all_gather_linear(big, few, group=case.group, config=case.config)
    dist.barrier(case.group)
