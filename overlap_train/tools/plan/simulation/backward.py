"""What one rank does in a whole backward of a linear: the input gradient with its communication, and the weight gradient.

A column linear gathers x again while it multiplies for the input gradient; its partial sums go under the weight gradient
(linear.py has the order). A row linear gathers dy once, for both. Of Ulysses the output projection does as the first, the QKV
projection as the second (ulysses/exchange.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ....config import OverlapConfig
from ....ops.plan import planner_of
from ....planning import cost
from ....schedule.order import A2A_GEMM, GATHER, INBOUND, SCATTER
from ....select.low_latency import LOW_LATENCY
from .by_library import beside_exchanges, wait
from .copies import copied, give
from .enqueued import Item, Part, cut_at_wgrad
from .programs import assemble, epoch, forward, inbound_part, leading_barrier, outbound_part
from .sending import crossings, inside_node
from .timeline import COMMUNICATION, GEMM, Kernel, Program, Token, arrived
from .work import Work

GATHERED: Token = ("x gathered",)
PARTIAL: Token = ("dgrad done",)
WGRAD = "library wgrad gemm"


def backward(work: Work) -> Program:
    """The Program of a linear's whole backward. work: its input gradient, whose kind says which linear this is: a column linear
    scatters, a row linear gathers."""
    kernels, sending = whole(work)
    return assemble(work, [*leading_barrier(work), *kernels], sending)


def whole(work: Work) -> Part:
    """A linear's backward, once its operator has begun."""
    if work.plan.kind in INBOUND:
        kernels, sending = row_dx(work)
        return [*kernels, row_dw(work)], sending
    if work.plan.method != "collective":
        return _column(work)
    return _column_by_nccl(work) if work.plan.kind == SCATTER else _exchanged_by_nccl(work)


def wgrad_us(work: Work, spared_sms: int = 0, late_waves: int = 0) -> float:
    """dy.T @ x: as many operations as the input gradient. spared_sms: that are left to what the network carries meanwhile."""
    pass_, blocks = work.pass_, work.x_blocks
    one = cost.library_gemm_us(
        work.system, pass_.k, pass_.n // blocks, pass_.rows, blocks * work.parts, spared_sms, late_waves
    )
    return blocks * one


def communication_us(work: Work) -> float:
    """NCCL's time for all that a backward communicates: a column linear gathers x and scatters dx. Ulysses keeps x."""
    return work.collective_us * (2 if work.plan.kind == SCATTER else 1)


def _wgrad(work: Work, us: float, *needs: Token) -> Kernel:
    return Kernel(WGRAD, GEMM, us, work.system.gap_us, needs=needs)


def gathered_rows(work: Work, arrivals: tuple[Token, ...]) -> list[Kernel]:
    """What a weight gradient waits for: the peers' blocks and, unless the product before it hides that, the copy of the own."""
    return [*([] if work.plan.hides_copies else [own_block(work)]), wait(work, arrivals)]


def own_block(work: Work) -> Kernel:
    """The copy of the own block beside the gathered ones: read and written."""
    return copied(work, 2 * work.shard_bytes, "copy of the own block")


def row_dx(work: Work) -> Part:
    """The input gradient of a row linear, and dy complete."""
    kernels, sending = forward(work)
    is_dense = work.plan.method in ("collective", LOW_LATENCY)  # and no slot, where the own block has to be copied to
    gathered = [] if is_dense else gathered_rows(work, work.all_arrivals())
    return [*kernels, *gathered], sending


def row_dw(work: Work) -> Kernel:
    """The weight gradient of a row linear."""
    return _wgrad(work, wgrad_us(work))


def _column(work: Work) -> Part:
    plan = planner_of(work.topology, OverlapConfig()).sent_again(
        replace(work.plan, kind=GATHER if work.plan.kind == SCATTER else A2A_GEMM)
    )
    again = replace(work, plan=plan, what="x")  # its rows have as many columns as dx
    if work.plan.method == LOW_LATENCY:
        (kernels, sending), finish = outbound_part(work)
        first, _ = inbound_part(again)
        return [first[0], *kernels, _wgrad(work, wgrad_us(work)), *finish], sending
    arrivals, ahead = tuple(arrived(again.call, source, 0) for source in plan.sources), crossings(again)
    wgrad = beside_exchanges(work, partial(wgrad_us, work, work.plan.spared_sms), WGRAD)
    start = [*give(again), *epoch(work, work.world > 1), *ahead.until(1)]
    (kernels, sending), finish = outbound_part(replace(work, follows=work.topology.nodes > 1), ahead)
    before, after = cut_at_wgrad(work, kernels)
    middle = [*before, *gathered_rows(work, arrivals), wgrad]
    return [*start, *middle, *after, *finish], [*inside_node(again), *sending]


def _column_by_nccl(work: Work) -> Part:
    """NCCL in a stream of its own, beside the products, which are longer for it: one that ends before NCCL does takes twice as
    long at half the speed, and no more."""
    gap, collective = work.system.gap_us, work.collective_us
    dgrad, wgrad = (us + _slower_us(work, us) for us in (work.gemm_us, wgrad_us(work)))
    kernels: list[Item] = [
        Kernel("nccl all-gather", COMMUNICATION, collective, gap, ends=GATHERED, stream=1),
        Kernel("nccl reduce-scatter", COMMUNICATION, collective, gap, needs=(PARTIAL,), stream=1),
        Kernel("library gemm", GEMM, dgrad, gap, ends=PARTIAL),
        _wgrad(work, wgrad, GATHERED),
    ]
    return kernels, []


def _exchanged_by_nccl(work: Work) -> Part:
    """A linear's backward in torch, then the exchange of dx. Nothing is sent again: torch's linear keeps what it multiplied."""
    (kernels, sending), finish = outbound_part(work)
    return [*kernels, _wgrad(work, wgrad_us(work)), *finish], sending


def _slower_us(work: Work, product_us: float) -> float:
    beside = work.system.nccl_beside
    return min(beside * work.collective_us, product_us * beside / (1 - beside))
