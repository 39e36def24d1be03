"""What an operator writes (the peers' blocks and no other byte), keeps for backward (x as asked) and leaves (nothing)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_train import (
    AttentionHeads,
    OverlapConfig,
    SequenceShards,
    all_gather_linear,
    all_to_all_linear,
    linear_all_to_all,
    linear_reduce_scatter,
    qkv_all_to_all,
    shutdown,
)
from overlap_train.group.registry import domain_of
from overlap_train.group.slots import BARRIER
from overlap_train.ranks.agreement import Agreement
from overlap_train.symmetric import host
from tests.linear_cases import Case, poison
from tests.processes import run_ranks, values

# Chunks of 3 x 37 elements: 64 + 47, so that the last piece that a kernel stores ends neither with a chunk nor with a vector.
ROWS, FEATURES = 6, 37


def _case(method: str, **settings: Any) -> Case:
    config = OverlapConfig(method=method, timeout_s=30.0, **settings)
    return Case(dist.group.WORLD, torch.device("cpu"), config)


def _writes(rank: int, world: int) -> None:
    """Blocks are of [ROWS, FEATURES] for every operator."""
    peers = set(range(world)) - {rank}
    for method in ("chunked", "fused", "direct"):
        case = _case(method)
        for operator, rows, (n, k) in (
            (all_gather_linear, ROWS, (FEATURES, FEATURES)),
            (linear_reduce_scatter, ROWS * world, (FEATURES, FEATURES)),
            (linear_all_to_all, ROWS, (FEATURES * world, FEATURES)),
            (all_to_all_linear, ROWS * world, (FEATURES, FEATURES * world)),
        ):
            x, w = torch.ones(rows, FEATURES), torch.ones(n, k)
            operator(x, w, group=case.group, config=case.config)  # so that memory is there
            poison(case)
            operator(x, w, group=case.group, config=case.config)
            dist.barrier(case.group)
            assert _written(case) == peers, f"{method}, {operator.__name__}"


def _written(case: Case) -> set[int | str]:
    """Which blocks of [ROWS, FEATURES] in fp32, counted from the slot in use, are not poisoned any more; "part" of one, too."""
    domain = domain_of(case.group, case.config, case.device)
    assert domain.heap is not None
    slots, size = domain.layout.offset(0), domain.layout.offset(1) - domain.layout.offset(0)
    written = domain.heap.view(case.rank)[slots : domain.layout.offset(BARRIER)] != 255
    slot = int(written.nonzero()[0]) // size
    assert not written[: slot * size].any() and not written[(slot + 1) * size :].any(), "two slots"
    blocks = written[slot * size : (slot + 1) * size].split(ROWS * FEATURES * 4)
    return {number if block.all() else "part" for number, block in enumerate(blocks) if block.any()}


def test_a_call_writes_its_blocks_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    values(run_ranks(3, _writes))


def _keeps(rank: int, world: int) -> None:
    """regather: the caller's x, and no copy. keep: all that was received, in memory of its own."""
    for operator, x, w in (
        (all_gather_linear, torch.ones(ROWS, FEATURES), torch.ones(8, FEATURES)),
        (all_to_all_linear, torch.ones(ROWS * world, FEATURES), torch.ones(8, FEATURES * world)),
    ):
        x.requires_grad_(), w.requires_grad_()
        for gathered_input, rows in (("regather", len(x)), ("keep", ROWS * world)):
            case = _case("chunked", gathered_input=gathered_input)
            y = operator(x, w, group=case.group, config=case.config)
            saved, weight = y.grad_fn.saved_tensors  # type: ignore[union-attr]
            assert saved.numel() == rows * FEATURES and weight.data_ptr() == w.data_ptr()
            assert (saved.data_ptr() == x.data_ptr()) == (gathered_input == "regather")
            assert not _lies_in_a_slot(saved, case)


def _takes_out(rank: int, world: int) -> None:
    """What an all-to-all returns or keeps for the weight gradient is the caller's: the next call overwrites its slot."""
    case = _case("chunked")
    heads = AttentionHeads(world, world, 4)
    x, w = torch.ones(1, 1, FEATURES), torch.ones(heads.features, FEATURES)
    for tensor in (
        linear_all_to_all(x, w, group=case.group, config=case.config),
        *qkv_all_to_all(x, w, shards=SequenceShards(case.group), heads=heads, config=case.config),
    ):
        assert not _lies_in_a_slot(tensor, case)


def _lies_in_a_slot(tensor: torch.Tensor, case: Case) -> bool:
    heap = domain_of(case.group, case.config, case.device).heap
    assert heap is not None
    start = heap.view(case.rank).data_ptr()
    return start <= tensor.data_ptr() < start + heap.view(case.rank).numel()


def _maps_late(rank: int, world: int) -> None:
    """Every peer has mapped a rank's memory before its descriptor, by which they find it, is closed."""
    mapped = host._map
    if rank == 1:
        host._map = lambda *args: (time.sleep(0.5), mapped(*args))[1]  # type: ignore[assignment] # of this process
    before = _mappings()
    heap = host.open_host_heap(Agreement(dist.group.WORLD, timeout_s=30.0), 4096, range(world))
    host._map = mapped  # type: ignore[assignment]
    assert _mappings() == before + world
    heap.close()
    assert _mappings() == before


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:overlap_train")


def _frees(rank: int, world: int) -> None:
    """shutdown() unmaps what was mapped, and no file stays open."""
    case = _case("chunked")
    x = torch.ones(ROWS, FEATURES)
    all_gather_linear(x, x, group=case.group, config=case.config)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert _mappings()
        shutdown()
        assert not _mappings()
        all_gather_linear(x, x, group=case.group, config=case.config)
    assert len(os.listdir("/proc/self/fd")) == before


def _of_memory(rank: int, world: int) -> None:
    for body in (_keeps, _takes_out, _maps_late, _frees):
        body(rank, world)


def test_what_is_kept_for_backward_how_peers_find_memory_and_when_it_is_freed() -> None:
    values(run_ranks(2, _of_memory))
