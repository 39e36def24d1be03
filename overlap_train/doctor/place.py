"""Where a check runs: this rank among the ranks that it works with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..bench.world import World
from .report import FAIL, OK, WARN, Finding


@dataclass(frozen=True)
class Place:
    """rank, size, hosts: within `group`, the ranks of one node; ranks: their numbers in the job, which reports use.

    group is None before the ranks have joined. unit: "rank", or "GPU" where one process speaks for all GPUs.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    device: torch.device
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    unit: str = "rank"

    @property
    def world(self) -> World:
        """The same, as the benchmark's helpers take it."""
        return World(self.joined, self.device, self.rank, self.size)

    @property
    def joined(self) -> dist.ProcessGroup:
        """The group of a check that communicates."""
        assert self.group is not None, "this check runs after the ranks have joined"
        return self.group

    def who(self, rank: int) -> str:
        """`rank 2 on node7`, from the rank within the group."""
        return f"{self.unit} {self.ranks[rank]} on {self.hosts[rank]}"

    def any(self, here: bool) -> bool:
        """Whether it is true on any rank of the group. Collective."""
        flag = torch.tensor([here], dtype=torch.int32, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.joined)
        return bool(flag.item())

    def synchronize(self) -> None:
        """Until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def ok(self, name: str, measured: str, expected: str = "") -> Finding:
        return self._finding(OK, name, measured, expected, "")

    def warn(self, name: str, measured: str, expected: str, fix: str) -> Finding:
        return self._finding(WARN, name, measured, expected, fix)

    def fail(self, name: str, measured: str, expected: str, fix: str) -> Finding:
        return self._finding(FAIL, name, measured, expected, fix)

    def _finding(self, status: str, name: str, measured: str, expected: str, fix: str) -> Finding:
        return Finding(name, status, measured, expected, fix, self.ranks[self.rank], self.hosts[self.rank])


def first_line(error: BaseException) -> str:
    """`ValueError: what it says`, cut to what a table holds."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
