"""Ranks that are slow, stopped or killed in the middle of an operator: the others say so by name, in time, and leave nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from overlap_train import (
    OverlapConfig,
    OverlapTimeoutError,
    all_gather_linear,
    all_to_all_linear,
    check,
    linear_all_to_all,
    linear_reduce_scatter,
)
from overlap_train.group.copy_engine import HostCopyEngine, Route
from overlap_train.group.registry import domain_of
from tests.processes import Outcome, run_ranks, values

TIMEOUT_S = 2.0
OPERATORS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_to_all", "all_to_all_linear")
Step = Callable[[OverlapConfig], torch.Tensor]


def _step(config: OverlapConfig, value: float = 1.0) -> torch.Tensor:
    world = dist.get_world_size()
    x = torch.full((4, 8), value, requires_grad=True)
    w = torch.ones(8, 8, requires_grad=True)
    hidden = all_gather_linear(x, w, group=dist.group.WORLD, config=config)
    y = linear_reduce_scatter(hidden, w, group=dist.group.WORLD, config=config)
    y.sum().backward()
    assert x.grad is not None
    assert bool((y == 64 * value * world).all())
    return x.grad


def _ulysses_step(config: OverlapConfig) -> torch.Tensor:
    x = torch.ones(4, 8, requires_grad=True)
    hidden = linear_all_to_all(x, torch.ones(12, 8, requires_grad=True), group=dist.group.WORLD, config=config)
    y = all_to_all_linear(hidden, torch.ones(8, 12, requires_grad=True), group=dist.group.WORLD, config=config)
    y.sum().backward()
    assert x.grad is not None
    assert bool((y == 12 * 8).all())
    return x.grad


def _victim(rank: int, world: int, method: str, how: str, where: str, step: Step = _step) -> str:
    """Rank 1 meets its end while it pushes (`where`) of the third step; the others tell what they saw. Of a process that is gone
    they hear, of one that stands still they do not."""
    hears = how == "SIGKILL" and method == "chunked"
    config = OverlapConfig(method=method, timeout_s=600.0 if hears else TIMEOUT_S)
    for _ in range(2):
        step(config)
    if rank == 1:
        _end_itself(config, how, where)
    try:
        for _ in range(3):
            step(config)
    except OverlapTimeoutError as error:
        with pytest.raises(OverlapTimeoutError):
            check()  # and it stays raised
        return str(error)
    return "no error"


def _end_itself(config: OverlapConfig, how: str, where: str) -> None:
    """Arrange that the copy engine of this rank kills or stops the process before, or in the middle of, a push."""
    engine = domain_of(dist.group.WORLD, config, torch.device("cpu")).engine
    assert isinstance(engine, HostCopyEngine)
    push = engine.push

    def last_push(source: torch.Tensor, routes: list[Route]) -> None:
        if where == "after the data":
            for item in (route.push(source.detach()) for route in routes):
                item.target.copy_(item.source)  # the signal will never follow
        os.kill(os.getpid(), getattr(signal, how))
        push(source, routes)

    engine.push = last_push  # type: ignore[method-assign]


def _shared_memory() -> set[str]:
    """Without semaphores: we have none, but Megatron's checkpoint writers do, in tests that run beside this one."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


@pytest.mark.parametrize(  # each pair of two of them once
    ("how", "where", "world", "step"),
    [
        ("SIGKILL", "before the data", 2, _step),
        ("SIGKILL", "after the data", 3, _step),
        ("SIGSTOP", "before the data", 3, _step),
        ("SIGSTOP", "after the data", 2, _step),
        ("SIGKILL", "after the data", 2, _ulysses_step),
        ("SIGSTOP", "before the data", 3, _ulysses_step),
    ],
)
def test_a_dead_or_stopped_rank_is_named_by_the_others(how: str, where: str, world: int, step: Step) -> None:
    before = _shared_memory()
    outcomes = run_ranks(world, _victim, "chunked", how, where, step, limit_s=40, grace_s=TIMEOUT_S + 3)
    ended = how == "SIGKILL"  # its peers see that its process is gone
    words = ["rank 1 of the group has ended"] if ended else ["expected epoch", "seen"]
    _check_survivors(outcomes, words)
    assert _shared_memory() <= before


def test_a_dead_rank_is_named_from_inside_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    outcomes = run_ranks(2, _victim, "fused", "SIGKILL", "before the data")
    _check_survivors(outcomes, ["of rank 1", "expected epoch", "seen"])


def _check_survivors(outcomes: list[Outcome], words: list[str]) -> None:
    victim = outcomes.pop(1)
    assert victim.value is None and victim.exit_code == -signal.SIGKILL  # the harness ends a stopped one
    for outcome in outcomes:
        assert outcome.value is not None, outcome.error
        assert any(f"{operator}/fprop" in outcome.value for operator in OPERATORS)
        assert all(word in outcome.value for word in words), outcome.value


def _straggler(rank: int, world: int) -> int:
    config = OverlapConfig(method="chunked", timeout_s=20.0)
    for number in range(6):
        if rank == number % world:
            time.sleep(0.15)
        _step(config, float(number + 1))
    return 6


def test_stragglers_change_nothing() -> None:
    assert values(run_ranks(3, _straggler)) == [6, 6, 6]


def _crash_anywhere(rank: int, world: int, delay_s: float) -> None:
    """Every rank is killed at some moment between the first allocation and the tenth step."""
    import threading

    threading.Timer(delay_s * (1 + rank), lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    while True:
        _step(OverlapConfig(method="chunked", timeout_s=TIMEOUT_S))


@pytest.mark.parametrize("delay_s", [0.01, 0.1, 0.4])
def test_nothing_stays_in_shared_memory_whenever_ranks_die(delay_s: float) -> None:
    before = _shared_memory()
    outcomes = run_ranks(2, _crash_anywhere, delay_s, limit_s=20)
    assert any(outcome.exit_code == -signal.SIGKILL for outcome in outcomes)
    assert _shared_memory() <= before


def _maps(rank: int, world: int) -> list[str]:
    _step(OverlapConfig(method="chunked"))
    lines = Path("/proc/self/maps").read_text().splitlines()
    # Shared ones only: the project's folder, from which libraries are mapped, may have the same name.
    return [line for line in lines if "overlap_train" in line and line.split()[1].endswith("s")]


def test_the_heap_is_shared_memory_without_a_name() -> None:
    """Guards the test above against looking in the wrong place: the mappings exist, and none has a path that stays."""
    for lines in values(run_ranks(2, _maps)):
        assert len(lines) >= 2 and all("memfd:overlap_train (deleted)" in line for line in lines)


def _other_terms(rank: int, world: int, setting: str) -> str:
    x, w = torch.ones(4, 8), torch.ones(8, 8)
    config = OverlapConfig(**{setting: 64 + rank})
    with pytest.raises(ValueError) as caught:
        all_gather_linear(x, w, group=dist.group.WORLD, config=config)
    return str(caught.value)


@pytest.mark.parametrize("setting", ["symmetric_mib", "exchange_mib"])
def test_ranks_with_other_limits_are_refused_before_memory_is_allocated(setting: str) -> None:
    """One rank alone would find its heap too small, or make it larger than the others' (exchange_mib)."""
    first, second = values(run_ranks(2, _other_terms, setting, limit_s=30))
    assert f"this rank has {setting}=64, rank 1 of the group has {setting}=65; all ranks" in first, "and only that"
    assert f"{setting}=65" in second.partition("rank 0")[0]


def _wrong_on_one_rank(rank: int, world: int) -> list[str]:
    x, w = torch.ones(4, 8), torch.ones(8, 8)
    odd = torch.ones(4 + rank, 8)
    calls = [
        lambda: linear_reduce_scatter(odd, w, group=dist.group.WORLD, name="odd"),
        lambda: all_gather_linear(x, w.half() if rank == 0 else w, group=dist.group.WORLD, name="half"),
        lambda: all_gather_linear(x if rank else x[:2], w, group=dist.group.WORLD, name="shapes"),
        lambda: all_gather_linear(torch.ones(1 << 20, 96), torch.ones(1, 96), group=dist.group.WORLD, name="big"),
    ]
    config = OverlapConfig(method="chunked" if rank else "collective")
    calls.append(lambda: all_gather_linear(x, w, group=dist.group.WORLD, name="method", config=config))
    other = OverlapConfig(gathered_input="keep" if rank else "regather")
    calls.append(lambda: all_gather_linear(x, w, group=dist.group.WORLD, name="policy", config=other))
    messages = []
    for call in calls:
        with pytest.raises(ValueError) as caught:
            call()
        messages.append(str(caught.value))
    _step(OverlapConfig())  # and the group still works
    return messages


def test_wrong_arguments_raise_on_every_rank() -> None:
    for odd, half, shapes, big, method, policy in values(run_ranks(2, _wrong_on_one_rank)):
        assert "(5, 8)" in odd and "divisible by the group's 2 ranks" in odd
        assert "torch.float16" in half and "w_shard_n" in half
        assert "method chunked" in method and "method collective" in method
        assert "gathered_input=keep" in policy and "gathered_input=regather" in policy
        assert "input [2, 8]" in shapes and "input [4, 8]" in shapes and "same shapes" in shapes
        assert "symmetric_mib=2048" in big and "needs 2305 MiB" in big and "--overlap-train-symmetric-mib" in big
