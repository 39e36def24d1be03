"""One test for each path a parallel linear can take: the overlapped ones give Megatron's numbers, the others run its
code.

Each compares values and gradients with Megatron's own linear on the same weights, and asserts by the counters that
the path it is about is the one that ran.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import checkpoint

from overlap_train import OverlapConfig
from tests.megatron import layout
from tests.megatron.linears import (
    BATCH,
    FEATURES_IN,
    FEATURES_OUT,
    OFFLOADED,
    SEQUENCE,
    Pair,
    assert_same,
    column_pair,
    fall_back,
    integers,
    row_pair,
    run,
)
from tests.megatron.workers import on_ranks

METHODS = ("chunked", "collective")


def column_input(sequence: int = SEQUENCE) -> torch.Tensor:
    """This rank's rows of a sequence-parallel input, [s/W, b, K]."""
    group = layout.use()
    return integers(sequence, BATCH, FEATURES_IN, seed=3).chunk(group.size())[group.rank()]


def row_input(sequence: int = SEQUENCE) -> torch.Tensor:
    """This rank's features of the input of a row-parallel linear, [s, b, K/W]."""
    group = layout.use()
    return integers(sequence, BATCH, FEATURES_IN, seed=4).chunk(group.size(), dim=-1)[group.rank()]


def check(pair: Pair, x: torch.Tensor, reason: str | None, **arguments: Any) -> None:
    """The same numbers from both linears, and one call on the expected path."""
    assert_same(run(pair.own, x, **arguments), run(pair.overlapped, x, **arguments))
    assert pair.counts == ((1, {}) if reason is None else (0, {reason: 1}))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("arguments", [{"bias": False}, {"skip_bias_add": False}, {"skip_bias_add": True}], ids=str)
@on_ranks
def test_linears_overlap(method: str, arguments: dict[str, Any]) -> None:
    check(column_pair(OverlapConfig(method=method), **arguments), column_input(), reason=None)
    check(row_pair(OverlapConfig(method=method), **arguments), row_input(), reason=None)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@on_ranks
def test_sixteen_bit_linears_overlap(method: str, dtype: torch.dtype) -> None:
    """Sums stay below 256, so that even bf16 holds each of them exactly."""
    changes = {"config_changes": {"params_dtype": dtype}}
    overlap = OverlapConfig(method=method)
    check(column_pair(overlap, **changes), column_input().to(dtype), reason=None)
    check(row_pair(overlap, **changes), row_input().to(dtype), reason=None)


@on_ranks
def test_column_overlaps_with_the_gathered_input_kept() -> None:
    check(column_pair(OverlapConfig(gathered_input="keep")), column_input(), reason=None)


@on_ranks
def test_output_layer_with_tied_weight_overlaps() -> None:
    """The output layer has no weight of its own where embeddings are tied; multi-token prediction calls it
    repeatedly."""
    pair = column_pair(bias=False, skip_weight_param_allocation=True)
    results = []
    for linear in (pair.own, pair.overlapped):
        weight = integers(FEATURES_OUT // 2, FEATURES_IN, seed=8 + layout.use().rank()).requires_grad_()
        x = column_input().requires_grad_()
        first, _ = linear(x, weight=weight)
        second, _ = linear(2 * x, weight=weight)
        (first * integers(*first.shape, seed=1) + second * integers(*second.shape, seed=2)).sum().backward()
        results.append({"first": first, "second": second, "grad of x": x.grad, "grad of weight": weight.grad})
    assert_same(*results)
    assert pair.counts == (2, {})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("arguments", [{}, {"bias": False}, {"skip_bias_add": True}], ids=str)
@on_ranks
def test_without_sequence_parallelism_they_all_reduce(method: str, arguments: dict[str, Any]) -> None:
    arguments, overlap = {"config_changes": {"sequence_parallel": False}, **arguments}, OverlapConfig(method=method)
    check(column_pair(overlap, **arguments), integers(*WHOLE), reason=None)
    check(row_pair(overlap, **arguments), row_input(), reason=None)
    check(row_pair(overlap, **arguments), row_input()[:-1], reason=None)  # rows that the ranks do not divide


@pytest.mark.parametrize("at_run_time", [False, True], ids=["gather_output", "runtime_gather_output"])
@on_ranks
def test_gathering_the_output_stays_megatrons(at_run_time: bool) -> None:
    pair = column_pair(gather_output=not at_run_time)
    check(pair, column_input(), reason=None, **({"runtime_gather_output": True} if at_run_time else {}))
    assert run(pair.overlapped, column_input(), runtime_gather_output=True)["y"].shape[-1] == FEATURES_OUT


EXPERT = "expert: the token dispatcher communicates (see --overlap-train-experts)"
WHOLE = (SEQUENCE, BATCH, FEATURES_IN)
BUILT = {  # reason -> how both linears are built, and what they get
    "tensor-parallel size 1: nothing to communicate": ({"tensor_parallel": 1}, lambda: (integers(*WHOLE), integers(*WHOLE))),
    EXPERT: ({"is_expert": True, "skip_bias_add": True}, lambda: (column_input(), row_input())),
}  # fmt: skip


@pytest.mark.parametrize("reason", BUILT)
@on_ranks
def test_linears_that_were_built_not_to_exchange_fall_back(reason: str) -> None:
    arguments, inputs = BUILT[reason]
    pairs = column_pair(**arguments), row_pair(**arguments)
    for pair, x in zip(pairs, inputs(), strict=True):
        check(pair, x, reason)


@on_ranks
def test_attributes_are_read_on_every_call() -> None:
    """GPTModel switches it off on the output layer for inference, after construction, and back on."""
    pair = column_pair()
    for linear in (pair.own, pair.overlapped):
        linear.sequence_parallel = False
    reason = "sequence_parallel was switched off: Megatron all-reduces the input's gradient itself"
    check(pair, integers(SEQUENCE, BATCH, FEATURES_IN), reason)
    pair.overlapped.sequence_parallel = True
    pair.overlapped(column_input())
    assert pair.counts[0] == 1


SWITCHED: dict[str, Callable[[Any, bool], Any]] = {  # reason -> what Megatron, or a user, switches on a built linear
    OFFLOADED: lambda linear, on: fall_back(linear, on),
    EXPERT: lambda linear, on: setattr(linear, "explicit_expert_comm", on),  # SharedExpertMLP
}


@pytest.mark.parametrize("x_trained", [True, False])
@on_ranks
def test_frozen_weights_and_evaluation_overlap(x_trained: bool) -> None:
    """Calls with a gradient, without one, and in inference mode, also mixed."""
    for pair, x in ((column_pair(), column_input()), (row_pair(), row_input())):
        results = []
        for linear in (pair.own, pair.overlapped):
            linear.requires_grad_(False).eval()
            leaf = x.clone().requires_grad_(x_trained)
            y = linear(leaf)[0]
            with torch.no_grad():
                without = linear(leaf)[0]
            with torch.inference_mode():
                inferred = linear(leaf)[0].clone()
            linear.weight.requires_grad_()
            last = linear(leaf)[0]
            (y + last if x_trained else last).backward(integers(*y.shape, seed=77))
            results.append({"y": y, "no_grad": without, "inference": inferred, "x": leaf.grad, "w": linear.weight.grad})
        assert_same(*results)
        assert pair.counts == (4, {})


@pytest.mark.parametrize("reason", SWITCHED)
@on_ranks
def test_linears_fall_back_while_something_is_switched_off(reason: str) -> None:
    for pair, x in ((column_pair(), column_input()), (row_pair(skip_bias_add=True), row_input())):
        for linear in (pair.own, pair.overlapped):
            SWITCHED[reason](linear, True)
        check(pair, x, reason)
        SWITCHED[reason](pair.overlapped, False)
        run(pair.overlapped, x)
        assert pair.counts == (1, {reason: 1}), "overlaps again"


REASON_NO_REDUCE = "disable_grad_reduce: the caller reduces the input's gradient"


@on_ranks
def test_disabled_gradient_reduction_falls_back() -> None:
    check(column_pair(disable_grad_reduce=True), column_input(), REASON_NO_REDUCE)


@on_ranks
def test_autocast_to_another_dtype_falls_back() -> None:
    """Forward only: Megatron's own backward of a column linear reduces bf16 into fp32 here, which gloo refuses."""
    for pair, x in ((column_pair(), column_input()), (row_pair(), row_input())):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            own, overlapped = (linear(x)[0].detach() for linear in (pair.own, pair.overlapped))
        assert_same({"y": own}, {"y": overlapped})
        assert pair.counts == (0, {"autocast to torch.bfloat16 of torch.float32 tensors": 1})


@on_ranks
def test_recomputation_inside_backward() -> None:
    """Full and selective recomputation: the first forward runs without autograd, the second inside backward."""
    for pair, x in ((column_pair(), column_input()), (row_pair(), row_input())):
        results = []
        for linear in (pair.own, pair.overlapped):
            leaf = x.clone().requires_grad_()
            y = checkpoint(lambda x, linear=linear: linear(x)[0], False, leaf)
            y.backward(integers(*y.shape, seed=77))
            results.append({"y": y, "grad of x": leaf.grad, "grad of weight": linear.weight.grad})
        assert_same(*results)
        assert pair.counts == (2, {})


@pytest.mark.parametrize("reverse", [False, True], ids=["first in, first out", "last in, first out"])
@on_ranks
def test_microbatches_in_flight(reverse: bool) -> None:
    """Pipeline schedules run several forwards before the first backward: nothing saved may live in a reused buffer."""
    for make, shard in ((column_pair, column_input), (row_pair, row_input)):
        pair = make()
        results = []
        for linear in (pair.own, pair.overlapped):
            inputs = [(k * shard()).requires_grad_() for k in (1.0, 2.0, 3.0)]
            outputs = [linear(x)[0] for x in inputs]
            for y in reversed(outputs) if reverse else outputs:
                y.backward(integers(*y.shape, seed=77))
            grads = {f"grad of input {k}": x.grad for k, x in enumerate(inputs)}
            values = {f"output {k}": y.detach() for k, y in enumerate(outputs)}
            results.append({**values, **grads, "grad of weight": linear.weight.grad})
        assert_same(*results)
        assert pair.counts == (3, {})


@on_ranks
def test_sequence_length_may_change_between_calls() -> None:
    column_linears, row_linears = column_pair(), row_pair()
    lengths = (4, 16, 2, 10)
    for length in lengths:
        for pair, x in ((column_linears, column_input(length)), (row_linears, row_input(length))):
            for linear in (pair.own, pair.overlapped):
                linear.zero_grad()
            assert_same(run(pair.own, x), run(pair.overlapped, x))
    assert column_linears.counts == row_linears.counts == (len(lengths), {})


@on_ranks
def test_indivisible_sequence_is_megatrons_error() -> None:
    pair = row_pair()
    for linear in (pair.own, pair.overlapped):
        with pytest.raises(AssertionError, match="divisible"):
            linear(row_input(7))
    assert pair.counts == (0, {"sequence of 7 is not divisible by the 2 ranks": 1})


@pytest.mark.parametrize("main_grad", ["accumulate", "off"])
@on_ranks
def test_deferred_weight_gradient_falls_back(main_grad: str) -> None:
    """With defer_embedding_wgrad_compute the output layer puts dy aside, and Megatron computes dW after the
    pipeline."""
    pair, buffers = column_pair(OverlapConfig(main_grad=main_grad), bias=False), []
    for linear in (pair.own, pair.overlapped):
        linear.config = copy.copy(linear.config)
        linear.config.defer_embedding_wgrad_compute, linear.config.wgrad_deferral_limit = True, 0
        linear.embedding_activation_buffer, linear.grad_output_buffer = [], []
        linear.gradient_accumulation_fusion = True  # Megatron defers with fusion only
        linear.weight.main_grad = torch.zeros_like(linear.weight)
        buffers.append(linear.grad_output_buffer)
    check(pair, column_input(), "the weight gradient is deferred (defer_embedding_wgrad_compute)")
    assert pair.overlapped.weight.grad is None
    torch.testing.assert_close(buffers[0], buffers[1], rtol=0, atol=0)
    assert len(buffers[0]) == 1


@on_ranks
def test_inputs_that_are_not_contiguous() -> None:
    for pair, x in ((column_pair(), column_input()), (row_pair(), row_input())):
        transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
        assert not transposed.is_contiguous()
        results = []
        for linear in (pair.own, pair.overlapped):
            leaf = transposed.detach().requires_grad_()
            y, _ = linear(leaf)
            y.backward(integers(y.size(1), y.size(0), y.size(2)).transpose(0, 1))
            results.append({"y": y, "grad of x": leaf.grad, "grad of weight": linear.weight.grad})
        assert_same(*results)
