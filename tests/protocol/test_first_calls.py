"""First calls: what ranks agree on, how often, and that a rank which cannot or does not take part is named in time."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_train import (
    OverlapConfig,
    OverlapMismatchError,
    OverlapTimeoutError,
    all_gather_linear,
    linear_dgrad_all_reduce,
    linear_reduce_scatter,
    shutdown,
)
from overlap_train.group import slots
from overlap_train.group.registry import made_domain
from overlap_train.ops import plan_cache as plan_book
from tests.processes import run_ranks, values

TIMEOUT_S = 2.0


def _column(config: OverlapConfig, rows: int = 4, name: str = "fc1", **kinds: bool) -> torch.Tensor:
    x, w = torch.ones(rows, 8), torch.ones(8, 8)
    for tensor, trained in ((x, kinds.get("x", False)), (w, kinds.get("w", False))):
        tensor.requires_grad_(trained)
    return all_gather_linear(x, w, group=dist.group.WORLD, config=config, name=name)


def _plans() -> Any:
    """Of the only group."""
    (cache,) = plan_book._caches.values()
    return cache.plans


def _layers(rank: int, world: int) -> tuple[int, int, int]:
    """80 layers of one shape, forward and backward: how often ranks agreed, how many plans there are, and how many kinds of calls
    a slot knows. Each has launches of its own."""
    with mock.patch.object(plan_book, "prepare", side_effect=plan_book.prepare) as prepare:
        for layer in range(80):
            _column(OverlapConfig(method="chunked"), name=f"layers.{layer}.fc1", x=True, w=True).sum().backward()
    domain = made_domain(dist.group.WORLD)
    assert domain is not None
    return prepare.call_count, len(_plans()), max(len(slot.calls) for slot in domain.workspace.slots)


def test_80_layers_of_one_shape_agree_once() -> None:
    assert values(run_ranks(2, _layers)) == [(1, 1, 1)] * 2


def _many_lengths(rank: int, world: int) -> tuple[int, int]:
    plan_book._MOST_CALLS = slots._MOST_CALLS = 2  # of this process; at most twice that is kept
    for rows in [*range(1, 11), *range(1, 11)]:
        y = _column(OverlapConfig(method="chunked"), rows=rows)
        assert bool((y == 8).all())
    domain = made_domain(dist.group.WORLD)
    assert domain is not None
    return len(_plans()), max(len(one.calls) for one in domain.workspace.slots)


def test_a_bounded_number_of_shapes_is_remembered() -> None:
    for plans, calls in values(run_ranks(2, _many_lengths)):
        assert plans <= 4 and calls <= 4


def _absent(rank: int, world: int, how: str) -> tuple[str, float]:
    """Rank 1 does not come to the first call, or not to that of a second shape."""
    config = OverlapConfig(method="chunked", timeout_s=TIMEOUT_S)
    if how == "second shape":
        _column(config)
    if rank == 1:
        time.sleep(TIMEOUT_S + 1.5)
        return "", 0.0
    begin = time.monotonic()
    with pytest.raises(OverlapTimeoutError) as caught, pytest.warns(UserWarning, match=f"rank {rank} has waited"):
        _column(config, rows=8)
    return str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize("how", ["first call", "second shape"])
def test_a_rank_that_does_not_come_is_named_in_time(how: str) -> None:
    message, seconds = values(run_ranks(3, _absent, how, limit_s=40))[0]
    assert "fc1" in message
    # rank 2 may have given up, too, a moment before
    assert re.search(
        r"rank 0 waited 2 s for ranks? 1(, 2)? of the group|rank 2 .*raised .*ranks? (0, )?1 of", message
    ), message
    assert seconds <= TIMEOUT_S + 2.0


def _without_memory(rank: int, world: int) -> list[str]:
    """Rank 1 may map no more memory; then it may open no more files. Both shapes that worked go on working."""
    config, messages = OverlapConfig(method="chunked", timeout_s=10.0), []
    _column(config)
    for kind, rows in ((resource.RLIMIT_AS, 1 << 18), (resource.RLIMIT_NOFILE, 1 << 18)):
        before = resource.getrlimit(kind)
        if rank == 1:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            least = used + (1 << 24) if kind == resource.RLIMIT_AS else 3
            resource.setrlimit(kind, (least, before[1]))
        with pytest.raises(RuntimeError) as caught:
            _column_of(rows, config)
        resource.setrlimit(kind, before)
        messages.append(str(caught.value))
        assert bool((_column(config) == 8).all())
    assert bool((_column_of(1 << 18, config) == 1).all())
    return messages


def _column_of(rows: int, config: OverlapConfig) -> torch.Tensor:
    """32 bytes a row, so that its slots take megabytes."""
    x, w = torch.ones(1, 8).expand(rows, 8), torch.full((1, 8), 1 / 8)
    return all_gather_linear(x, w, group=dist.group.WORLD, config=config, name="large")


def test_a_rank_that_cannot_have_memory_is_named_on_every_rank() -> None:
    for memory, files in values(run_ranks(2, _without_memory, limit_s=60)):
        for message in (memory, files):
            assert "open shared memory: rank 1: " in message and "rank 0:" not in message


def _frozen_on_one_rank(rank: int, world: int) -> tuple[str, str]:
    """w; and x where only its gradient communicates, which decides how, and in how much memory."""
    config, w = OverlapConfig(method="chunked"), torch.ones(8, 8, requires_grad=True)
    x = torch.ones(4, 8, requires_grad=rank == 0)
    with pytest.raises(ValueError) as of_w:
        _column(config, x=True, w=rank == 0)
    with pytest.raises(ValueError) as of_x:
        linear_dgrad_all_reduce(x, w, group=dist.group.WORLD, config=config)
    return str(of_w.value), str(of_x.value)


def test_ranks_that_train_different_operands_are_told() -> None:
    for of_w, of_x in values(run_ranks(2, _frozen_on_one_rank)):
        assert "w trained" in of_w and "w frozen" in of_w
        assert "x trained" in of_x and "x frozen" in of_x


def _bias_on_one_rank(rank: int, world: int) -> str:
    config, bias = OverlapConfig(method="chunked"), torch.ones(8) if rank == 0 else None
    for own in (bias, None, torch.ones(8) if rank else None):
        all_gather_linear(torch.ones(4, 8), torch.ones(8, 8), own, group=dist.group.WORLD, config=config)
    with pytest.raises(ValueError) as caught:
        linear_reduce_scatter(torch.ones(4, 8), torch.ones(8, 8), bias, group=dist.group.WORLD, config=config)
    return str(caught.value)


def test_ranks_of_which_one_has_no_bias_are_told() -> None:
    """Its rows would lack it. A column linear's is each rank's own."""
    for message in values(run_ranks(2, _bias_on_one_rank)):
        assert "float32, bias, method" in message and "float32, method" in message


def _only_collectives(rank: int, world: int) -> bool:
    y = _column(OverlapConfig(method="collective"), x=True, w=True)
    y.sum().backward()
    domain = made_domain(dist.group.WORLD)
    assert domain is not None
    return domain.heap is None


def test_the_method_collective_needs_no_symmetric_memory() -> None:
    assert values(run_ranks(2, _only_collectives)) == [True] * 2


def _groups_in_other_order(rank: int, world: int) -> str:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    config = OverlapConfig(method="chunked", timeout_s=10.0)
    first = _in_thread(groups[rank], config)
    second = _in_thread(groups[1 - rank], config)
    for thread in (first, second):
        thread.join()
    shutdown()
    return "ended"


def _in_thread(group: dist.ProcessGroup, config: OverlapConfig):  # type: ignore[no-untyped-def]
    """Two groups that are used for the first time at once, as by two parts of a program."""
    import threading

    def run() -> None:
        linear_reduce_scatter(torch.ones(4, 8), torch.ones(8, 8), group=group, config=config)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_groups_that_were_first_used_in_different_orders_end_together() -> None:
    assert values(run_ranks(2, _groups_in_other_order, limit_s=40)) == ["ended"] * 2


def _compiled(rank: int, world: int) -> tuple[bool, int, int]:
    """Whether values and gradients are there; how many graphs torch.compile has made of what comes before the linear, and after;
    how many compiled autograd makes of a backward pass.

    The group is found outside: in a function that asks for `dist.group.WORLD`, torch.compile compiles nothing.
    """
    graphs, compiler = [], torch._dynamo.lookup_backend("aot_eager")

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return compiler(graph, inputs)

    group, config, w = dist.group.WORLD, OverlapConfig(method="chunked"), torch.ones(8, 8, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return all_gather_linear(x * 2, w, group=group, config=config, on_plan=lambda *_: None) + 1

    x = torch.ones(4, 8, requires_grad=True)
    y = torch.compile(block, backend=counting)(x)
    y.sum().backward()
    forward, dx, dw = len(graphs), x.grad.clone(), w.grad.clone()
    x.grad = w.grad = None
    loss = block(x).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=counting)):
        loss.backward()
    right = (y == 17).all() and torch.equal(x.grad, dx) and torch.equal(w.grad, dw)
    return bool(right), forward, len(graphs) - forward


def test_torch_compile_leaves_calls_with_a_callback_to_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # the Megatron tests set it
    assert values(run_ranks(2, _compiled, limit_s=100)) == [(True, 2, 2)] * 2


def _bfloat16_interpreted(rank: int, world: int) -> str:
    x, w = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(8, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError) as caught:
        all_gather_linear(x, w, group=dist.group.WORLD, config=OverlapConfig(method="fused"))
    return str(caught.value)


def test_bfloat16_in_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies their bit patterns."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for message in values(run_ranks(2, _bfloat16_interpreted)):
        assert "multiplies their bit patterns" in message and "'chunked'" in message


def _other_layout(rank: int, world: int) -> bool:
    """Weights of one shape, of which one lies elsewhere in memory on one rank: its peers need not know."""
    config, x = OverlapConfig(method="chunked", timeout_s=5.0), torch.ones(4, 8)
    flat = torch.ones(65)
    strange = flat[1:].view(8, 8) if rank else flat[:64].view(8, 8)
    transposed = torch.ones(8, 8).t() if rank else torch.ones(8, 8)
    for w in (torch.ones(8, 8), strange, transposed):
        assert bool((all_gather_linear(x, w, group=dist.group.WORLD, config=config) == 8).all())
    return True


def test_how_a_weight_lies_in_memory_is_each_ranks_own_affair() -> None:
    assert values(run_ranks(2, _other_layout, limit_s=40)) == [True] * 2


def _after_a_failed_start(rank: int, world: int) -> bool:
    """Rank 1's first call is wrong before anybody can agree; all shut down and start again."""
    config = OverlapConfig(method="chunked", timeout_s=TIMEOUT_S)
    with pytest.raises(ValueError if rank else OverlapTimeoutError):
        _column("chunked" if rank else config)  # type: ignore[arg-type]
    dist.barrier()
    shutdown()
    return bool((_column(config) == 8).all())


def test_a_first_call_that_was_wrong_on_one_rank_can_be_made_again() -> None:
    assert values(run_ranks(2, _after_a_failed_start, limit_s=40)) == [True] * 2


def _too_late(rank: int, world: int) -> str:
    """Rank 1 comes when rank 0 has given up: it must not believe that all are there."""
    config = OverlapConfig(method="collective", timeout_s=TIMEOUT_S)
    _column(config)
    if rank == 1:
        time.sleep(TIMEOUT_S + 1.5)
    with pytest.raises(OverlapTimeoutError) as caught:
        _column(config)
    return str(caught.value)


def test_a_rank_that_comes_too_late_is_told() -> None:
    first, second = values(run_ranks(2, _too_late, limit_s=40))
    assert "waited 2 s for rank 1 of the group" in first and "rank 1" in second and "rank 0 of the group" in second


def _known_and_new(rank: int, world: int) -> str:
    config = OverlapConfig(method="collective", timeout_s=10.0)
    _column(config)
    with pytest.raises(OverlapMismatchError) as caught:
        _column(config, rows=4 + 4 * rank)
    return str(caught.value)


def test_a_known_call_beside_a_new_one_is_named() -> None:
    for message in values(run_ranks(2, _known_and_new, limit_s=40)):
        assert "fc1" in message and "same calls" in message


def _other_names(rank: int, world: int) -> str:
    with pytest.raises(ValueError) as caught:
        _column(OverlapConfig(method="chunked"), name=f"fc{rank}")
    return str(caught.value)


def test_names_are_the_same_on_all_ranks() -> None:
    first, second = values(run_ranks(2, _other_names, limit_s=40))
    assert "calls it 'fc1'" in first and "calls it 'fc0'" in second
