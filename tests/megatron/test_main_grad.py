"""Where the weight gradient goes: main_grad where Megatron's DDP looks for it there, weight.grad everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import provide_accumulation_fusion
from tests.megatron.linears import OFFLOADED, Pair, column_pair, fall_back, integers, row_pair, run
from tests.megatron.te_stand_in import WeightGradStore
from tests.megatron.test_path_matrix import column_input, row_input
from tests.megatron.workers import Workers, on_ranks

KINDS = ("column", "row")
START = 5.0  # what main_grad holds before: an earlier microbatch
GRADIENTS = [("accumulate", torch.float32), ("accumulate", torch.bfloat16), ("off", torch.float32)]


def make(kind: str, **config: str) -> tuple[Pair, torch.Tensor, torch.Tensor]:
    """Both linears, their input, and the gradient that Megatron's own has for its weight."""
    overlap = OverlapConfig(**config)
    pair, x = (column_pair(overlap), column_input()) if kind == "column" else (row_pair(overlap), row_input())
    return pair, x, run(pair.own, x)["grad of weight"]


def as_in_ddp(weight: torch.nn.Parameter, dtype: torch.dtype = torch.float32) -> None:
    """What DDP does to a parameter."""
    weight.main_grad = torch.full_like(weight, START, dtype=dtype)
    weight.grad_added_to_main_grad = False


def accumulated(kind: str) -> None:
    pair, x, expected = make(kind)
    weight = pair.overlapped.weight
    as_in_ddp(weight)
    run(pair.overlapped, x)
    assert weight.grad_added_to_main_grad
    as_ddps_hook(weight)
    assert torch.equal(weight.main_grad, START + expected)


def accumulated_from_bf16(kind: str) -> None:
    """The products of 16-bit tensors are added in fp32: 1/4096 survives next to 216, which bf16 could not hold."""
    pair, x, expected = make(kind)
    linear = pair.overlapped.bfloat16()
    as_in_ddp(linear.weight)
    linear.weight.main_grad.fill_(1 / 4096)
    run(linear, x.bfloat16())
    assert torch.equal(linear.weight.main_grad, expected + 1 / 4096)


def steps(linear: Any, x: torch.Tensor, passes: str) -> int:
    """Backward passes, apart by spaces, each over calls that overlap (o), calls that fall back (f) and penalties on the weight,
    whose gradient is 1 (p). After each pass DDP's hook runs. Returns the number of calls."""
    weight = linear.weight
    for each in passes.split():
        outputs = [weight.sum() if use == "p" else fall_back(linear, use == "f")(x)[0] for use in each]
        torch.autograd.backward(outputs, [integers(*y.shape, seed=77) if y.dim() else torch.ones(()) for y in outputs])
        as_ddps_hook(weight)
    return passes.count("o") + passes.count("f")


def gradients_of_others(kind: str) -> None:
    """A loss that uses the weight itself, or an embedding that shares it, counts in whatever pass and order. Beside a call that
    falls back it does not with Megatron's fusion, unless it is known that an embedding shares the weight."""
    provide_accumulation_fusion()
    for passes, fused, marks in (
        ("op o po p o", False, {}),
        ("op o po p o", True, {}),
        ("p o of", True, {}),
        ("fo ofp pfo f p", False, {}),
        ("fo ofp pfo f p", True, {"shared_embedding": True}),
        ("fo o op p", True, {"shared_embedding": True, "zero_out_wgrad": True}),
    ):
        pair, x, expected = make(kind)
        linear = pair.overlapped
        linear.gradient_accumulation_fusion, linear.config.mtp_num_layers = fused, 1
        as_in_ddp(linear.weight)
        for name, value in marks.items():
            setattr(linear.weight, name, value)
        calls = steps(linear, x, passes)
        expected = START + calls * expected + passes.count("p")
        assert torch.equal(linear.weight.main_grad, expected), (passes, fused, marks)


def returned(kind: str) -> None:
    """Switched off; a 16-bit main_grad, to which DDP's hook adds weight.grad itself; one that nobody has marked, which belongs to
    somebody who reads weight.grad, as Megatron leaves it."""
    for config, dtype, is_marked in (
        ("off", None, True),
        ("accumulate", torch.bfloat16, True),
        ("accumulate", None, False),
    ):
        pair, x, expected = make(kind, main_grad=config)
        as_in_ddp(pair.overlapped.weight, dtype or torch.float32)
        if not is_marked:
            del pair.overlapped.weight.grad_added_to_main_grad
        returned_in_grad(pair, x, expected)


def returned_in_grad(pair: Pair, x: torch.Tensor, expected: torch.Tensor) -> None:
    weight = pair.overlapped.weight
    assert torch.equal(run(pair.overlapped, x)["grad of weight"], expected)
    assert (weight.main_grad == START).all()
    assert not getattr(weight, "grad_added_to_main_grad", False)
    assert pair.counts == (1, {})


def fusion_without_ddp(kind: str) -> None:
    """--gradient-accumulation-fusion asks for main_grad by itself; Megatron then returns no gradient."""
    pair, x, expected = make(kind)
    pair.overlapped.gradient_accumulation_fusion = True
    pair.overlapped.weight.main_grad = torch.full_like(pair.overlapped.weight, START)
    assert run(pair.overlapped, x)["grad of weight"] is None
    assert torch.equal(pair.overlapped.weight.main_grad, START + expected)


def tripled(weight: torch.Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(3)


def hooks_of_a_user(kind: str) -> None:
    """A hook on the weight sees its gradient and may change it, in calls of both kinds."""
    provide_accumulation_fusion()
    for fusion in (False, True):
        pair, x, expected = make(kind)
        linear = pair.overlapped
        linear.gradient_accumulation_fusion = fusion
        as_in_ddp(linear.weight)
        handle = linear.weight.register_hook(lambda gradient: 2 * gradient)
        for falls_back in (False, True):
            assert torch.equal(run(fall_back(linear, falls_back), x)["grad of weight"], 2 * expected)
            linear.weight.grad = None
        handle.remove()
        handle = linear.weight.register_post_accumulate_grad_hook(tripled)
        assert torch.equal(run(fall_back(linear, False), x)["grad of weight"], 3 * expected)
        assert not linear.weight.grad_added_to_main_grad and (linear.weight.main_grad == START).all()
        handle.remove()
        run(linear, x)
        assert linear.weight.grad_added_to_main_grad, "nobody looks any more"


def fsdp(kind: str) -> None:
    pair, x, expected = make(kind)
    pair.overlapped.weight.__fsdp_param__ = True
    as_in_ddp(pair.overlapped.weight)
    assert torch.equal(run(pair.overlapped, x)["grad of weight"], expected)
    assert pair.counts == (0, {"Megatron-FSDP owns the weight's gradient": 1})


def as_ddps_hook(weight: torch.nn.Parameter) -> None:
    assert weight.grad is not None, "DDP's hook insists on a gradient, of whatever content"
    if not weight.grad_added_to_main_grad or getattr(weight, "zero_out_wgrad", False):
        weight.main_grad.add_(weight.grad)
    weight.grad = None


def a_hook_between_two_micro_batches(kind: str) -> None:
    """Or between a forward and its backward: the hook sees the gradient, and DDP adds it to what is there."""
    pair, x, expected = make(kind)
    weight, seen = pair.overlapped.weight, list[torch.Tensor]()
    as_in_ddp(weight)
    run(pair.overlapped, x)
    as_ddps_hook(weight)
    y = pair.overlapped(x)[0]
    handle = weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    y.backward(integers(*y.shape, seed=77))
    as_ddps_hook(weight)
    handle.remove()
    run(pair.overlapped, x)
    as_ddps_hook(weight)
    assert len(seen) == 1 and torch.equal(seen[0], expected)
    assert torch.equal(weight.main_grad, START + 3 * expected)


def a_gradient_that_is_taken(kind: str) -> None:
    """By torch.autograd.grad, in overlapped calls and in those that fall back: nothing is added."""
    pair, x, expected = make(kind)
    weight = pair.overlapped.weight
    as_in_ddp(weight)
    for falls_back in (False, True):
        y = fall_back(pair.overlapped, falls_back)(x)[0]
        (dw,) = torch.autograd.grad(y, weight, integers(*y.shape, seed=77))
        assert torch.equal(dw, expected)
    assert (weight.main_grad == START).all() and not weight.grad_added_to_main_grad


def delayed(kind: str) -> None:
    """Two micro-batches leave their products to the weight's store: nothing is added before it is emptied, then all."""
    for main_grad in ("accumulate", "off"):
        pair, x, expected = make(kind, main_grad=main_grad)
        weight, store = pair.overlapped.weight, WeightGradStore(True)
        as_in_ddp(weight)
        weight.wgrad_store = store
        for _ in range(2):
            run(pair.overlapped, x)
            assert weight.grad_added_to_main_grad == (main_grad == "accumulate")
            assert main_grad == "accumulate" or weight.grad is None
            weight.grad = None
        assert (weight.main_grad == START).all()
        for _ in range(2):
            store.pop()
        found = weight.main_grad - START if main_grad == "accumulate" else weight.grad
        assert torch.equal(found, 2 * expected) and not found.requires_grad
        store.is_enabled = False
        run(pair.overlapped, x)
        found = weight.main_grad - START if main_grad == "accumulate" else weight.grad
        assert torch.equal(found, 3 * expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fusion", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize(("main_grad", "dtype"), GRADIENTS, ids=str)
@on_ranks
def test_calls_that_fall_back_do_as_overlapped_ones(
    kind: str, fusion: bool, main_grad: str, dtype: torch.dtype
) -> None:
    """main_grad has both gradients, whatever its dtype is, and whether a call adds there or returns."""
    provide_accumulation_fusion()
    for passes in ("o f", "f o", "of", "fo"):
        pair, x, expected = make(kind, main_grad=main_grad)
        linear = pair.overlapped
        linear.gradient_accumulation_fusion = fusion
        as_in_ddp(linear.weight, dtype)
        steps(linear, x, passes)
        assert expected.abs().max() < 100, "bf16 holds all sums of it"
        assert torch.equal(linear.weight.main_grad.float(), START + 2 * expected)
        assert pair.counts == (1, {OFFLOADED: 1})


def fused_by_fsdp(kind: str) -> None:
    """What FSDP owns is Megatron's affair, fusion included: it makes main_grad in backward."""
    pair, x, expected = make(kind)
    linear, asked = pair.overlapped, []
    linear.gradient_accumulation_fusion, linear.weight.__fsdp_param__ = True, True
    whole = torch.zeros_like(linear.weight)
    linear.weight.get_main_grad = lambda: asked.append(1) or whole
    run(linear, x)
    assert asked and torch.equal(whole, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case",
    [
        accumulated,
        accumulated_from_bf16,
        gradients_of_others,
        returned,
        fusion_without_ddp,
        hooks_of_a_user,
        a_hook_between_two_micro_batches,
        a_gradient_that_is_taken,
        delayed,
        fsdp,
        fused_by_fsdp,
    ],
    ids=lambda case: case.__name__,
)
def test_main_grad(workers: Workers, case: Callable[[str], None], kind: str) -> None:
    workers.call(case, kind)
