"""Products by the library: what `chunked` enqueues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ....schedule.order import chunks_after_own, chunks_by_rows, multiplied_together, targets
from .across_nodes import multiplied, turns
from .copies import copied
from .enqueued import Exchanges, Item, in_turns
from .sending import crossings
from .timeline import GEMM, WAITING, Kernel, Token, arrived
from .work import BF16, FP32, Work

CLUSTERS = (9, 0)  # from this capability on products run in clusters


def product(work: Work, us: float, ends: Token | None = None) -> Kernel:
    return Kernel("library gemm", GEMM, us, work.system.gap_us, ends=ends)


def beside_exchanges(work: Work, us_of: Callable[[int], float], name: str = "library gemm") -> Kernel:
    """A library product that an exchange may come before. us_of: what it takes with so many waves more."""
    us, late_waves = us_of(0), int(work.system.capability >= CLUSTERS)
    return Kernel(name, GEMM, us, work.system.gap_us, late_us=us_of(late_waves) - us)


def wait(work: Work, tokens: tuple[Token, ...]) -> Kernel:
    return Kernel("wait_kernel", WAITING, work.system.wait_us, work.system.gap_us, needs=tokens)


def gathered(work: Work) -> Iterator[Item]:
    """Blocks of the own node whole, those of far nodes a few chunks at a time (chunks_after_own)."""
    chunks, nodes, ahead = work.plan.chunks, work.topology.nodes, crossings(work)
    whole = beside_exchanges(work, partial(work.chunk_us, 1))
    yield from ahead.until(1)
    yield whole
    for done, source in enumerate(work.plan.sources[: work.topology.local - 1], start=1):
        yield from ahead.go_ahead(done, work.world)
        yield wait(work, tuple(arrived(work.call, source, c) for c in range(chunks)))
        yield whole
    for turn in range(0, (nodes - 1) * chunks, chunks):
        for taken in chunks_after_own(work.topology, chunks):
            yield from ahead.go_ahead(chunks + turn + taken[0], chunks * nodes)
            yield from ahead.bring(turn + taken[-1] + 1)
            yield from _far_chunks(work, turn // chunks, taken)


def _far_chunks(work: Work, node: int, taken: range) -> Iterator[Kernel]:
    """These chunks of each block of the node-th far node."""
    local, parts = work.topology.local, work.plan.chunks // len(taken)
    first = (node + 1) * local - 1
    for source in work.plan.sources[first : first + local]:
        yield from (wait(work, (arrived(work.call, source, chunk),)) for chunk in taken)
        yield beside_exchanges(work, partial(work.chunk_us, parts))


def received(work: Work) -> Iterator[Item]:
    """A2A + GEMM: block by block, and across nodes several of a node at once, side by side. Then their sum in fp32 is copied into
    the result. Or by rows (_received_by_rows)."""
    if work.plan.by_rows:
        yield from _received_by_rows(work)
        return
    ahead, done = crossings(work), 0
    yield from ahead.until(1)
    for blocks in multiplied_together(work.topology, work.plan.together):
        if len(blocks) > 1:
            yield _side_by_side(work, len(blocks))
        if done < work.topology.local:
            yield from ahead.go_ahead(done, work.world)
            yield from _terms(work, blocks, range(work.plan.chunks), 1)
        else:
            yield from _far_terms(work, blocks, done, ahead)
        done += len(blocks)
    yield copied(work, (FP32 + BF16) * work.m_shard * work.pass_.n, "copy of the sum")


def _received_by_rows(work: Work) -> Iterator[Item]:
    """Two ranks, a few chunks at a time: both blocks at once, side by side. Of the first and the last of these the own terms come
    while the first chunk crosses, the peer's when they are there."""
    chunks, ahead, in_turn = work.plan.chunks, crossings(work), chunks_by_rows(work.plan.chunks)
    in_parts = dict.fromkeys((in_turn[0], in_turn[-1]))
    yield from ahead.until(1)
    for taken in in_parts:
        yield beside_exchanges(work, partial(work.terms_us, 1, chunks // len(taken), True))
    yield from ahead.go_ahead(sum(map(len, in_parts)) + 1, 2 * chunks)
    for taken in in_turn:
        rows, parts = work.m_shard * len(taken) // chunks, chunks // len(taken)
        yield from ahead.bring(taken[-1] + 1)
        yield from (wait(work, work.arrivals(chunk)) for chunk in taken)
        if taken in in_parts:
            yield beside_exchanges(work, partial(work.terms_us, 1, parts, False))
            yield copied(work, (FP32 + BF16) * rows * work.pass_.n, "copy of the sum")
        else:
            yield copied(work, 2 * rows * work.pass_.k * work.pass_.dtype.itemsize)
            yield beside_exchanges(work, partial(work.rows_us, parts))


def _far_terms(work: Work, blocks: tuple[int, ...], done: int, ahead: Exchanges) -> Iterator[Item]:
    """Blocks of a far node: each chunk of the last one as it comes. done: blocks before."""
    chunks, brought = work.plan.chunks, (done - work.topology.local + len(blocks) - 1) * work.plan.chunks
    for chunk in range(chunks):
        yield from ahead.go_ahead(done * chunks + chunk * len(blocks), work.world * chunks)
        yield from ahead.bring(brought + chunk + 1)
        yield from _terms(work, blocks, (chunk,), chunks)


def _terms(work: Work, blocks: tuple[int, ...], needed: Sequence[int], parts: int) -> Iterator[Kernel]:
    """One of `parts` parts of the product of these blocks, once these chunks of each are there."""
    own = work.topology.rank
    for block in blocks:
        if block != own:
            yield wait(work, tuple(arrived(work.call, block, chunk) for chunk in needed))
    yield beside_exchanges(work, partial(work.terms_us, len(blocks), parts, own in blocks))


def _side_by_side(work: Work, blocks: int) -> Kernel:
    """The copy of so many blocks, and of their rows of the weight: read and written."""
    terms = blocks * work.pass_.k // work.world * (work.m_shard + work.pass_.n) * work.pass_.dtype.itemsize
    return copied(work, 2 * terms)


def leaving_products(work: Work, sums: list[Kernel], own: Exchanges, earlier: Exchanges | None) -> list[Item]:
    """One for each block, the own one last; across nodes one for each chunk, between their exchanges (schedule/turns.py)."""
    if work.topology.nodes == 1:
        blocks = (*targets(work.topology), work.topology.rank)
        return [product(work, work.part_us, multiplied(work, block)) for block in blocks]
    one = beside_exchanges(work, partial(work.chunk_us, work.plan.chunks))
    products = [replace(one, ends=multiplied(work, *unit)) for _, units in turns(work) for unit in units]
    return list(in_turns(work, products, sums, own, earlier))
