"""Which settings of a group's first call hold for all later ones, and which devices and groups are refused."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_train import OverlapConfig, OverlapTimeoutError, check
from overlap_train.group import registry

CPU = torch.device("cpu")
FIRST = OverlapConfig(provider="host", symmetric_mib=64, timeout_s=5.0)


class Group:
    """As a process group: compared by identity."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One of two ranks, whose domain was made with FIRST."""
    group = Group(2)
    domain = SimpleNamespace(device=CPU, world_size=2, config=FIRST, closed=False)
    monkeypatch.setattr(registry, "_domains", {group: domain})
    return group


@pytest.mark.parametrize("config", [None, FIRST, replace(FIRST), replace(FIRST, method="chunked", slots=("qkv",))])
def test_calls_may_differ_in_what_the_domain_does_not_keep(group: Any, config: OverlapConfig | None) -> None:
    assert registry.domain_of(group, config, CPU) is registry.made_domain(group)


@pytest.mark.parametrize(("name", "value"), [("provider", "auto"), ("symmetric_mib", 65), ("timeout_s", 6.0)])
def test_another_provider_size_or_limit_is_refused(group: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}={value!r}, but the group's domain was made with .*shutdown"):
        registry.domain_of(group, replace(FIRST, **{name: value}), CPU)


def test_another_device_and_a_group_that_has_changed_are_refused(group: Any) -> None:
    with pytest.raises(ValueError, match="input is on meta, but the group's symmetric memory is on cpu"):
        registry.domain_of(group, None, torch.device("meta"))
    group.ranks = 3
    with pytest.raises(ValueError, match="group has 3 ranks, its symmetric memory 2"):
        registry.domain_of(group, None, CPU)


def test_a_failure_in_any_group_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises() -> None:
        raise OverlapTimeoutError("fc1")

    checks = [lambda: None, raises, lambda: None]
    domains = {number: SimpleNamespace(fault=SimpleNamespace(check=one)) for number, one in enumerate(checks)}
    monkeypatch.setattr(registry, "_domains", domains)
    with pytest.raises(OverlapTimeoutError):
        check()


def test_two_threads_make_one_domain(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks count the domains of a group: peers that have made one would wait for each other elsewhere."""
    both, made = threading.Barrier(2), []

    def make(*_: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # for the other one, which may come this far, too
        made.append(SimpleNamespace(device=CPU, world_size=2, config=FIRST, closed=False))
        return made[-1]

    monkeypatch.setattr(registry, "_domains", {})
    monkeypatch.setattr(registry, "OverlapDomain", make)
    monkeypatch.setattr(registry.dist, "get_rank", lambda group: 0)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: registry.domain_of(group, FIRST, CPU), range(2))
    assert first is second and len(made) == 1
