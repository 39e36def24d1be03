"""Linears in fp8 between real processes: exactly on integers, against fp64 of the same rounded operands, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from overlap_train import (
    Fp8Copies,
    OverlapConfig,
    all_gather_linear,
    all_to_all_linear,
    linear_all_reduce,
    linear_reduce_scatter,
    shutdown,
)
from overlap_train.group.domain import OverlapDomain
from overlap_train.group.workspace import Workspace
from overlap_train.ops.quantize import Given, GivenScales
from tests.linear_cases import Case, column, row
from tests.processes import run_ranks, values

CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = {"x": E4M3, "w": E4M3, "dy": E5M2}
LINEARS = {"column": column, "row": row}
OPERATORS = {kind: linear.operator for kind, linear in LINEARS.items()}
SHAPES = (((16,), 32, 48), ((8, 2), 64, 32), ((4, 2, 2), 16, 16))


def case_of(method: str, dtype: torch.dtype, **settings: Any) -> Case:
    config = OverlapConfig(**{"method": method, "fp8": "tensorwise", "timeout_s": 30.0, **settings})
    return Case(dist.group.WORLD, CPU, config, dtype)


def exactly(rank: int, world: int, method: str, settings: dict[str, Any], shapes: tuple[Any, ...] = SHAPES) -> int:
    case = case_of(method, torch.bfloat16, **settings)
    for seed, shape in enumerate(shapes):
        for linear in LINEARS.values():
            linear(case, *shape, seed=seed, bias=seed % 2 == 0)
    shutdown()
    return len(shapes)


@pytest.mark.parametrize(
    ("method", "world", "settings"),
    [
        ("chunked", 3, {}),
        ("chunked", 2, {"gathered_input": "keep"}),
        ("collective", 2, {}),
        ("auto", 4, {"fp8": "tensorwise_e4m3"}),
    ],
)
def test_integers_exactly(method: str, world: int, settings: dict[str, Any]) -> None:
    assert values(run_ranks(world, exactly, method, settings, limit_s=60)) == [3] * world


def test_integers_exactly_by_words_with_flags() -> None:
    assert values(run_ranks(2, exactly, "low_latency", {}, limit_s=60)) == [3, 3]


def _barriers(rank: int, world: int) -> int:
    """Of all ranks, in the second step of six linears: an exchange of largest elements frees the slots that were used before."""
    case, workers = case_of("chunked", torch.float32), []
    for number in range(3):
        for kind, operator in OPERATORS.items():
            w, name = torch.randn(32, 32).requires_grad_(), f"{kind}{number}"
            workers.append(
                lambda x, w=w, f=operator, name=name: f(x, w, group=case.group, config=case.config, name=name)
            )
    for _ in range(2):
        y = torch.randn(16, 32).requires_grad_()
        with mock.patch.object(Workspace, "barrier", autospec=True, side_effect=Workspace.barrier) as barrier:
            for work in workers:
                y = work(y)
            y.sum().backward()
    return barrier.call_count


def test_linears_that_exchange_their_largest_elements_meet_at_no_barrier() -> None:
    assert values(run_ranks(2, _barriers, limit_s=60)) == [0, 0]


def _saved(rank: int, world: int) -> list[int]:
    """Elements that a column linear with a frozen weight saves, beside that."""
    case, saved = case_of("chunked", torch.float32), []
    x, w = torch.randn(16, 32).requires_grad_(), torch.randn(32, 32)
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        all_gather_linear(x, w, group=case.group, config=case.config)
    return [tensor.numel() for tensor in saved if tensor.data_ptr() != w.data_ptr()]


def test_a_frozen_weight_keeps_no_input() -> None:
    assert all(max(sizes) == 1 for sizes in values(run_ranks(2, _saved, limit_s=60)))


def rounded(x: torch.Tensor, dtype: torch.dtype, scale: float | None = None) -> torch.Tensor:
    """What x is after it was scaled, by its largest element if by no given scale, and rounded to fp8, in fp64."""
    scale_of_x = torch.finfo(dtype).max / x.abs().max() if scale is None else torch.tensor(scale)
    return (x * scale_of_x).to(dtype).double() / scale_of_x.double()


def right_results(
    kind: str, case: Case, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, rounded: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's y, dx and dw in fp64, from whole operands. What ranks gather is rounded as a whole, each shard of the others by
    itself.

    rounded(operand, name, of_dw): rounds it as a factor of dw, which sums over rows, or else of y or dx.
    """

    def mine(full: Any, dim: int) -> torch.Tensor:
        return full.chunk(case.world, dim)[case.rank]

    def of_ranks(full: torch.Tensor, dim: int, name: str) -> list[torch.Tensor]:
        return [rounded(shard, name, False) for shard in full.chunk(case.world, dim)]

    if kind == "column":
        dys, ws = of_ranks(dy, 1, "dy"), of_ranks(w, 0, "w")
        y = rounded(x, "x", False) @ ws[case.rank].t()
        dx = mine(sum(dy_shard_n @ w_shard_n for dy_shard_n, w_shard_n in zip(dys, ws, strict=True)), 0)
        return y, dx, rounded(mine(dy, 1), "dy", True).t() @ rounded(x, "x", True)
    xs, ws = of_ranks(x, 1, "x"), of_ranks(w, 1, "w")
    y = mine(sum(x_shard_k @ w_shard_k.t() for x_shard_k, w_shard_k in zip(xs, ws, strict=True)), 0)
    dx = rounded(dy, "dy", False) @ ws[case.rank]
    return y, dx, rounded(dy, "dy", True).t() @ rounded(mine(x, 1), "x", True)


def relative_errors(kind: str, found: Sequence[Any], right: Sequence[torch.Tensor]) -> dict[str, float]:
    """Of y, dx, dw and, where it is given, dbias: the largest error over the largest element."""
    names = [f"{kind} {name}" for name in ("y", "dx", "dw", "dbias")[: len(found)]]
    errors = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, right, strict=True)]
    return dict(zip(names, errors, strict=True))


def _unequal_shards(rank: int, world: int, keeps: bool) -> dict[str, float]:
    """The largest error of each result against fp64 of the whole operands, rounded as one tensor where they are gathered. Shards
    differ in size: a rank that took its own scale would be wrong by far."""
    case, errors = case_of("chunked", torch.float32, gathered_input="keep" if keeps else "regather"), {}
    random = torch.Generator().manual_seed(3)
    shapes = {"column": ((32, 48), (32 * world, 48), (32, 32 * world)), "row": ((48, 32), (48, 32), (48, 48))}

    def growing(full: torch.Tensor, dim: int) -> torch.Tensor:
        """From rank to rank."""
        return torch.cat([shard * 4.0**other for other, shard in enumerate(full.chunk(world, dim))], dim)

    for kind, linear in LINEARS.items():
        x, w, dy = (torch.randn(*shape, generator=random) for shape in shapes[kind])
        x, dy = growing(x, linear.x), growing(dy, 0)
        x_shard, w_shard, dy_shard = case.mine(x, linear.x), case.mine(w, linear.w), case.mine(dy, linear.y).detach()
        bias = torch.randn(len(w_shard), generator=random).requires_grad_()
        if kind == "column":
            w_shard.main_grad = torch.ones_like(w_shard)
        y = linear.operator(x_shard, w_shard, bias, group=case.group, config=case.config)
        y.backward(dy_shard)
        right_y, *right = right_results(kind, case, x, w, dy, lambda t, name, _: rounded(t, DTYPES[name]))
        found = y.detach(), x_shard.grad, w_shard.main_grad - 1 if kind == "column" else w_shard.grad, bias.grad
        expected = right_y + bias.detach(), *right, dy_shard.double().sum(0)
        errors |= relative_errors(kind, found, expected)
    return errors


@pytest.mark.parametrize("keeps", [False, True])
def test_what_is_gathered_has_one_scale(keeps: bool) -> None:
    for errors in values(run_ranks(2, _unequal_shards, keeps, limit_s=60)):
        assert len(errors) == 8 and max(errors.values()) < 1e-5, errors


def _strange_numbers(rank: int, world: int) -> list[bool]:
    """Zeros give zeros. What is no number, or infinite, on one rank shows on all of them."""
    case, found = case_of("chunked", torch.float32), []
    w = torch.ones(16, 16)
    for strange in (0.0, torch.inf, torch.nan):
        x = torch.zeros(16, 16) + (strange if rank == 1 else 0.0)
        y = all_gather_linear(x, w, group=case.group, config=case.config)
        found.append(bool(y.eq(0).all()) if strange == 0 else bool(y.isnan().all()))
    return found


def test_strange_numbers() -> None:
    assert values(run_ranks(2, _strange_numbers, limit_s=60)) == [[True] * 3] * 2


def _given(rank: int, world: int, kind: str, kept: bool) -> dict[str, float]:
    """Errors against fp64 of what is rounded by given scales, which their owner changes between forward and backward, and of what
    it is told; of one linear between two ranks."""
    case, linear, random = case_of("chunked", torch.float32), LINEARS[kind], torch.Generator().manual_seed(3)
    shapes = ((64, 48), (64, 48), (64, 64)) if kind == "column" else ((32, 96), (32, 96), (32, 32))
    x, w, dy = (torch.randn(*shape, generator=random) for shape in shapes)
    x_shard, w_shard, dy_shard = case.mine(x, linear.x), case.mine(w, linear.w), case.mine(dy, linear.y).detach()
    scales = [torch.tensor(scale) for scale in (16.0, 32.0, 4.0)]
    told = [torch.zeros(1) for _ in scales]
    w_shard.fp8_scales = GivenScales(*(Given(*pair) for pair in zip(scales, told, strict=True)))  # type: ignore[attr-defined]
    if kept:
        w_shard.fp8_copies = Fp8Copies()  # type: ignore[attr-defined]
    y = linear.operator(x_shard, w_shard, group=case.group, config=case.config)
    for scale, new in zip(scales, (1.0, 2.0, 8.0), strict=True):
        scale.fill_(new)
    y.backward(dy_shard)
    by = {"x": 16.0, "w": 32.0, "dy": 8.0}
    right = right_results(kind, case, x, w, dy, lambda t, name, _: rounded(t, DTYPES[name], by[name]))
    errors = relative_errors(kind, (y.detach(), x_shard.grad, w_shard.grad), right)
    for name, largest, operand in zip("xwd", told, (x_shard, w_shard, dy_shard), strict=True):
        errors[name] = float((largest - operand.abs().max()).abs())
    return errors


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_scales_that_are_given_are_those_of_forward(kind: str, kept: bool) -> None:
    for errors in values(run_ranks(2, _given, kind, kept, limit_s=60)):
        assert len(errors) == 6 and max(errors.values()) < 1e-5, errors


def _of_one_shape(rank: int, world: int, kind: str) -> list[float]:
    """Means of y, of weights of one shape in turn. 0.9 is 0.875 in e4m3 by the scale 1, which is given, else 0.9."""
    case, found = case_of("chunked", torch.float32), []
    x, given, plain = torch.full((16, 16), 0.9), torch.ones(16, 16), torch.ones(16, 16)
    given.fp8_scales = GivenScales(*[Given(torch.ones(()), None)] * 3)  # type: ignore[attr-defined]
    for w in (given, plain, given, plain):
        found.append(float(OPERATORS[kind](x, w, group=case.group, config=case.config).mean()))
    return found


@pytest.mark.parametrize("kind", ["column", "row"])
def test_weights_of_one_shape_have_scales_or_have_none(kind: str) -> None:
    summed = 16 * (2 if kind == "row" else 1)
    for found in values(run_ranks(2, _of_one_shape, kind, limit_s=60)):
        assert found == pytest.approx([0.875 * summed, 0.9 * summed] * 2)


REFUSALS = (  # of x and w of these shapes
    (all_gather_linear, (4, 16), (16, 16), "chunked", "8 rows of all ranks: not a multiple of 16"),
    (all_gather_linear, (16, 16), (24, 16), "chunked", r"w_shard_n \(24, 16\)"),
    (linear_all_reduce, (16, 16), (16, 16), "chunked", "linear_all_reduce has no form in fp8"),
    (all_to_all_linear, (16, 16), (16, 32), "chunked", "all_to_all_linear has no form in fp8"),
    (linear_reduce_scatter, (32, 16), (16, 16), "fused", "method='fused' with fp8=.*Hopper"),
)


def refused(rank: int, world: int, fp8: str, calls: tuple[Any, ...], fp8_of_rank_0: str, message: str) -> None:
    """Every rank hears why each call is refused, and then of a rank whose fp8 differs."""
    case = case_of("chunked", torch.float32, fp8=fp8)
    for operator, x, w, method, why in calls:
        with pytest.raises(ValueError, match=why):
            operator(torch.ones(x), torch.ones(w), group=case.group, config=case.config.by(method))
    own = case.config if rank else replace(case.config, fp8=fp8_of_rank_0)
    with pytest.raises(ValueError, match=message):
        all_gather_linear(torch.ones(128, 128), torch.ones(128, 128), group=case.group, config=own)


def test_refusals_are_told_to_every_rank() -> None:
    values(run_ranks(2, refused, "tensorwise", REFUSALS, "off", "regather, fp8=tensorwise", limit_s=60))


class Kept:
    """A weight with a holder, whose storage is NaN after each call: what is no NaN was made of the copies."""

    def __init__(self, operator: str, method: str = "chunked", **settings: Any) -> None:
        self.case, self.operator = case_of(method, torch.bfloat16, **settings), OPERATORS[operator]
        random = torch.Generator().manual_seed(self.case.rank)
        self.numbers = torch.randn(32, 48, generator=random).bfloat16()
        self.x = torch.randn(32, 48, generator=random).bfloat16()
        self.w = torch.nn.Parameter(self.numbers.clone())
        self.expected = self.call()
        self.w.fp8_copies = self.copies = Fp8Copies()  # type: ignore[attr-defined]

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self.operator(x, self.w, group=self.case.group, config=self.case.config)

    def call(self, apply: Callable[..., Any] | None = None, between: Callable[[], Any] = lambda: None) -> Any:
        """(y, dx, dw). between: is called before backward."""
        x, self.w.grad = self.x.clone().requires_grad_(), None
        y = (apply or self.apply)(x)
        between()
        y.backward(torch.ones_like(y) / 3)
        return y.detach(), x.grad, self.w.grad

    def change(self) -> None:
        self.w.data.fill_(torch.nan)

    def restore(self) -> None:
        self.w.data.copy_(self.numbers)
        self.copies.clear()

    def is_right(self, found: Any) -> bool:
        """To the bit. It is else NaN where the weight is a factor."""
        right = [torch.equal(a, b) for a, b in zip(found, self.expected, strict=True)]
        assert all(right) or (bool(found[0].isnan().all()) and bool(found[1].isnan().all())), right
        return all(right)


def _keeps(rank: int, world: int, operator: str) -> dict[str, bool]:
    kept, right = Kept(operator), {}
    for when in ("made", "taken"):
        right[when] = kept.is_right(kept.call())
        kept.change()
    right["recomputed"] = kept.is_right(kept.call(lambda x: checkpoint(kept.apply, x, use_reentrant=False)))
    with mock.patch.object(OverlapDomain, "is_capturing", return_value=True):
        right["captured"] = not kept.is_right(kept.call())
    right["kept from the capture"] = kept.is_right(kept.call())
    kept.copies.clear()
    right["cleared"] = not kept.is_right(kept.call())
    kept.restore()
    with torch.no_grad():
        right["no columns where nobody wants dx"] = torch.equal(kept.apply(kept.x), kept.expected[0])
    assert kept.copies.made is not None and kept.copies.made.columns is None
    kept.change()
    right["columns later"] = kept.is_right(kept.call())
    kept.restore()
    with saved_tensors_hooks(torch.clone, lambda x: x):
        right["backward's"] = kept.is_right(kept.call(between=kept.change))
    kept.restore()
    right["cleared before backward"] = kept.is_right(kept.call(between=kept.copies.clear))
    kept.change()
    right["for the next call, too"] = kept.is_right(kept.call())
    right["a copy of the holder is empty"] = copy.deepcopy(kept.copies).made is None
    with torch.no_grad():
        kept.w.fill_(torch.nan)
    right["a change that autograd knows of"] = not kept.is_right(kept.call())
    return right


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_weight_in_fp8_is_kept_until_its_owner_clears_it(operator: str) -> None:
    for right in values(run_ranks(2, _keeps, operator, limit_s=60)):
        assert all(right.values()) and len(right) == 13, right


def _while_methods_take_turns(rank: int, world: int, folder: str) -> list[bool]:
    """Whether calls find the copies of the one before: the first is the untuned plan's, methods take turns in the next ones."""
    kept = Kept("column", "auto", tune_steps=100, tuning_dir=folder)
    kept.call()
    kept.change()
    found = [bool(kept.call()[0].isnan().all()) for _ in range(3)]
    return [not each for each in found]


def test_methods_that_take_turns_all_quantise(tmp_path: Path) -> None:
    assert values(run_ranks(2, _while_methods_take_turns, str(tmp_path), limit_s=60)) == [[False] * 3] * 2
