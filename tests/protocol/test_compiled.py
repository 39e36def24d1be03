"""Linears in graphs of torch.compile, which may not break there: values and gradients are those of eager mode, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from overlap_train import (
    Fp8Copies,
    OverlapConfig,
    all_gather_linear,
    linear_all_reduce,
    linear_all_to_all,
    linear_dgrad_all_reduce,
    linear_reduce_scatter,
)
from overlap_train.ops.quantize import Given, GivenScales
from tests.processes import run_ranks, values

OPERATORS = (all_gather_linear, linear_reduce_scatter, linear_dgrad_all_reduce, linear_all_reduce)
Function = Callable[..., torch.Tensor]


def _config(**settings: Any) -> OverlapConfig:
    return OverlapConfig(**{"method": "chunked", "timeout_s": 20.0} | settings)


def _called(operator: Function, config: OverlapConfig, **settings: Any) -> Function:
    """The operator between two other operations."""

    def call(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return operator(x * 1, w, bias, group=group, config=config, **settings) + 1

    group = dist.group.WORLD
    return call


def _leaf(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(*shape))


class _Layer(torch.nn.Module):
    def __init__(self, call: Function, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.call, self.weight = call, weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x, self.weight)


def _results(call: Function, *leaves: torch.Tensor | None) -> list[torch.Tensor | None]:
    """y, and the gradients of the leaves."""
    for leaf in leaves:
        if leaf is not None:
            leaf.grad = None
            if hasattr(leaf, "main_grad"):
                leaf.main_grad.zero_()
    y = call(*leaves)
    y.backward(torch.arange(y.numel()).reshape(y.shape) / 7)
    gradients = [leaf if leaf is None else leaf.grad for leaf in leaves]
    return [y.detach(), *gradients, *(leaf.main_grad.clone() for leaf in leaves if hasattr(leaf, "main_grad"))]


def _check(backend: str, call: Function, *leaves: torch.Tensor | None, **settings: Any) -> None:
    torch.compiler.reset()
    expected = _results(call, *leaves)
    found = _results(torch.compile(call, backend=backend, fullgraph=True, **settings), *leaves)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) is (other is None)
        assert one is None or (torch.equal(one, other) and one.stride() == other.stride())


def _what_is_trained(backend: str, operator: Function) -> None:
    call = _called(operator, _config())
    for middle, trained in (((2,), "xwb"), ((), "w"), ((2,), "x"), ((), "b")):
        leaves = [_leaf(4, *middle, 8), _leaf(6, 8), _leaf(6)]
        _check(backend, call, *(leaf.requires_grad_(name in trained) for leaf, name in zip(leaves, "xwb", strict=True)))
    _check(backend, _called(operator, _config(gathered_input="keep")), _leaf(4, 8), _leaf(6, 8), dynamic=True)


def _strides(backend: str, operator: Function) -> None:
    call = _called(operator, _config())
    _check(backend, lambda x, w: call(x.transpose(0, 1), w.t() * 2), _leaf(2, 4, 8), _leaf(8, 6))
    w = torch.nn.Parameter(torch.randn(8, 6).t())
    w.main_grad, w.grad_added_to_main_grad, w.zero_out_wgrad = torch.zeros(6, 8), False, True
    _check(backend, lambda x, w: call(x[..., ::2], w).mul_(2), _leaf(4, 16), w)


def _main_grad(backend: str, operator: Function) -> None:
    for marked in (True, False):
        call, x, w = _called(operator, _config()), _leaf(4, 8), _leaf(6, 8)
        w.main_grad = torch.zeros(6, 8)
        if marked:
            w.grad_added_to_main_grad = False
        compiled = torch.compile(call, backend=backend, fullgraph=True)

        def micro_batches(call: Function, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
            w.main_grad.zero_()
            w.grad = None
            first, second = call(x, w).sum(), call(x * 2, w).sum()
            for loss in (first, second):
                loss.backward(retain_graph=True)
            first.backward()
            assert (w.grad is not None) is marked and getattr(w, "grad_added_to_main_grad", True)  # noqa: B023
            (call(x, w).sum() + w.sum()).backward()
            assert not getattr(w, "grad_added_to_main_grad", False) and w.grad is not None
            return w.main_grad.clone(), *torch.autograd.grad(call(x, w).sum(), x), w.main_grad.clone()

        assert all(map(torch.equal, micro_batches(compiled, x, w), micro_batches(call, x, w)))
        hook = w.register_hook(lambda gradient: None)
        with pytest.raises(RuntimeError, match="its weight has a hook"):
            compiled(x, w).sum().backward()
        hook.remove()
    torch.compiler.reset()
    w = torch.nn.Parameter(torch.randn(6, 8))
    compiled = torch.compile(_Layer(call, w), backend=backend, fullgraph=True)
    compiled(x).sum().backward()
    w.main_grad, w.grad = torch.zeros(6, 8), None
    said = ""
    try:
        compiled(x).sum().backward()
    except RuntimeError as error:
        said = str(error)
    # torch 2.11 traces again only where a weight is an argument.
    assert "was set, or taken away, after torch.compile" in said or (w.grad is None and w.main_grad.any())
    w.main_grad.zero_()
    _check(backend, _called(operator, _config(main_grad="off")), x, w)
    assert not w.main_grad.any()


@contextmanager
def _counted(operator: Function) -> Iterator[list[str]]:
    """The passes of an operator as they run."""
    from overlap_train import compiled

    passes, function = [], compiled._OPERATORS[operator.__name__][1]
    with pytest.MonkeyPatch.context() as patched:
        for name in ("forward", "backward"):
            real = getattr(function, name)

            def run(*arguments: Any, real: Any = real, name: str = name) -> Any:
                passes.append(name)
                return real(*arguments)

            patched.setattr(function, name, staticmethod(run))
        yield passes


def _neither_merged_nor_dropped(backend: str, operator: Function) -> None:
    call, x, w = _called(operator, _config()), _leaf(4, 8).requires_grad_(False), _leaf(6, 8)
    w.main_grad = torch.zeros(6, 8)

    def thrice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        call(x, w)
        return call(x, w) + call(x, w)

    torch.compiler.reset()
    compiled = torch.compile(thrice, backend=backend, fullgraph=True)
    with _counted(operator) as passes:
        found = _results(compiled, x, w)
        assert passes == ["forward"] * 3 + ["backward"] * 2
        with torch.no_grad():
            compiled(x, w)
        assert passes[5:] == ["forward"] * 3
    assert torch.equal(found[-1], _results(thrice, x, w)[-1])


def _lengths_and_checkpointing(backend: str, operator: Function) -> None:
    call, w = _called(operator, _config()), _leaf(6, 8)
    w.main_grad, w.grad_added_to_main_grad = torch.zeros(6, 8), False
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    torch.compiler.reset()
    compiled = torch.compile(call, backend=graphs, fullgraph=True)
    for length in (4, 6, 8, 10):
        x = torch.randn(length, 2, 8, requires_grad=True)  # Dynamo takes lengths of parameters as constant
        y, dx, *_, main_grad = _results(call, x, w)
        found = _results(compiled, x, w)
        assert torch.equal(found[0], y) and torch.equal(found[1], dx) and torch.equal(found[-1], main_grad)
        for each in (call, compiled):
            with torch.no_grad():
                assert torch.equal(each(x, w), y)
    assert graphs.frame_count <= 4, graphs.frame_count

    def recomputed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x, w: call(torch.relu(x), w).relu(), x, w, use_reentrant=False)

    for each in (recomputed, lambda x, w: checkpoint(compiled, x, w, use_reentrant=False)):
        y, dx, *_, main_grad = _results(each, x, w)
        found = _results(torch.compile(each, backend=backend, fullgraph=each is recomputed), x, w)
        assert torch.equal(found[0], y) and torch.equal(found[1], dx) and torch.equal(found[-1], main_grad)


def _in_fp8(backend: str, operator: Function) -> None:
    if operator not in (all_gather_linear, linear_reduce_scatter):
        return
    for fp8, x, w in (
        ("tensorwise", _leaf(32, 1, 32), _leaf(16, 32)),
        ("blockwise", _leaf(256, 1, 128), _leaf(128, 128)),
    ):
        for copies in (None, Fp8Copies()):
            if copies is not None:
                w.fp8_copies = copies
            _check(backend, _called(operator, _config(fp8=fp8)), x, w)
    w = _leaf(16, 32)
    w.fp8_scales = GivenScales(*[Given(torch.tensor(2.0), None)] * 3)
    _check(backend, _called(operator, _config(fp8="tensorwise")), _leaf(32, 1, 32), w)


def _broken_graphs(backend: str, operator: Function) -> None:
    x, w, plans = _leaf(4, 8), _leaf(6, 8), []
    call = _called(operator, _config(), on_plan=lambda plan, _: plans.append(plan))
    assert all(map(torch.equal, _results(torch.compile(call, backend=backend), x, w), _results(call, x, w)))
    assert len(plans) == 2
    with pytest.raises(ValueError, match="they must be equal"):
        torch.compile(_called(operator, _config()), backend=backend)(x, _leaf(6, 9))
    compiled = torch.compile(_called(operator, _config()), backend=backend)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        compiled(x, w)
    for transformed in (
        torch.compile(torch.func.vmap(_called(operator, _config()), (0, None)), backend=backend),
        torch.func.vmap(compiled, (0, None)),
    ):
        with pytest.raises(ValueError, match=r"torch\.func"):
            transformed(torch.ones(2, 4, 8), w)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        compiled(forward_ad.make_dual(x, torch.ones_like(x)), w)


CHECKS = (
    _what_is_trained, _strides, _main_grad, _neither_merged_nor_dropped, _lengths_and_checkpointing, _in_fp8, _broken_graphs,
)  # fmt: skip


def _refused_in_a_whole_graph(rank: int, world: int) -> None:
    """Dynamo says why the graph would break, and what to do, and not that it cannot trace its own `disable`."""
    calls = (
        (all_gather_linear, torch.ones(6, 4)),
        (linear_all_to_all, torch.ones(6, 8)),
    )  # features that do not fit; Ulysses
    for operator, w in calls:
        compiled = torch.compile(_called(operator, _config()), backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"arguments do not fit; without fullgraph=True"):
            compiled(torch.ones(4, 8), w)


def _compiled(
    rank: int, world: int, backend: str, checks: tuple[Callable[[str, Function], None], ...], *operators: Function
) -> int:
    torch.manual_seed(rank)
    for check, operator in product(checks, operators):
        check(backend, operator)
    from overlap_train import compiled

    return len(compiled._tickets)


@pytest.fixture(autouse=True)
def _dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # the Megatron tests set it


def test_a_compiled_linear_does_what_eager_mode_does() -> None:
    assert values(run_ranks(2, _compiled, "aot_eager", CHECKS, *OPERATORS, limit_s=300)) == [0, 0]


def test_a_whole_graph_that_would_break_says_why() -> None:
    values(run_ranks(1, _refused_in_a_whole_graph, limit_s=60))


def test_graphs_that_are_not_compiled_further() -> None:
    assert values(run_ranks(2, _compiled, "eager", CHECKS, linear_reduce_scatter, limit_s=100)) == [0, 0]


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++ for CPUs")
def test_inductor_keeps_calls_and_strides() -> None:
    checks = (_strides, _neither_merged_nor_dropped)
    assert values(run_ranks(2, _compiled, "inductor", checks, linear_reduce_scatter, limit_s=200)) == [0, 0]
