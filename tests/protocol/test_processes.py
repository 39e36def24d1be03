"""The operators between real processes: every method, shape and policy, compared exactly."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

from overlap_train import OverlapConfig, all_gather_linear, linear_reduce_scatter, shutdown
from overlap_train.ops import launch as persistent
from overlap_train.ops.plan import EnginePlan
from tests.linear_cases import OPERATORS, PAIRS, SHAPES, Case, bits_of_sums, error_of_a_sum
from tests.processes import run_ranks, values


def _case(method: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Case:
    return Case(dist.group.WORLD, torch.device("cpu"), OverlapConfig(method=method, timeout_s=30.0, **settings), dtype)


def _every_shape(rank: int, world: int, method: str, dtype: torch.dtype = torch.float32) -> int:
    names = ("one row a rank", "odd", "three leading") if method in ("fused", "direct") else tuple(SHAPES)
    operators = ("column", "row") if method == "low_latency" else tuple(OPERATORS)
    for operator in operators:
        for seed, name in enumerate(names):
            OPERATORS[operator](_case(method, dtype), *SHAPES[name], seed=seed, bias=seed % 2 == 0)
    shutdown()
    return len(names) * len(operators)


@pytest.mark.parametrize(("method", "world"), [*product(("chunked", "collective", "auto"), (1, 2, 3)), ("chunked", 8)])
def test_every_shape(method: str, world: int) -> None:
    assert values(run_ranks(world, _every_shape, method, limit_s=60)) == [20] * world


def _every_shape_aside(rank: int, world: int) -> int:
    persistent._SHORTEST_ASYNC = 0  # of this process
    return _every_shape(rank, world, "collective")


def test_collectives_beside_the_callers_work() -> None:
    """As the long ones run; the others wait for the result at once."""
    assert values(run_ranks(2, _every_shape_aside, limit_s=60)) == [20] * 2


@pytest.mark.parametrize(
    ("world", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (3, torch.float16), (8, torch.float32)]
)
def test_few_rows_by_words_with_flags(world: int, dtype: torch.dtype) -> None:
    """bf16, too: the interpreter only moves it."""
    assert values(run_ranks(world, _every_shape, "low_latency", dtype, limit_s=100)) == [10] * world


@pytest.mark.parametrize(("method", "world"), [("fused", 2), ("direct", 2), ("direct", 8)])
def test_every_shape_by_kernels(method: str, world: int) -> None:
    """The Triton kernels themselves, interpreted, between real processes."""
    assert values(run_ranks(world, _every_shape, method, limit_s=100)) == [12] * world


def _a_bias_alone_trains(rank: int, world: int, method: str) -> None:
    """Nothing is sent for its gradient. Its elements lie apart."""
    case = _case(method)
    x, w, numbers = torch.ones(4, 3), torch.ones(5, 3), torch.arange(10.0)
    for operator, in_y, rows in ((all_gather_linear, 3, 4 * world), (linear_reduce_scatter, 3 * world, 4 // world)):
        bias = numbers[::2].detach().requires_grad_()
        y = operator(x, w, bias, group=case.group, config=case.config)
        assert torch.equal(y, (in_y + numbers[::2]).expand(rows, 5))
        with mock.patch.object(EnginePlan, "start", side_effect=AssertionError("sends")):
            y.sum().backward()
        assert bias.grad is not None and bias.grad.tolist() == [rows] * 5
    shutdown()


@pytest.mark.parametrize("method", ["chunked", "collective", "fused", "low_latency"])
def test_a_bias_alone_trains(method: str) -> None:
    values(run_ranks(2, _a_bias_alone_trains, method, limit_s=60))


def _keep_gathered(rank: int, world: int, method: str) -> None:
    case = _case(method, gathered_input="keep")
    for shape in SHAPES.values():
        for operator in ("column", "to_rows"):
            OPERATORS[operator](case, *shape)


@pytest.mark.parametrize("method", ["chunked", "collective"])
def test_keeping_the_gathered_input_gives_the_same(method: str) -> None:
    values(run_ranks(2, _keep_gathered, method))


def _dtypes(rank: int, world: int) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for operator in OPERATORS.values():
            operator(_case("chunked", dtype), (4, 2), 48, 24)


def test_half_precision() -> None:
    values(run_ranks(2, _dtypes))


def _strange_layouts(rank: int, world: int, method: str, pair: str) -> None:
    """Non-contiguous input and weight, frozen weight, input without gradient, two microbatches in flight, recomputation."""
    case, (first_linear, second_linear) = _case(method), PAIRS[pair]
    wide = case.integers(6, 2, 66, seed=rank).float()
    x = wide[:, :, :64:2].detach().requires_grad_()
    w = case.integers(32, 24, seed=9 + rank * (pair == "tensor")).float().t().detach().requires_grad_()
    assert not x.is_contiguous() and not w.is_contiguous()

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        hidden = first_linear(x, w, group=case.group, config=case.config)
        hidden = torch.stack((hidden, hidden), -1)[..., 0]  # in steps of two
        return second_linear(hidden, w.t(), group=case.group, config=case.config)

    def gradients(run: Any, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        """The gradient of a sum is expanded: it has no memory of its own."""
        leaves = [t for t in (x, w) if t.requires_grad]
        return list(torch.autograd.grad(run(x, w).sum(), leaves))

    plain = gradients(block, x, w)
    dense = gradients(block, x.detach().contiguous().requires_grad_(), w.detach().contiguous().requires_grad_())
    assert all(torch.equal(a, b) for a, b in zip(plain, dense, strict=True))
    assert torch.equal(gradients(block, x, w.detach())[0], plain[0])
    assert torch.equal(gradients(block, x.detach(), w)[0], plain[1])

    def recomputed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, w, use_reentrant=False)

    assert all(torch.equal(a, b) for a, b in zip(gradients(recomputed, x, w), plain, strict=True))
    first, second = block(x, w).sum(), block(2 * x, w).sum()
    in_flight = [torch.autograd.grad(loss, (x, w)) for loss in (first, second)]
    assert torch.equal(in_flight[0][0], plain[0]) and torch.equal(in_flight[1][0], 2 * plain[0])
    assert torch.equal(in_flight[1][1], 2 * plain[1])


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("method", ["chunked", "collective", "direct"])
def test_layouts_freezing_microbatches_and_recomputation(method: str, pair: str) -> None:
    """With a frozen weight, `direct` sends without a product."""
    values(run_ranks(2, _strange_layouts, method, pair))


def _main_grad(rank: int, world: int) -> None:
    case = _case("chunked")
    x = case.integers(4, 2, 16, seed=rank).float().requires_grad_()
    w = torch.nn.Parameter(case.integers(8, 16, seed=5 + rank).float())
    all_gather_linear(x, w, group=case.group, config=case.config).sum().backward()
    expected = w.grad
    w.grad, w.main_grad = None, torch.full((8, 16), 3.0)
    for _ in range(2):
        all_gather_linear(x, w, group=case.group, config=case.config).sum().backward()
    assert w.grad is None and torch.equal(w.main_grad, 3 + 2 * expected)
    w.grad_added_to_main_grad, w.zero_out_wgrad = False, True
    linear_reduce_scatter(x[..., :16].repeat(world, 1, 1), w, group=case.group, config=case.config).sum().backward()
    assert w.grad_added_to_main_grad and w.grad is not None and not w.grad.any()


def test_main_grad_accumulation() -> None:
    values(run_ranks(2, _main_grad))


def _sub_group(rank: int, world: int) -> str:
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    if rank == 0:
        try:
            all_gather_linear(torch.ones(2, 2), torch.ones(2, 2), group=groups[1])
        except ValueError as error:
            return str(error)
        return "no error"
    for operator in OPERATORS.values():
        operator(Case(groups[1], torch.device("cpu"), OverlapConfig(method="chunked")), (3, 2), 20, 12)
    return "ok"


def test_a_group_that_does_not_start_at_rank_0() -> None:
    outsider, *members = values(run_ranks(3, _sub_group))
    assert members == ["ok", "ok"]
    assert "not a member" in outsider


@pytest.mark.parametrize("method", ["chunked", "direct"])
def test_the_same_bits_on_every_run(method: str) -> None:
    first, second = (values(run_ranks(3, bits_of_sums, OverlapConfig(method=method))) for _ in range(2))
    assert first == second


def test_random_numbers_stay_within_the_rounding_bound() -> None:
    worst = max(values(run_ranks(2, error_of_a_sum, OverlapConfig())))
    assert 0 < worst <= 1
