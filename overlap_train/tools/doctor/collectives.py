"""torch's own collectives: does a sum over all ranks of the job come out right?"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..measure.world import World
from .report import Finding, fail, ok, warn


def check_collectives(world: World, nodes: int) -> list[Finding]:
    """Check a sum over all ranks of the job, not of the node only."""
    total = torch.full((1 << 20,), float(world.rank + 1), device=world.device)
    dist.all_reduce(total)
    backend, expected = dist.get_backend(), world.size * (world.size + 1) / 2
    wrong = int((total != expected).sum())
    if wrong:
        fix = "torch's own collective is wrong: run nccl-tests' all_reduce_perf -c 1 on these hosts"
        return [fail("collectives", f"{backend}: {wrong} of {total.numel()} sums wrong", "right sums", fix)]
    found = [ok("collectives", f"{backend} all-reduce over {world.size} rank{'s' * (world.size > 1)} is right")]
    if nodes > 1:
        several = (
            "the job has several hosts; each host's ranks are checked among themselves; see the lines `network ...`"
        )
        fix = "keep the tensor-parallel size within a node where it fits; docs/multi-node.md says what overlaps across nodes"
        found.append(warn("nodes", several, "tensor-parallel groups inside a host", fix))
    return found
