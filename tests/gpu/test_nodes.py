"""Groups that span nodes, on the GPUs of one machine: NCCL is told that ranks are on different hosts, and goes over sockets.

    torchrun --standalone --nproc-per-node 2 -m pytest tests/gpu/test_nodes.py     2 nodes of 1
    torchrun --standalone --nproc-per-node 4 -m pytest tests/gpu/test_nodes.py     2 nodes of 2, four ranks on two GPUs or more

conftest.py tells NCCL so where this file is run alone: it has to know before its first communicator.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import overlap_train
from overlap_train import (
    OverlapMismatchError,
    OverlapTimeoutError,
    all_gather_linear,
    linear_reduce_scatter,
)
from overlap_train.protocol.node_streams import NodeStreamEngine
from overlap_train.runtime.registry import domain_of
from tests.linear_cases import OPERATORS, SHAPES, Case

pytestmark = pytest.mark.skipif("NCCL_HOSTID" not in os.environ, reason="needs NCCL_HOSTID: run this file alone")
LARGE = {
    "several chunks": ((4096, 1), 4096, 1024),  # gathered in four of 8 MiB
    "rows that end within a tile": ((997, 1), 264, 520),
}


@pytest.fixture
def method() -> str:
    return "chunked"


@pytest.fixture
def nodes(case: Case) -> Case:
    """Two nodes. The group's domain is a fresh one: those of other tests have one node."""
    config = replace(case.config, node_ranks=case.world // 2, provider="torch")
    overlap_train.shutdown()
    return replace(case, config=config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("operator", ["column", "row"])
def test_every_shape_is_exact(nodes: Case, operator: str, dtype: torch.dtype) -> None:
    for seed, (rows, k, n) in enumerate((SHAPES | LARGE).values()):
        OPERATORS[operator](replace(nodes, dtype=dtype), rows, k, n, seed=seed, bias=seed % 2 == 0)
    assert isinstance(domain_of(nodes.group, nodes.config, nodes.device).engine, NodeStreamEngine)


def test_auto_takes_chunked_and_kept_inputs_work(nodes: Case) -> None:
    for settings in ({"method": "auto"}, {"gathered_input": "keep"}):
        OPERATORS["column"](replace(nodes, config=replace(nodes.config, **settings)), (256, 1), 512, 256)


def test_the_same_bits_whoever_is_late(nodes: Case) -> None:
    """Also over many calls without the host between: slots are used again and again, and barriers come between."""
    torch.manual_seed(nodes.rank)
    x, w = (
        torch.randn(rows, 512, device=nodes.device, dtype=torch.bfloat16, requires_grad=True) for rows in (512, 256)
    )
    found: list[tuple[torch.Tensor, ...]] = []
    for turn in range(12):
        if turn % nodes.world == nodes.rank:
            torch.cuda._sleep(20_000_000)
        ys = [all_gather_linear(x, w, group=nodes.group, config=nodes.config, name=name) for name in "ab"]
        z = linear_reduce_scatter(ys[0].detach(), w.detach().t().contiguous(), group=nodes.group, config=nodes.config)
        found.append((*ys, z, *torch.autograd.grad(ys[0].sum() + ys[1].float().square().sum(), (x, w))))
    torch.cuda.synchronize()
    for later in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], later, strict=True))


def test_a_captured_graph_is_refused(nodes: Case) -> None:
    x, w = (torch.ones(64, 128, device=nodes.device, dtype=nodes.dtype) for _ in range(2))
    y = all_gather_linear(x, w, group=nodes.group, config=nodes.config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="a group that spans nodes"):  # noqa: SIM117
        with torch.cuda.graph(graph), overlap_train.graphed(nodes.group):
            all_gather_linear(x, w, group=nodes.group, config=nodes.config)
    assert torch.equal(all_gather_linear(x, w, group=nodes.group, config=nodes.config), y)


def three_calls(case: Case, name: str) -> None:
    x, w = (torch.ones(256, 512, device=case.device, dtype=case.dtype) for _ in range(2))
    for _ in range(3):
        all_gather_linear(x, w, group=case.group, config=case.config, name=name)
        torch.cuda.synchronize()
        overlap_train.check()


@pytest.mark.parametrize("mistake", ["is in another layer", "does not come"])
def test_a_twin_that_goes_wrong_is_named(nodes: Case, mistake: str) -> None:
    """On every rank that waits for it, within the time-out and what the watching thread needs; then a new domain works."""
    nodes = replace(nodes, config=replace(nodes.config, timeout_s=4.0))
    for name in ("layers.0", "layers.1"):
        three_calls(nodes, name)
    dist.barrier(nodes.group)
    begin, wrong = time.monotonic(), nodes.rank == nodes.world - 1
    if wrong and mistake == "does not come":
        time.sleep(8)
    else:
        with pytest.raises((OverlapMismatchError, OverlapTimeoutError), match="rank"):
            three_calls(nodes, "layers.1" if wrong else "layers.0")
    assert time.monotonic() - begin < 12
    dist.barrier(nodes.group)
    overlap_train.shutdown()
    config = replace(nodes.config, timeout_s=20.0)
    OPERATORS["column"](replace(nodes, config=config), (64, 1), 128, 64)
