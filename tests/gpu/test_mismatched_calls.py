"""Known calls that meet by mistake, on GPUs: every rank raises within its time-out, and somebody names both calls.

Of a collective a rank may be stuck in NCCL, which only the end of its process ends. So those run in processes of their own, and
there each rank says by name what is wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import overlap_train
from overlap_train import (
    OverlapConfig,
    OverlapMismatchError,
    OverlapTimeoutError,
    all_gather_linear,
    all_to_all_linear,
    check,
    linear_all_to_all,
    linear_reduce_scatter,
)
from tests.gpu.conftest import share_gpus
from tests.linear_cases import Case
from tests.ports import free_ports

TIMEOUT_S = 4.0
# What the names of both calls have in common.
MISTAKES = {"skips a layer": "layers.", "swaps": "fc", "swaps exchanges": "a2a.", "has another length": "fc1"}


def gather(case: Case, rows: int = 256, name: str = "fc1") -> None:
    x, w = (torch.ones(rows, 512, device=case.device, dtype=case.dtype) for rows in (rows, 256))
    all_gather_linear(x, w, group=case.group, config=case.config, name=name)


def scatter(case: Case, name: str = "fc2") -> None:
    x, w = (torch.ones(rows, 512, device=case.device, dtype=case.dtype) for rows in (256 * case.world, 256))
    linear_reduce_scatter(x, w, group=case.group, config=case.config, name=name)


def to_heads(case: Case) -> None:
    x, w = (torch.ones(rows, 512, device=case.device, dtype=case.dtype) for rows in (256, 256))
    linear_all_to_all(x, w, group=case.group, config=case.config, name="a2a.qkv")


def to_rows(case: Case) -> None:
    x = torch.ones(256 * case.world, 512 // case.world, device=case.device, dtype=case.dtype)
    w = torch.ones(256, 512, device=case.device, dtype=case.dtype)
    all_to_all_linear(x, w, group=case.group, config=case.config, name="a2a.proj")


def layers(case: Case, skipped: int | None = None) -> None:
    for layer in range(3):
        if layer != skipped:
            gather(case, name=f"layers.{layer}.fc1")


def run_mistake(case: Case, mistake: str) -> None:
    """The last rank of the group makes it; then all go on until they notice."""
    wrong = case.rank == case.world - 1
    if mistake == "skips a layer":
        layers(case, skipped=1 if wrong else None)
    elif mistake.startswith("swaps"):
        calls = (gather, scatter) if mistake == "swaps" else (to_heads, to_rows)
        for call in reversed(calls) if wrong else calls:
            call(case)
    else:
        gather(case, rows=512 if wrong else 256)
    for _ in range(3):
        layers(case)
        torch.cuda.synchronize()
        check()


def run_each_call(case: Case, mistake: str) -> None:
    """Each that the mistake is about, so that all of them are known."""
    layers(case)
    for rows in (256, 512):
        gather(case, rows)
    for call in (to_heads, to_rows) if mistake == "swaps exchanges" else (scatter,):
        call(case)
    torch.cuda.synchronize()
    dist.barrier(case.group)


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("method", ["fused", "direct", "chunked"])
def test_every_rank_raises_and_one_names_both_calls(case: Case, mistake: str) -> None:
    dist.barrier(case.group)
    overlap_train.shutdown()  # a domain with a time-out of its own
    case = replace(case, config=replace(case.config, timeout_s=TIMEOUT_S))
    run_each_call(case, mistake)
    begin = time.monotonic()
    with pytest.raises((OverlapMismatchError, OverlapTimeoutError)) as caught:
        run_mistake(case, mistake)
    seconds = time.monotonic() - begin
    torch.cuda.synchronize()
    found: list[tuple[str, str]] = [("", "")] * case.world
    dist.all_gather_object(found, (type(caught.value).__name__, str(caught.value)), group=case.group)
    overlap_train.shutdown()
    assert seconds <= TIMEOUT_S + 2, found
    named = [text for kind, text in found if kind == "OverlapMismatchError"]
    assert named and all(text.count(MISTAKES[mistake]) >= 2 for text in named), found


@pytest.mark.parametrize("method", ["collective"])
def test_every_rank_names_the_collectives_that_differ(case: Case) -> None:
    """All mistakes at once: a process takes 15 s to start."""
    if share_gpus() or case.world < dist.get_world_size():
        pytest.skip("NCCL wants a GPU for each of the ranks")
    ports = free_ports(len(MISTAKES))
    dist.broadcast_object_list(ports, src=0)
    command = [sys.executable, "-m", "tests.gpu.test_mismatched_calls"]
    environment = os.environ | {"TORCHELASTIC_USE_AGENT_STORE": "False"}  # that store is the one of this suite
    started = {
        mistake: subprocess.Popen([*command, mistake, str(port)], stderr=subprocess.PIPE, text=True, env=environment)
        for mistake, port in zip(MISTAKES, ports, strict=True)
    }
    said = {mistake: process.communicate(timeout=90)[1] for mistake, process in started.items()}
    for mistake, common in MISTAKES.items():
        named = [line for line in said[mistake].splitlines() if "but rank" in line]
        assert named and all(line.count(common) >= 2 for line in named), said[mistake]


def make_mistake(mistake: str, port: str) -> None:
    """In a process of its own, which ends when a named error was due, whatever its GPU still waits for."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, device_id=device)
    config = OverlapConfig(method="collective", timeout_s=TIMEOUT_S)
    case = Case(dist.group.WORLD, device, config, torch.bfloat16)
    run_each_call(case, mistake)
    end = threading.Timer(TIMEOUT_S + 2, os._exit, (0,))
    end.start()
    try:
        run_mistake(case, mistake)
    except OverlapMismatchError as error:
        print(error, file=sys.stderr, flush=True)
    end.join()


if __name__ == "__main__":
    make_mistake(*sys.argv[1:])
