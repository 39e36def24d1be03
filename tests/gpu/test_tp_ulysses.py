"""TP x Ulysses on four GPUs, or four ranks that share fewer: against one process, exactly, in parts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from overlap_train import (
    AttentionHeads,
    OverlapConfig,
    SequenceLayout,
    SequenceShards,
    attention_output_linear,
    qkv_all_to_all,
    shutdown,
)
from overlap_train.group.registry import domain_of
from overlap_train.nodes.engines import StreamEngine
from overlap_train.symmetric.nvshmem import is_installed
from overlap_train.ulysses import two_groups as two_group_calls
from tests.tp_ulysses_cases import ulysses_across_nodes

S, B, HIDDEN, DIM = 2048, 1, 512, 128
HEADS = AttentionHeads(4, 2, DIM)  # of a tensor-parallel rank


@pytest.fixture(scope="module")
def groups(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(tensor-parallel, Ulysses); rank t + 2 r. `group`: starts torch.distributed."""
    if dist.get_world_size() != 4:
        pytest.skip("four ranks: RANKS=4")
    pairs = [[0, 1], [2, 3], [0, 2], [1, 3]]
    made = [made for ranks in pairs if dist.get_rank(made := dist.new_group(ranks)) >= 0]
    return made[0], made[1]


def _integers(device: torch.device, *shape: int, seed: int) -> torch.Tensor:
    """Mostly zero: all sums are exact in bf16."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-1, 2, shape, generator=generator) * (
        torch.rand(shape, generator=generator) < 8 / shape[-1]
    )
    return numbers.bfloat16().to(device)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("gathered_input", ["regather", "keep"])
def test_values_and_gradients_are_exact(
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup], device: torch.device, provider: str, method: str,
    gathered_input: str, parts: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(two_group_calls, "parts_that_hide", lambda rows, n, k: parts)
    own_provider = provider if provider == "torch" else "auto"  # NVSHMEM's one world serves one group
    config = OverlapConfig(method=method, gathered_input=gathered_input, provider=own_provider, timeout_s=20.0)
    _check_exact(groups, device, config)


@pytest.mark.parametrize("gathered_input", ["regather", "keep"])
@pytest.mark.parametrize("network", ["nccl", "nvshmem"])
def test_ulysses_across_nodes(
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup], device: torch.device, method: str, network: str,
    gathered_input: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each tensor-parallel group is a node, each rank of Ulysses in a node of its own."""
    if network == "nvshmem" and (method == "collective" or not is_installed()):
        pytest.skip("NVSHMEM carries nothing for collectives, or is not there")
    monkeypatch.setattr(two_group_calls, "parts_that_hide", lambda rows, n, k: 3)
    config = OverlapConfig(method=method, gathered_input=gathered_input, provider="torch", timeout_s=20.0)
    shutdown()
    between = dict(network="nvshmem", provider="nvshmem") if network == "nvshmem" else {}
    ulysses_across_nodes(*groups, config, device, **between)
    try:
        _check_exact(groups, device, None)
        assert method == "collective" or isinstance(domain_of(groups[1], None, device).engine, StreamEngine)
    finally:
        shutdown()


def _check_exact(
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup], device: torch.device, config: OverlapConfig | None
) -> None:
    tensor, ulysses = groups
    t, r = tensor.rank(), ulysses.rank()
    layout = SequenceLayout("zigzag")
    common = dict(shards=SequenceShards(ulysses, layout, tensor), config=config)
    rows = layout.rows_of_ranks(S, 2, device)[r].chunk(2)[t]
    x, dy = _integers(device, S, B, HIDDEN, seed=1), _integers(device, 2, S, B, HEADS.features, seed=2)
    w = _integers(device, 2, HEADS.features, HIDDEN, seed=3)
    own, w_own = x[rows].clone().requires_grad_(), w[t].clone().requires_grad_()
    for _ in range(3):  # slots are used again
        heads = torch.cat(qkv_all_to_all(own, w_own, heads=HEADS, **common), dim=2)
        of_heads = dy[t].view(S, B, 2, 4, DIM)[:, :, r]
        dx, dw = torch.autograd.grad(heads, (own, w_own), of_heads)
        dist.all_reduce(dw, group=ulysses)
        assert torch.equal(heads.flatten(2), (x @ w[t].t()).view(S, B, 2, -1)[:, :, r])
        assert torch.equal(dx, sum(dy[u].double() @ w[u].double() for u in range(2))[rows].bfloat16())
        assert torch.equal(dw, (dy[t].flatten(0, 1).double().t() @ x.flatten(0, 1).double()).bfloat16())
        _output(t, r, rows, device, common)


def _output(t: int, r: int, rows: torch.Tensor, device: torch.device, common: dict) -> None:  # type: ignore[type-arg]
    features = HEADS.query * DIM
    x, dy = _integers(device, 2, S, B, features, seed=4), _integers(device, S, B, HIDDEN, seed=5)
    w = _integers(device, 2, HIDDEN, features, seed=6)
    own, w_own = x[t].chunk(2, -1)[r].contiguous().requires_grad_(), w[t].clone().requires_grad_()
    y = attention_output_linear(own, w_own, **common)
    dx, dw = torch.autograd.grad(y, (own, w_own), dy[rows])
    dist.all_reduce(dw, group=common["shards"].group)
    assert torch.equal(y, sum(x[u].double() @ w[u].double().t() for u in range(2))[rows].bfloat16())
    assert torch.equal(dx, (dy.double() @ w[t].double()).chunk(2, -1)[r].bfloat16())
    assert torch.equal(dw, (dy.flatten(0, 1).double().t() @ x[t].flatten(0, 1).double()).bfloat16())
