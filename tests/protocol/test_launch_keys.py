"""Launches that a call remembers under one key differ in nothing that Triton compiles a kernel for, such as alignment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_train import OverlapConfig
from overlap_train.gpu.launch import Launch, LaunchCache
from overlap_train.gpu.ptx_check import kinds
from tests.linear_cases import OPERATORS, Case
from tests.processes import run_ranks, values


def _compiled_for(launch: Launch) -> Hashable:
    """What a launch's kernel is compiled for, and what it is told for good."""
    tensors = {name: x for name, x in launch.arguments.items() if isinstance(x, torch.Tensor)}
    if launch.kernel.fn.__name__.startswith("low_latency"):  # which are not specialised on the alignment of operands
        seen: Hashable = tuple((name, x.dtype) for name, x in tensors.items())
    else:
        seen = kinds(tensors, {})
    replaced = {name for names in launch.replaced for name in names}
    return seen, tuple((name, x.data_ptr()) for name, x in tensors.items() if name not in replaced)


class Shifted(Case):
    """Operands on 16 bytes, or an element beside them: x where `places` has a 1 for it, then weight, then bias."""

    places = (0, 0, 0)

    def mine(self, full: torch.Tensor, dim: int | None) -> torch.Tensor:
        whole = super().mine(full, dim).detach()
        first = self.places[2 if whole.dim() == 1 else whole.shape[0] in (40, 40 * self.world)]  # bias, weight or x
        return torch.zeros(whole.numel() + 1)[first:][: whole.numel()].view(whole.shape).copy_(whole).requires_grad_()


def _launches(rank: int, world: int, method: str) -> int:
    """How many binaries the calls of all operators that the method serves have run."""
    found: dict[Hashable, set[Hashable]] = defaultdict(set)
    caches: dict[int, LaunchCache] = {}  # kept: one that comes after the heap has grown has no other's id

    def run(cache: LaunchCache, key: Hashable, given: tuple[int, ...], describe: Any, *told: Any) -> None:
        launch = describe(*told)
        assert len(given) == len(launch.replaced)
        caches[id(cache)] = cache
        found[id(cache), key].add(_compiled_for(launch))
        launch.through_triton()

    case: Any = Shifted(dist.group.WORLD, torch.device("cpu"), OverlapConfig(method=method, timeout_s=30.0))
    with mock.patch.object(LaunchCache, "run", run):
        for _ in range(4):  # in three each slot has had each
            known = set(found)
            for Shifted.places in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
                for name in ("column", "row") if method == "low_latency" else OPERATORS:
                    for bias in (False, True):
                        OPERATORS[name](case, (6, 1), 24, 40, bias=bias)
    assert set(found) == known, "a turn has launches of its own: on a GPU each call would be packed anew"
    assert all(len(binaries) == 1 for binaries in found.values()), "one key, several binaries"
    return len({seen for binaries in found.values() for seen, _ in binaries})


@pytest.mark.parametrize(("method", "kernels"), [("fused", 4), ("direct", 4), ("low_latency", 1)])
def test_launches_of_one_key_are_compiled_alike(method: str, kernels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for binaries in values(run_ranks(2, _launches, method)):
        assert binaries > kernels, "every operand was aligned once, and once was not"
