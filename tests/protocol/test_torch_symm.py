"""What torch's symmetric memory asks of a node's ranks and can be tried without GPUs: a process group, found by its name."""

from __future__ import annotations

import torch
import torch.distributed as dist

from overlap_train.ranks.agreement import Agreement
from overlap_train.symmetric.torch_symm import _group_of
from tests.processes import run_ranks, values


def _twice(rank: int, world: int) -> list[tuple[int, int, int]]:
    """(ranks, own rank, sum of the job's ranks in it) of the node's group, which is made again when memory grows."""
    from torch._C._distributed_c10d import _resolve_process_group

    agreement, found, kept = Agreement(dist.group.WORLD, 20.0), [], []
    if rank == 3:
        dist.new_group([3], use_local_synchronization=True, backend="gloo")  # one more group than its neighbour has
    for _ in range(2):
        kept.append(_group_of(agreement, range(rank // 2 * 2, rank // 2 * 2 + 2)))
        agreement.barrier("all have made theirs")
        group, total = _resolve_process_group(kept[-1].group_name), torch.tensor([rank])
        group.allreduce([total]).wait()
        found.append((group.size(), group.rank(), int(total)))
    assert kept[0].group_name != kept[1].group_name
    return found


def test_the_ranks_of_a_node_are_found_by_the_name_of_their_group() -> None:
    assert values(run_ranks(4, _twice)) == [[(2, rank % 2, [1, 1, 5, 5][rank])] * 2 for rank in range(4)]
