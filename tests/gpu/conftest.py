"""GPU tests run under torchrun, one pytest per rank: `make test-gpu` runs them for every provider and domain size."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import overlap_train
from overlap_train import OverlapConfig
from overlap_train.ops import launch
from overlap_train.ops.launch import multiprocessors
from overlap_train.tools.measure.world import pretend_nodes
from tests.linear_cases import Case


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--provider", default="auto", help="symmetric memory provider under test")
    parser.addoption("--domain-size", type=int, default=0, help="ranks of an overlap domain; 0: all")
    parser.addoption(
        "--wait-s", type=float, default=20.0, help="timeout_s; longer where several sessions share the GPUs"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Where only the tests of several nodes run, NCCL takes each half of the ranks for a host of its own.

    Each rank, where ranks share a GPU: NCCL refuses two ranks of one host on one GPU, but not two of different hosts.
    """
    if "LOCAL_RANK" not in os.environ:
        return
    if torch.cuda.is_available() and share_gpus():
        pretend_nodes(1)
    elif any("test_nodes.py" in argument for argument in config.args):
        pretend_nodes(int(os.environ["LOCAL_WORLD_SIZE"]) // 2)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if not torch.cuda.is_available() or "LOCAL_RANK" not in os.environ else None


def share_gpus() -> bool:
    """Several ranks have one GPU: plain correctness, not speed. NCCL goes over sockets between them (pytest_configure)."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count()


@pytest.fixture(scope="session")
def device() -> torch.device:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@pytest.fixture(scope="session")
def group(device: torch.device, request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    """The overlap domain: consecutive ranks, `--domain-size` of them; ranks 2, 3 are a group that does not start at 0."""
    dist.init_process_group("nccl", timeout=timedelta(seconds=90), device_id=device)
    size = request.config.getoption("--domain-size") or dist.get_world_size()
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, dist.get_world_size(), size)]
    yield groups[dist.get_rank() // size]
    gc.collect()  # a CUDA graph that is yet to be freed may hold calls of NCCL, which then does not end
    overlap_train.shutdown()
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def provider(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--provider")


@pytest.fixture(scope="session")
def wait_s(request: pytest.FixtureRequest) -> float:
    """timeout_s of the group's domain, which all tests share."""
    return request.config.getoption("--wait-s")


@pytest.fixture(scope="session", autouse=True)
def room_for_copies() -> Iterator[None]:
    """Leave 8 SMs free where ranks share a GPU: with none, four ranks on two GPUs stood still.

    The driver seems to copy between ranks of one GPU by kernels. These found no SM, and our kernels waited for them.
    """
    if not share_gpus():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "multiprocessors", lambda device: multiprocessors(device) - 8)
        yield


@pytest.fixture(params=["fused", "direct", "chunked", "collective"])
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def case(group: dist.ProcessGroup, device: torch.device, provider: str, method: str, wait_s: float) -> Case:
    config = OverlapConfig(method=method, provider=provider, timeout_s=wait_s, symmetric_mib=2048)
    return Case(group, device, config, torch.bfloat16)
