"""In which order a rank enqueues its products, and its exchanges with other nodes.

Megatron-Core wants CUDA_DEVICE_MAX_CONNECTIONS=1 on most GPUs: one hardware queue for all streams, in which nothing starts
before everything that was enqueued earlier has started. An exchange starts when the one before it has ended. A product that
was enqueued after it waits for that, whether it needs the exchange or not; and an exchange that was enqueued after a product
waits until the products before that have ended. So each is enqueued where it would start if the network took as long as all
products. Then neither holds up the other much, whichever is slower. Where each stream has a queue of its own, the order costs
nothing.

Two nodes of one rank, 8 chunks, network and products 13.7 ms each (2 x H200): a gather whose exchanges took turns with its
products took 17.9 ms, a scatter whose own rows came last 19.6 ms; with a queue for each stream both took 14.9 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from .kinds import SCATTER
from .order import Unit, targets
from .topology import Topology

FAR, EXCHANGE, NEAR = "far", "exchange", "near"
# An exchange is followed by products until those of the next two are enqueued, and only then by the next exchange. So if one ends
# early, what the next sends is there.
_PRODUCTS_AHEAD = 2


def exchanges_ahead(exchanges: int, done: int, parts: int) -> int:
    """How many exchanges of an operand are enqueued after `done` of `parts` equal parts of its product: those that would have
    ended when these parts have, and one more."""
    return min(exchanges, 1 + exchanges * done // parts)


def exchanges_before_wgrad(exchanges: int, follows: bool) -> int:
    """How many exchanges of dx are enqueued before the weight gradient: half of them, because of two equal products one is done
    then. follows: the exchanges of what is gathered again come first; then only one, which begins when x is there and the weight
    gradient begins."""
    return min(exchanges, 1) if follows else (exchanges + 1) // 2


@cache
def leaving(kind: str, topology: Topology, chunks: int, between: int) -> tuple[tuple[str, tuple[Unit, ...]], ...]:
    """What GEMM + RS and GEMM + A2A enqueue, in order: (FAR, EXCHANGE or NEAR, the chunks whose products these are).

    The n-th FAR has the products that the n-th EXCHANGE needs. Of GEMM + RS these are a chunk for each rank of a far node; this
    rank adds up and sends the last of them. NEAR is the product of a chunk of what stays in the node, the own block last.

    between: how many exchanges come between the products, with NEAR evenly between them; the others are not listed, and follow
    all products. Without a weight gradient all come between, with one those that come before it. None does after the exchanges of
    what is gathered again: a product that came after one of ours would wait for these, too.
    """
    others, own_node = targets(topology), topology.local - 1
    far, near = others[: topology.world - topology.local], (*others[len(others) - own_node :], topology.rank)
    at_once = topology.local if kind == SCATTER else 1
    groups = [far[first : first + at_once] for first in range(0, len(far), at_once)]
    leaves = [tuple((block, chunk) for block in group) for group in groups for chunk in range(chunks)]
    stays = [((block, chunk),) for block in near for chunk in range(chunks)]
    return tuple(_in_turns(leaves, stays, between))


def _in_turns(
    leaves: list[tuple[Unit, ...]], stays: list[tuple[Unit]], between: int
) -> Iterator[tuple[str, tuple[Unit, ...]]]:
    gone, stayed = 1, 0  # how many of each are enqueued
    yield from ((FAR, units) for units in leaves[:gone])
    for turn in range(between):
        yield EXCHANGE, ()
        until, due = turn + 1 + _PRODUCTS_AHEAD, turn * len(stays) // between
        yield from ((FAR, units) for units in leaves[gone:until])
        yield from ((NEAR, units) for units in stays[stayed:due])
        gone, stayed = until, due
    yield from ((FAR, units) for units in leaves[gone:])
    yield from ((NEAR, units) for units in stays[stayed:])
