"""This process among the ranks of the job: its device and group, one verdict for all ranks, collectives, and the clocks' warm-up.

Ranks of one machine can play several nodes (pretend_nodes): NCCL takes them for different hosts, and goes over sockets.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from overlap_train.ops.collective import all_gather_single, reduce_scatter_single

Result = TypeVar("Result")
START = "torchrun --standalone --nproc-per-node 4 -m overlap_train"


@dataclass(frozen=True)
class World:
    """The ranks of `group`, which work as one tensor-parallel group. rank, size: within the group.

    hosts: of each rank of the group; ranks: their numbers in the job. Both are for messages; empty: the group is the whole job.
    """

    group: dist.ProcessGroup
    device: torch.device
    rank: int
    size: int
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def who(self, rank: int) -> str:
        """`rank 2 on node7`, from the rank within the group."""
        number = self.ranks[rank] if self.ranks else rank
        return f"rank {number}" + (f" on {self.hosts[rank]}" if self.hosts else "")

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def any(self, here: bool) -> bool:
        """Whether it is true on any rank. Collective."""
        found = torch.tensor([here], dtype=torch.int32, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return bool(found.item())

    def attempt(self, work: Callable[[], object]) -> str | None:
        """Run `work` on all ranks. None if it succeeded on all; else what went wrong here, or "failed on another rank". Any error
        counts: a library that lacks an operation or a wrong result must not end a run of minutes."""
        return self.result_of(work)[1]

    def result_of(self, work: Callable[[], Result]) -> tuple[Result | None, str | None]:
        """What `work` returns, and what `attempt` says."""
        result, problem = None, None
        try:
            result = work()
            self.synchronize()
        except Exception as error:
            problem = first_line(error)
        failed = self.any(problem is not None)
        return result, "failed on another rank" if failed and problem is None else problem

    def gather(self, shard: torch.Tensor, whole: torch.Tensor | None = None) -> torch.Tensor:
        """[M/W, C] of every rank -> [M, C], in `whole` where it is given."""
        whole = shard.new_empty(shard.shape[0] * self.size, shard.shape[1]) if whole is None else whole
        shards = [x.view(torch.uint8) if x.itemsize == 1 else x for x in (whole, shard)]  # backends know no fp8
        all_gather_single(*shards, group=self.group)
        return whole

    def scatter(self, partial: torch.Tensor) -> torch.Tensor:
        """[M, C] -> the rows [M/W, C] of this rank of the sum over ranks."""
        y = partial.new_empty(partial.shape[0] // self.size, partial.shape[1])
        reduce_scatter_single(y, partial, group=self.group)
        return y

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """[M, C] -> the sum over ranks, in place."""
        dist.all_reduce(partial, group=self.group)
        return partial

    def exchange(self, blocks: torch.Tensor) -> torch.Tensor:
        """W blocks, one after the other -> the same of all ranks' blocks for this one."""
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=self.group)
        return received

    def node(self, hosts: tuple[str, ...]) -> World:
        """The ranks of this rank's host, as a world of their own. Collective over the job. hosts: of each rank of the job."""
        mine = hosts[self.rank]
        nodes = {host: tuple(rank for rank, other in enumerate(hosts) if other == host) for host in hosts}
        if len(nodes) == 1:
            return replace(self, hosts=hosts)
        groups = {host: dist.new_group(list(ranks)) for host, ranks in nodes.items()}
        ranks = nodes[mine]
        return World(groups[mine], self.device, ranks.index(self.rank), len(ranks), (mine,) * len(ranks), ranks)


def first_line(error: BaseException) -> str:
    """`ValueError: what it says`, cut to what a table holds."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def join(start: str = f"{START} ...", may_be_alone: bool = False, minutes: float = 3) -> World:
    """Start torch.distributed as torchrun says: NCCL on GPUs, gloo on the CPU.

    start: the command that an error names. may_be_alone: without torchrun, a world of one. minutes: how long collectives take.

    Raises:
        ValueError: not started by torchrun, or more ranks than GPUs.
    """
    is_alone = "RANK" not in os.environ
    if is_alone and not may_be_alone:
        raise ValueError(f"start it under torchrun: {start}")
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if is_alone else {}
    limit = timedelta(minutes=minutes)
    if torch.cuda.is_available():
        device = torch.device("cuda", _own_gpu())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=limit, device_id=device, **alone)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=limit, **alone)
    group = dist.group.WORLD
    assert group is not None
    return World(group, device, dist.get_rank(), dist.get_world_size())


def _own_gpu() -> int:
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise ValueError(f"rank {local} of this node has no GPU: there are {count}; start fewer")
    return local


# Sockets over loopback carried 2.0 GB/s each way as they come, and 5.3 so (2 x H200).
_SOCKETS = dict(NCCL_SOCKET_NTHREADS="8", NCCL_NSOCKS_PERTHREAD="4", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
_HOST = "NCCL_HOSTID"


def pretend_nodes(node_ranks: int) -> None:
    """Let NCCL take the ranks of this machine for several hosts, where torchrun has started more than a node has. Before NCCL."""
    here, count = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if count > node_ranks:
        for name, value in (_SOCKETS | {_HOST: f"node{here // node_ranks}"}).items():
            os.environ.setdefault(name, value)


def pretends() -> bool:
    """Whether NCCL takes ranks of this machine for several hosts."""
    return _HOST in os.environ


def heat(device: torch.device) -> None:
    """Half a second of products, for the clocks of a long run: the first products after a pause run 15 to 25 % fast."""
    if device.type != "cuda":
        return
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    product = torch.empty_like(a)
    for _ in range(312):  # of 1.6 ms each
        torch.mm(a, a, out=product)
    torch.cuda.synchronize(device)
