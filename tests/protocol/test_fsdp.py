"""Operators under torch's FSDP2, which shards their weights over other ranks: the same bits as with whole weights."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from overlap_train import OverlapConfig, all_gather_linear, linear_reduce_scatter, shutdown
from tests.processes import run_ranks, values


class _Mlp(torch.nn.Module):
    def __init__(self, group: torch.distributed.ProcessGroup, seed: int) -> None:
        super().__init__()
        self.settings = dict(group=group, config=OverlapConfig(timeout_s=30.0))
        generator = torch.Generator().manual_seed(seed)
        self.w1_shard_n, self.w2_shard_k = (
            torch.nn.Parameter(torch.randint(-2, 3, shape, generator=generator).float()) for shape in ((16, 8), (8, 16))
        )

    def forward(self, x_shard_m: torch.Tensor) -> torch.Tensor:
        h_shard_n = all_gather_linear(x_shard_m, self.w1_shard_n, **self.settings)  # type: ignore[arg-type]
        return linear_reduce_scatter(h_shard_n.relu(), self.w2_shard_k, **self.settings)  # type: ignore[arg-type]


def _gradients(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data, tensor = mesh["dp"], mesh["tp"].get_group()
    whole, sharded = (torch.nn.Sequential(*(_Mlp(tensor, 10 * rank + i) for i in range(2))) for _ in range(2))
    for one, other in zip(whole.parameters(), sharded.parameters(), strict=True):  # of the first data-parallel rank
        torch.distributed.broadcast(one.data, group=data.get_group(), group_src=0)
        other.data.copy_(one.data)
    for layer in (*sharded, sharded):
        fully_shard(layer, mesh=data)
    x_shard_m = torch.randint(-2, 3, (4, 8)).float() + rank
    for micro_batches in (1, 2):
        for model in (whole, sharded):
            for _ in range(micro_batches):
                model(x_shard_m).square().sum().backward()
        for one, other in zip(whole.parameters(), sharded.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            torch.distributed.all_reduce(one.grad, group=data.get_group())
            assert torch.equal(other.grad.full_tensor(), one.grad / 2)  # type: ignore[attr-defined]
            one.grad = other.grad = None
    shutdown()


def test_weights_that_fsdp_shards() -> None:
    values(run_ranks(4, _gradients))
