"""Operators inside a CUDA graph.

The device counts epochs, so that a replay sends new ones. But a graph uses the same slots at every replay, and calls before and
after it do not know which ones (docs/design.md, rule 3). Therefore a graph begins and ends with a barrier of signals, 10
microseconds each.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch.distributed as dist

from ..protocol.tags import Tag
from .domain import OverlapDomain, barrier
from .registry import made_domain


@contextmanager
def graphed(group: dist.ProcessGroup) -> Iterator[None]:
    """Bracket of all operators of `group` that are captured into one CUDA graph.

        with torch.cuda.graph(graph), overlap_train.graphed(group):
            y = model(x)
            y.backward(dy)

    Keep this order: a capture that begins inside `graphed` would have no barriers. All ranks capture the same operators, in one
    stream. They replay the graph equally often, in the stream of the eager calls or ordered with them by events. Run the same
    twice before capturing: then kernels are compiled and symmetric memory is there. A replay calls no operator; `check()` after
    it raises what a wait in it has found. Calls of the method collective are captured as PyTorch captures NCCL's.

    Raises:
        ValueError: no operator of this group has run yet.
    """
    domain = made_domain(group)
    if domain is None or domain.book is None:
        raise ValueError(
            "graphed: no operator of this group has run yet; run what is captured twice before capturing it"
        )
    domain.graphed = True
    try:
        # Without a heap all calls are collectives, and so are all that can be captured across nodes.
        uses_slots = domain.heap is not None and domain.topology.nodes == 1
        with _between_barriers(domain) if uses_slots else nullcontext():
            yield
        # Not before: a capture that failed leaves no graph. One of collectives holds no address of the heap.
        domain.captured |= domain.is_capturing() and uses_slots
    finally:
        domain.graphed = False


@contextmanager
def _between_barriers(domain: OverlapDomain) -> Iterator[None]:
    workspace = domain.workspace
    before = copy.deepcopy(workspace.use)
    try:
        barrier(domain, Tag("graph/begin", "barrier"))
        yield
        barrier(domain, Tag("graph/end", "barrier"))
    except BaseException:
        before.invalidate()
        raise
    finally:
        # Capturing runs nothing, not even barriers: eager calls before the first replay go on where they were.
        workspace.use = before


def forget_graphs(group: dist.ProcessGroup) -> None:
    """Allow symmetric memory to be replaced again. All ranks call it, and none replays a graph that was captured before."""
    domain = made_domain(group)
    if domain is not None:
        domain.captured = False


def is_graphed(group: dist.ProcessGroup) -> bool:
    """Whether operators of this group are called inside `graphed`."""
    domain = made_domain(group)
    return domain is not None and domain.graphed
