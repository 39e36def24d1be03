"""Groups that span nodes, on the GPUs of one machine: NCCL is told that ranks are on different hosts, and goes over sockets.
NVSHMEM, with --provider nvshmem, goes over NVLink.

    torchrun --standalone --nproc-per-node 2 -m pytest tests/gpu/test_nodes.py     2 nodes of 1
    torchrun --standalone --nproc-per-node 4 -m pytest tests/gpu/test_nodes.py     2 nodes of 2, four ranks on two GPUs or more

conftest.py tells NCCL so where this file is run alone: it has to know before its first communicator.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

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
    linear_all_to_all,
    linear_reduce_scatter,
)
from overlap_train.group.registry import domain_of
from overlap_train.group.slots import SLOTS
from overlap_train.nodes import plan as nodes_plan
from overlap_train.nodes.engines import StreamEngine
from overlap_train.select.tiles import equal_chunks
from tests.linear_cases import OPERATORS, SHAPES, Case

pytestmark = pytest.mark.skipif("NCCL_HOSTID" not in os.environ, reason="needs NCCL_HOSTID: run this file alone")
LARGE = {
    "several chunks": ((4096, 1), 4096, 1024),  # gathered in 32 MiB
    "all-to-alls in several chunks": ((4096, 1), 4096, 4096),  # two of 16 MiB a block
    "rows that end within a tile": ((997, 1), 264, 520),
}


@pytest.fixture(params=["chunked", "fused"])
def method(request: pytest.FixtureRequest) -> str:
    return request.param


once = pytest.mark.parametrize("method", ["chunked"])  # of what no method changes


@pytest.fixture
def nodes(case: Case) -> Iterator[Case]:
    """Two nodes, with what `--provider nvshmem` or `--provider torch` puts between them. The group's domain is one of its own:
    those of other tests have one node."""
    by = ("nvshmem", "nvshmem") if case.config.provider == "nvshmem" else ("torch", "nccl")
    config = replace(case.config, node_ranks=case.world // 2, provider=by[0], network=by[1])
    overlap_train.shutdown()
    yield replace(case, config=config)
    overlap_train.shutdown()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_shape_is_exact(nodes: Case, operator: str, dtype: torch.dtype) -> None:
    for seed, (rows, k, n) in enumerate((SHAPES | LARGE).values()):
        OPERATORS[operator](replace(nodes, dtype=dtype), rows, k, n, seed=seed, bias=seed % 2 == 0)
    assert isinstance(domain_of(nodes.group, nodes.config, nodes.device).engine, StreamEngine)


@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_every_number_of_chunks_that_the_tuner_may_find_is_exact(nodes: Case, chunks: int) -> None:
    # As if it had been measured as the fastest.
    with mock.patch.object(nodes_plan, "network_chunks_of", lambda how, p, *rest: equal_chunks(p.m // p.world, chunks)):
        for seed, (rows, k, n) in enumerate((SHAPES | LARGE).values()):
            for operator in ("column", "row", "to_heads", "to_rows"):
                OPERATORS[operator](replace(nodes, dtype=torch.bfloat16), rows, k, n, seed=seed)


@once
@pytest.mark.parametrize("operator", ["column", "to_heads", "to_rows"])
def test_what_auto_takes_and_kept_inputs_work(nodes: Case, operator: str) -> None:
    """By `auto` blocks of 8 MiB go by `fused` or `chunked`, shorter ones by `collective`."""
    for settings in ({"method": "auto"}, {"gathered_input": "keep"}):
        for rows in (256, 4096):
            OPERATORS[operator](replace(nodes, config=replace(nodes.config, **settings)), (rows, 1), 1024, 1024)


@pytest.mark.parametrize("operator", ["to_heads", "to_rows"])
def test_long_sequences_pass_in_parts(nodes: Case, operator: str) -> None:
    """Each but the first is sent before the one before it is multiplied; there are more of them than slots."""
    row_bytes = nodes.world * 512 * nodes.dtype.itemsize  # that a rank receives for one position of every rank
    rows = 5 * ((1 << 20) // (SLOTS * row_bytes))
    OPERATORS[operator](replace(nodes, config=replace(nodes.config, exchange_mib=1)), (rows, 1), 512, 512)


def test_the_same_bits_whoever_is_late(nodes: Case) -> None:
    """Also over many calls without the host between: slots are used again and again, and barriers come between."""
    torch.manual_seed(nodes.rank)
    x, w = (
        torch.randn(rows, 512, device=nodes.device, dtype=torch.bfloat16, requires_grad=True) for rows in (512, 256)
    )
    back = torch.randn(128, 256, device=nodes.device, dtype=torch.bfloat16, requires_grad=True)
    options = dict(group=nodes.group, config=nodes.config)
    found: list[tuple[torch.Tensor, ...]] = []
    for turn in range(12):
        if turn % nodes.world == nodes.rank:
            torch.cuda._sleep(20_000_000)
        ys = [all_gather_linear(x, w, name=name, **options) for name in "ab"]
        z = linear_reduce_scatter(ys[0].detach(), w.detach().t().contiguous(), **options)
        heads = linear_all_to_all(x, w, **options)  # [512 W, 256 / W]
        rows = all_to_all_linear(heads, back, **options)  # [512, 128]
        grads = torch.autograd.grad(ys[0].sum() + ys[1].float().square().sum(), (x, w))
        grads += torch.autograd.grad(rows.float().square().sum(), (x, w, back))
        found.append((*ys, z, heads, rows, *grads))
    torch.cuda.synchronize()
    for later in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], later, strict=True))


@once
def test_a_captured_graph_is_refused(nodes: Case) -> None:
    x, w = (torch.ones(64, 128, device=nodes.device, dtype=nodes.dtype) for _ in range(2))
    y = all_gather_linear(x, w, group=nodes.group, config=nodes.config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="a group that spans nodes"):  # noqa: SIM117
        with torch.cuda.graph(graph), overlap_train.graphed(nodes.group):
            all_gather_linear(x, w, group=nodes.group, config=nodes.config)
    assert torch.equal(all_gather_linear(x, w, group=nodes.group, config=nodes.config), y)


@once
def test_collectives_are_captured_beside_calls_that_cross_nodes(nodes: Case) -> None:
    """The thread that watches the network leaves the capture alone, which torch's default mode would end otherwise."""
    x, w = (torch.ones(64, 128, device=nodes.device, dtype=nodes.dtype) for _ in range(2))
    config = replace(nodes.config, method="collective")

    def whole(config: OverlapConfig) -> torch.Tensor:
        return all_gather_linear(x, w, group=nodes.group, config=config)

    expected = [whole(each).clone() for each in (config, config, nodes.config)][-1]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), overlap_train.graphed(nodes.group):
        y = whole(config)
        time.sleep(1.2)  # the thread looks twice
    for _ in range(3):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected) and torch.equal(whole(nodes.config), expected)
    overlap_train.forget_graphs(nodes.group)


def three_calls(case: Case, operator: Callable[..., torch.Tensor], name: str) -> None:
    x, w = (torch.ones(256, 512, device=case.device, dtype=case.dtype) for _ in range(2))
    for _ in range(3):
        operator(x, w, group=case.group, config=case.config, name=name)
        torch.cuda.synchronize()
        overlap_train.check()


@pytest.mark.parametrize("operator", [all_gather_linear, linear_all_to_all])
@pytest.mark.parametrize("mistake", ["is in another layer", "does not come"])
def test_a_twin_that_goes_wrong_is_named(nodes: Case, mistake: str, operator: Callable[..., torch.Tensor]) -> None:
    """On every rank that waits for it, within the time-out and what the watching thread needs; then a new domain works."""
    nodes = replace(nodes, config=replace(nodes.config, timeout_s=4.0))
    for name in ("layers.0", "layers.1"):
        three_calls(nodes, operator, name)
    dist.barrier(nodes.group)
    begin, wrong = time.monotonic(), nodes.rank == nodes.world - 1
    if wrong and mistake == "does not come":
        time.sleep(8)
    else:
        with pytest.raises((OverlapMismatchError, OverlapTimeoutError), match="rank"):
            three_calls(nodes, operator, "layers.1" if wrong else "layers.0")
    assert time.monotonic() - begin < 12
    dist.barrier(nodes.group)
    overlap_train.shutdown()
    config = replace(nodes.config, timeout_s=20.0)
    OPERATORS["column"](replace(nodes, config=config), (64, 1), 128, 64)
