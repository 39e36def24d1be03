"""GEMM + AllReduce between real processes, exactly: every method, any number of rows, inside a node and across two."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from overlap_train import OverlapConfig, linear_all_reduce, linear_dgrad_all_reduce, shutdown
from overlap_train.ops.plan import Plan
from overlap_train.select.method import ONE_SHOT, TWO_SHOTS, WORDS
from tests.linear_cases import ALL_REDUCING, SHAPES, Case, rounding_bound, same_bits
from tests.processes import refusal, run_ranks, values

CPU = torch.device("cpu")
CALLS = (linear_dgrad_all_reduce, linear_all_reduce)


def _case(method: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Case:
    return Case(dist.group.WORLD, CPU, OverlapConfig(method=method, timeout_s=30.0, **settings), dtype)


def _every_shape(rank: int, world: int, method: str, names: tuple[str, ...], settings: dict[str, Any]) -> int:
    case = _case(method, **settings)
    for operator in ALL_REDUCING.values():
        for seed, (rows, k, n) in enumerate(SHAPES[name] for name in names):
            operator(case, rows, k, n, seed=seed, bias=seed % 2 == 0)
    shutdown()
    return len(names)


@pytest.mark.parametrize(("method", "world"), [("chunked", 2), ("chunked", 3), ("collective", 2), ("auto", 4)])
def test_every_shape(method: str, world: int) -> None:
    """Rows that the ranks divide, and others; fewer than there are ranks."""
    assert values(run_ranks(world, _every_shape, method, tuple(SHAPES), {}, limit_s=60)) == [5] * world


@pytest.mark.parametrize(("method", "world"), [("fused", 2), ("direct", 2), ("low_latency", 3)])
def test_every_shape_by_kernels(method: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    names = ("one row a rank", "odd", "three leading")
    assert values(run_ranks(world, _every_shape, method, names, {}, limit_s=100)) == [3] * world


@pytest.mark.parametrize("method", ["chunked", "fused", "collective"])
def test_every_shape_across_nodes(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    names = ("even", "odd")
    assert values(run_ranks(4, _every_shape, method, names, {"node_ranks": 2}, limit_s=100)) == [2] * 4


def _shots(rank: int, world: int) -> list[str]:
    """Of messages that get longer while slots do not: two shots take least, words most. Elements that shares do not divide."""
    case, plans = _case("low_latency", symmetric_mib=2), list[Plan]()
    for rows in (1, 20, 141, 266):
        x, w = torch.full((rows, 1), rank + 1.0), torch.arange(231.0)[:, None]
        y = linear_all_reduce(x, w, group=case.group, config=case.config, on_plan=lambda plan, _: plans.append(plan))
        assert bool((y == torch.arange(231.0) * (world * (world + 1) // 2)).all()), plans[-1].shots
    return [plan.shots for plan in plans]


def _long_then_short(rank: int, world: int) -> list[str]:
    """In memory that holds no words beside the long one's blocks, but in these a shorter one's. In bf16."""
    case, plans, w = _case("low_latency", symmetric_mib=8), list[Plan](), (torch.arange(1000) % 8).bfloat16()
    for rows in (660, 120):
        x = torch.full((rows, 1), rank + 1.0).bfloat16()
        y = linear_all_reduce(
            x, w[:, None], group=case.group, config=case.config, on_plan=lambda plan, _: plans.append(plan)
        )
        assert bool((y == w * (world * (world + 1) // 2)).all()), plans[-1].shots
    return [plan.shots for plan in plans]


def test_an_all_reduce_goes_as_fits_beside_what_the_group_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert values(run_ranks(4, _long_then_short, limit_s=100)) == [[TWO_SHOTS, ONE_SHOT]] * 4


def _other_memory(rank: int, world: int) -> str:
    config = OverlapConfig(method="low_latency", symmetric_mib=3 + 20 * rank)
    with pytest.raises(ValueError) as caught:
        linear_all_reduce(torch.ones(100, 3), torch.ones(1000, 3), group=dist.group.WORLD, config=config)
    return str(caught.value)


def test_ranks_with_other_memory_hear_of_that_and_not_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides how the sums go."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for said in values(run_ranks(2, _other_memory, limit_s=60)):
        assert "symmetric_mib=3" in said and "symmetric_mib=23" in said and "rows" not in said, said


def test_how_few_rows_are_all_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert values(run_ranks(3, _shots, limit_s=60)) == [[WORDS, WORDS, ONE_SHOT, TWO_SHOTS]] * 3


def _bits(rank: int, world: int, method: str) -> list[bytes]:
    """Of random numbers in bf16, twice; within the bound of their rounding."""
    case, found = _case(method, torch.bfloat16), []
    torch.manual_seed(7)
    x, w = torch.randn(10, 48 * world).bfloat16(), torch.randn(40, 48 * world).bfloat16()
    for _ in range(2):
        y = linear_all_reduce(case.mine(x, 1), case.mine(w, 1), group=case.group, config=case.config)
        off = (y.double() - x.double() @ w.double().t()).abs()
        assert bool((off <= rounding_bound(x, w.t(), torch.bfloat16, world)).all())
        found.append(y.detach().view(torch.uint8).numpy().tobytes())
    same_bits(_case(method), 10, 48, 40)  # in fp32, where another order of sums shows
    return found


@pytest.mark.parametrize("method", ["chunked", "low_latency"])
def test_every_rank_and_run_has_the_same_bits(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert len({bits for found in values(run_ranks(3, _bits, method, limit_s=60)) for bits in found}) == 1


def _gradients(rank: int, world: int) -> None:
    """Those that are wanted, and main_grad."""
    case = _case("chunked")
    for call in CALLS:
        for wants_dx, wants_dw, wants_dbias in ((True, True, False), (True, False, True), (False, True, True)):
            x, w = torch.ones(5, 1, 8).requires_grad_(wants_dx), torch.ones(4, 8).requires_grad_(wants_dw)
            bias = torch.ones(8)[::2].requires_grad_(wants_dbias)
            call(x, w, bias, group=case.group, config=case.config).sum().backward()
            assert (bias.grad is None) != wants_dbias and (bias.grad is None or bool((bias.grad == 5).all()))
            all_ranks = world if call is linear_dgrad_all_reduce else 1
            assert (x.grad is not None) == wants_dx and (w.grad is not None) == wants_dw
            assert x.grad is None or bool((x.grad == 4 * all_ranks).all())
            assert w.grad is None or bool((w.grad == 5).all())
        w = torch.ones(4, 8).requires_grad_()
        w.main_grad, w.grad_added_to_main_grad = torch.ones(4, 8), False  # type: ignore[attr-defined]
        call(torch.ones(5, 1, 8), w, group=case.group, config=case.config).sum().backward()
        assert bool((w.main_grad == 6).all()) and w.grad_added_to_main_grad  # type: ignore[attr-defined]
        with torch.no_grad():
            assert not call(torch.ones(5, 1, 8), w, group=case.group, config=case.config).requires_grad


def test_only_gradients_that_are_wanted_are_made() -> None:
    values(run_ranks(2, _gradients))


def _tangents(rank: int, world: int) -> None:
    """Refused as in autograd, also where forward runs without it."""
    case, ones = _case("collective"), torch.ones(4, 8)
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        linear_all_reduce(forward_ad.make_dual(ones, ones), ones, group=case.group, config=case.config)


def test_tangents_are_refused_without_gradients() -> None:
    values(run_ranks(2, _tangents))


def _forward_alone(rank: int, world: int) -> None:
    """Of a column linear sends nothing, and takes no symmetric memory; nor does one whose input is frozen."""
    case = _case("chunked", symmetric_mib=1)
    x, w = torch.ones(512, 1024), torch.ones(4, 1024, requires_grad=True)
    with torch.no_grad():
        linear_dgrad_all_reduce(x.requires_grad_(), w, group=case.group, config=case.config)
    linear_dgrad_all_reduce(x.detach(), w, group=case.group, config=case.config).sum().backward()
    with pytest.raises(ValueError, match="symmetric_mib=1 is too small"):
        linear_dgrad_all_reduce(x, w, group=case.group, config=case.config)


def test_a_column_that_only_goes_forward_takes_no_memory() -> None:
    values(run_ranks(2, _forward_alone))


def _dtensors(rank: int, world: int) -> None:
    """Sharded, or the same on all ranks, as the operators mean; gradients come back likewise."""
    mesh, case = init_device_mesh("cpu", (world,)), _case("chunked")
    group = mesh.get_group()
    of_k, of_n, same = [Shard(1)], [Shard(0)], [Replicate()]
    for call, places in ((linear_all_reduce, (of_k, of_k, same)), (linear_dgrad_all_reduce, (same, of_n, of_n))):
        shapes = (6, 8), (4, 8), (4,)
        x, w, b = (
            distribute_tensor(torch.ones(shape), mesh, place).requires_grad_()
            for shape, place in zip(shapes, places, strict=True)
        )
        y = call(x, w, b, group=group, config=case.config)
        assert bool((y == 9).all())
        y.sum().backward()
        for leaf, right, place in zip((x, w, b), (4, 6, 6), places, strict=True):
            assert leaf.grad.placements == tuple(place) and bool((leaf.grad.full_tensor() == right).all())


def test_dtensors_that_lie_as_the_operator_means_are_taken() -> None:
    values(run_ranks(2, _dtensors, limit_s=60))


def _wrong(rank: int, world: int) -> list[str]:
    case = _case("chunked")
    settings = dict(group=case.group, config=case.config, name="fc")
    return [refusal(call, torch.ones(4, 8 + rank), torch.ones(4, 8), **settings) for call in CALLS]


def test_wrong_arguments_raise_on_every_rank() -> None:
    for told in values(run_ranks(2, _wrong)):
        for text, its in zip(told, ("x", "x_shard_k"), strict=True):
            assert re.search(rf"fc: {its} has 9 features .*expects 8", text), text
