"""This process among the ranks: device, group, progress lines, and one verdict for all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """The ranks of the job; all of them are one tensor-parallel group."""

    group: dist.ProcessGroup
    device: torch.device
    rank: int
    size: int

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def attempt(self, work: Callable[[], object]) -> str | None:
        """Run `work` on all ranks; None if it succeeded on all of them, else what went wrong here or elsewhere.

        Any error counts: a library that lacks an operation, a kernel that does not compile or a wrong result must not
        end a run of minutes.
        """
        problem = None
        try:
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[
                :300
            ]
        failed = torch.tensor([problem is not None], dtype=torch.int32, device=self.device)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.group)
        if problem is None and failed.item():
            return "failed on another rank"
        return problem


def join() -> World:
    """Start torch.distributed as torchrun says: NCCL on GPUs, gloo on the CPU.

    Raises:
        ValueError: not started by torchrun, or more ranks than GPUs.
    """
    if "RANK" not in os.environ:
        raise ValueError("start the benchmark with torchrun --nproc-per-node 4 -m overlap_train.bench ...")
    limit = timedelta(minutes=3)
    if torch.cuda.is_available():
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"rank {local} of this node has no GPU: there are {torch.cuda.device_count()}; start fewer"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=limit, device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=limit)
    group = dist.group.WORLD
    assert group is not None
    return World(group, device, dist.get_rank(), dist.get_world_size())


def heat(device: torch.device, seconds: float) -> None:
    """Bring the GPU to the clocks of a long run: the first products after a pause run 15 to 25 % fast."""
    if device.type != "cuda":
        return
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    product = torch.empty_like(a)
    for _ in range(round(seconds / 1.6e-3)):
        torch.mm(a, a, out=product)
    torch.cuda.synchronize(device)
