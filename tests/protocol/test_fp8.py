"""Linears in fp8 between real processes: exactly on integers, against fp64 of the same rounded operands, and refusals."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
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
SHAPES = (((16,), 32, 48), ((8, 2), 64, 32), ((4, 2, 2), 16, 16))


def _case(method: str, dtype: torch.dtype, **settings: Any) -> Case:
    config = OverlapConfig(**{"method": method, "fp8": "tensorwise", "timeout_s": 30.0, **settings})
    return Case(dist.group.WORLD, CPU, config, dtype)


def _exactly(rank: int, world: int, method: str, settings: dict[str, Any]) -> int:
    case = _case(method, torch.bfloat16, **settings)
    for seed, shape in enumerate(SHAPES):
        column(case, *shape, seed=seed, bias=seed % 2 == 0)
        row(case, *shape, seed=seed, bias=seed % 2 == 0)
    shutdown()
    return len(SHAPES)


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
    assert values(run_ranks(world, _exactly, method, settings, limit_s=60)) == [3] * world


def test_integers_exactly_by_words_with_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert values(run_ranks(2, _exactly, "low_latency", {}, limit_s=60)) == [3, 3]


def _barriers(rank: int, world: int) -> int:
    """Of all ranks, in the second step of six linears: an exchange of largest elements frees the slots that were used before."""
    case, workers = _case("chunked", torch.float32), []
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
    case, saved = _case("chunked", torch.float32), []
    x, w = torch.randn(16, 32).requires_grad_(), torch.randn(32, 32)
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        all_gather_linear(x, w, group=case.group, config=case.config)
    return [tensor.numel() for tensor in saved if tensor.data_ptr() != w.data_ptr()]


def test_a_frozen_weight_keeps_no_input() -> None:
    assert all(max(sizes) == 1 for sizes in values(run_ranks(2, _saved, limit_s=60)))


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What x is after it was scaled by its largest element and rounded to fp8, in fp64."""
    scale = torch.finfo(dtype).max / x.abs().max()
    return (x * scale).to(dtype).double() / scale.double()


def _unequal_shards(rank: int, world: int, keeps: bool) -> dict[str, float]:
    """The largest error of each result against fp64 of the whole operands, rounded as one tensor where they are gathered. Shards
    differ in size: a rank that took its own scale would be wrong by far."""
    case = _case("chunked", torch.float32, gathered_input="keep" if keeps else "regather")
    sizes = torch.tensor([4.0**other for other in range(world)])
    random = torch.Generator().manual_seed(3)
    x, w, dy = (torch.randn(*shape, generator=random) for shape in ((32, 48), (32 * world, 48), (32, 32 * world)))
    x = x * sizes.repeat_interleave(32 // world)[:, None]
    mine, errors = (lambda full, dim: full.chunk(world, dim)[rank]), {}

    def note(what: str, found: torch.Tensor, right: torch.Tensor) -> None:
        errors[what] = float((found.double() - right).abs().max() / right.abs().max())

    x_leaf, w_leaf, gradient = case.mine(x, 0), case.mine(w, 0), mine(dy, 1)
    w_leaf.main_grad = torch.ones_like(w_leaf)
    bias = torch.randn(32, generator=random).requires_grad_()
    y = all_gather_linear(x_leaf, w_leaf, bias, group=case.group, config=case.config)
    y.backward(gradient)
    x8, w8s, dy8s = (
        rounded(x, E4M3),
        [rounded(s, E4M3) for s in w.chunk(world)],
        [rounded(s, E5M2) for s in dy.chunk(world, 1)],
    )
    note("column y", y.detach(), x8 @ w8s[rank].t() + bias.detach())
    note("column dbias", bias.grad, gradient.double().sum(0))
    note("column dx", x_leaf.grad, mine(sum(a @ b for a, b in zip(dy8s, w8s, strict=True)), 0))  # type: ignore[arg-type]
    note("column dw", w_leaf.main_grad - 1, dy8s[rank].t() @ x8)
    # row: x of other features a rank, dy of other rows
    x, w, dy = x.t().contiguous(), w.t().contiguous(), torch.randn(48, 48, generator=random)
    dy, w = dy * sizes.repeat_interleave(48 // world)[:, None], torch.randn(48, 32, generator=random)
    x_leaf, w_leaf, bias = case.mine(x, 1), case.mine(w, 1), torch.randn(48, generator=random)
    y = linear_reduce_scatter(x_leaf, w_leaf, bias, group=case.group, config=case.config)
    y.backward(mine(dy, 0))
    x8s, w8s, dy8 = (
        [rounded(s, E4M3) for s in x.chunk(world, 1)],
        [rounded(s, E4M3) for s in w.chunk(world, 1)],
        rounded(dy, E5M2),
    )
    note("row y", y.detach(), mine(sum(a @ b.t() for a, b in zip(x8s, w8s, strict=True)), 0) + bias)  # type: ignore[arg-type]
    note("row dx", x_leaf.grad, dy8 @ w8s[rank])
    note("row dw", w_leaf.grad, dy8.t() @ x8s[rank])
    return errors


@pytest.mark.parametrize("keeps", [False, True])
def test_what_is_gathered_has_one_scale(keeps: bool) -> None:
    for errors in values(run_ranks(2, _unequal_shards, keeps, limit_s=60)):
        assert len(errors) == 7 and max(errors.values()) < 1e-5, errors


def _strange_numbers(rank: int, world: int) -> list[bool]:
    """Zeros give zeros. What is no number, or infinite, on one rank shows on all of them."""
    case, found = _case("chunked", torch.float32), []
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
    case, errors, random = _case("chunked", torch.float32, fp8="tensorwise"), {}, torch.Generator().manual_seed(rank)
    x, w, dy = (
        torch.randn(*shape, generator=random) for shape in ((32, 48), (32, 48), (64 if kind == "column" else 16, 32))
    )
    scales = [torch.tensor(scale) for scale in (16.0, 32.0, 4.0)]
    told = [torch.zeros(1) for _ in scales]
    x_leaf, w_leaf = x.clone().requires_grad_(), torch.nn.Parameter(w.clone())
    w_leaf.fp8_scales = GivenScales(*(Given(*pair) for pair in zip(scales, told, strict=True)))  # type: ignore[attr-defined]
    if kept:
        w_leaf.fp8_copies = Fp8Copies()  # type: ignore[attr-defined]
    y = OPERATORS[kind](x_leaf, w_leaf, group=case.group, config=case.config)
    for scale, new in zip(scales, (1.0, 2.0, 8.0), strict=True):
        scale.fill_(new)
    y.backward(dy)

    def rounded_by(operand: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
        return (operand * scale).to(dtype).double() / scale

    def whole(shard: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(shard) for _ in range(world)]
        dist.all_gather(parts, shard)
        return torch.cat(parts)

    def summed(partial: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(partial)
        return partial.chunk(world)[rank]

    x8, w8, dy8 = rounded_by(x, 16.0, E4M3), rounded_by(w, 32.0, E4M3), rounded_by(dy, 8.0, E5M2)
    if kind == "column":
        right = whole(x8) @ w8.t(), summed(dy8 @ w8), dy8.t() @ whole(x8)
    else:
        right = summed(x8 @ w8.t()), whole(dy8) @ w8, whole(dy8).t() @ x8
    for name, found, expected in zip(("y", "dx", "dw"), (y.detach(), x_leaf.grad, w_leaf.grad), right, strict=True):
        errors[name] = float((found.double() - expected).abs().max() / expected.abs().max())  # type: ignore[union-attr]
    for name, found, operand in zip("xwd", told, (x, w, dy), strict=True):
        errors[name] = float((found - operand.abs().max()).abs())
    return errors


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_scales_that_are_given_are_those_of_forward(kind: str, kept: bool) -> None:
    for errors in values(run_ranks(2, _given, kind, kept, limit_s=60)):
        assert len(errors) == 6 and max(errors.values()) < 1e-5, errors


def _of_one_shape(rank: int, world: int, kind: str) -> list[float]:
    """Means of y, of weights of one shape in turn. 0.9 is 0.875 in e4m3 by the scale 1, which is given, else 0.9."""
    case, found = _case("chunked", torch.float32), []
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


def _refusals(rank: int, world: int) -> list[str]:
    case, said = _case("chunked", torch.float32), []
    calls = (
        lambda: all_gather_linear(torch.ones(4, 16), torch.ones(16, 16), group=case.group, config=case.config),
        lambda: all_gather_linear(torch.ones(16, 16), torch.ones(24, 16), group=case.group, config=case.config),
        lambda: linear_all_reduce(torch.ones(16, 16), torch.ones(16, 16), group=case.group, config=case.config),
        lambda: all_to_all_linear(torch.ones(16, 16), torch.ones(16, 32), group=case.group, config=case.config),
        lambda: linear_reduce_scatter(torch.ones(32, 16), torch.ones(16, 16), group=case.group, config=case.config.by("fused")),
        lambda: all_gather_linear(
            torch.ones(16, 16), torch.ones(16, 16), group=case.group,
            config=case.config if rank else OverlapConfig(method="chunked", timeout_s=30.0),
        ),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_refusals_are_told_to_every_rank() -> None:
    for said in values(run_ranks(2, _refusals, limit_s=60)):
        patterns = (
            "8 rows of all ranks: not a multiple of 16", r"w_shard_n \(24, 16\)", "linear_all_reduce has no form in fp8",
            "all_to_all_linear has no form in fp8", "method='fused' with fp8=.*Hopper",
            "regather, fp8=tensorwise",
        )  # fmt: skip
        assert all(map(re.search, patterns, said)), said


OPERATORS = {"column": all_gather_linear, "row": linear_reduce_scatter}


class Kept:
    """A weight with a holder, whose storage is NaN after each call: what is no NaN was made of the copies."""

    def __init__(self, operator: str, method: str = "chunked", **settings: Any) -> None:
        self.case, self.operator = _case(method, torch.bfloat16, **settings), OPERATORS[operator]
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


def _in_a_trial(rank: int, world: int, folder: str) -> list[bool]:
    """Whether calls find the copies of the one before: the first is the untuned plan's, methods take turns in the next ones."""
    kept = Kept("column", "auto", tune_steps=100, tuning_dir=folder)
    kept.call()
    kept.change()
    found = [bool(kept.call()[0].isnan().all()) for _ in range(3)]
    return [not each for each in found]


def test_methods_that_take_turns_all_quantise(tmp_path: Path) -> None:
    assert values(run_ranks(2, _in_a_trial, str(tmp_path), limit_s=60)) == [[False] * 3] * 2
