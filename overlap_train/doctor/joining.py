"""The ranks join, first by torch.distributed, and leave at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from .. import shutdown
from ..bench.world import join
from ..symmetric.nvshmem import finalize
from .place import Place
from .report import Finding

FIX = (
    "NCCL or gloo cannot connect the ranks: NCCL_DEBUG=INFO says why; NCCL_SOCKET_IFNAME / GLOO_SOCKET_IFNAME name the interface "
    "that all hosts share"
)


def join_ranks(hosts: Sequence[str]) -> Place:
    """Every rank calls it. The place is the node: overlap works between the ranks of one host.

    hosts: of each rank of the job.
    """
    world = join()
    place = Place(world.rank, world.size, world.group, world.device, tuple(hosts), tuple(range(world.size)))
    if len(set(hosts)) == 1:
        return place
    nodes = {host: [rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)}
    groups = {host: dist.new_group(ranks) for host, ranks in nodes.items()}
    mine = hosts[world.rank]
    ranks = tuple(nodes[mine])
    return Place(ranks.index(world.rank), len(ranks), groups[mine], world.device, (mine,) * len(ranks), ranks)


def join_alone(place: Place) -> Place:
    """A world of one rank, so that single-process checks use the same code."""
    on_gpu = place.device.type == "cuda"
    device_id = place.device if on_gpu else None
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(minutes=3),
        device_id=device_id,
    )
    return replace(place, group=dist.group.WORLD)


def check_collectives(place: Place, size: int) -> list[Finding]:
    """A sum over all `size` ranks of the job, not of the node only."""
    total = torch.full((1 << 20,), float(dist.get_rank() + 1), device=place.device)
    dist.all_reduce(total)
    backend, expected = dist.get_backend(), size * (size + 1) / 2
    wrong = int((total != expected).sum())
    if wrong:
        fix = "torch's own collective is wrong: run nccl-tests' all_reduce_perf -c 1 on these hosts"
        return [place.fail("collectives", f"{backend}: {wrong} of {total.numel()} sums wrong", "right sums", fix)]
    nodes = [place.warn("nodes", *_SEVERAL_NODES)] if place.size < size else []
    return [place.ok("collectives", f"{backend} all-reduce over {size} rank{'s' * (size > 1)} is right"), *nodes]


_SEVERAL_NODES = (
    "the job has several hosts; each host's ranks are checked among themselves",
    "tensor-parallel groups inside a host",
    "keep the tensor-parallel size within a node: overlap across nodes does not exist yet",
)


def leave() -> list[Finding]:
    """Free symmetric memory and end torch.distributed."""
    shutdown()
    finalize()  # memory checks open NVSHMEM without a domain
    dist.destroy_process_group()
    return []
