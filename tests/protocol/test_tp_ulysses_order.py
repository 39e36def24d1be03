"""TP x Ulysses: a part's product and another part's exchange are under way together; what ranks say when one of them is wrong.

The order is what the engines record when they begin and end, and not time. Each of a pair waits for the other to begin.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from overlap_train import (
    AttentionHeads,
    OverlapConfig,
    OverlapMismatchError,
    OverlapTimeoutError,
    SequenceLayout,
    attention_output_linear,
    qkv_all_to_all,
)
from overlap_train.group import copy_engine as copy_thread
from overlap_train.group.registry import domain_of
from overlap_train.ulysses import parts, two_groups
from tests.processes import Outcome, refusal, run_ranks, values
from tests.tp_ulysses_cases import DIM, HIDDEN, B, Grid, grid

HEADS = AttentionHeads(4, 4, DIM)  # of a tensor-parallel rank
PARTS = 3  # of twelve positions; a position takes 1536 bytes of QKV, 512 of the output
CONFIG = {
    "column": OverlapConfig(method="chunked", exchange_mib=20, timeout_s=20.0),
    "row": OverlapConfig(method="chunked", exchange_mib=14, timeout_s=20.0),
}
PRODUCTS = ("column_forward", "column_backward", "row_forward", "row_backward")

Pair = tuple[int, int]  # of a pass: the number of a product, and of an exchange
# Exchanges of row_backward: x 0; dx 0 and x 1; dx 1 and x 2; dx 2.
TOGETHER: dict[str, tuple[Pair, ...]] = {
    "column_forward": ((1, 0), (2, 1)),
    "column_backward": ((0, 1), (1, 2)),
    "row_forward": ((0, 1), (1, 2)),
    "row_backward": ((0, 0), (1, 1), (2, 2)),
}


@dataclass
class Log:
    """What begins and ends in one rank. Of a pair each waits, once begun, until the other has begun, at most `patience_s`."""

    together: tuple[Pair, ...]
    patience_s: float = 5.0
    entries: list[tuple[str, str, int]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def run(self, what: str, work: Callable[[], Any]) -> Any:
        with self._changed:
            number = sum(entry[:2] == ("begin", what) for entry in self.entries)
            self.entries.append(("begin", what, number))
            self._changed.notify_all()
            others = self._others(what, number)
            self._changed.wait_for(lambda: all(("begin", *other) in self.entries for other in others), self.patience_s)
        result = work()
        with self._changed:
            self.entries.append(("end", what, number))
        return result

    def _others(self, what: str, number: int) -> list[tuple[str, int]]:
        if what == "product":
            return [("exchange", exchange) for product, exchange in self.together if product == number]
        return [("product", product) for product, exchange in self.together if exchange == number]

    def apart(self) -> list[Pair]:
        """Pairs of which one ended before the other began."""
        at = {entry: place for place, entry in enumerate(self.entries)}
        return [
            (product, exchange)
            for product, exchange in self.together
            if max(at["begin", "product", product], at["begin", "exchange", exchange])
            > min(at["end", "product", product], at["end", "exchange", exchange])
        ]


def _record(g: Grid, product: str, log: Log) -> None:
    """Of products named `product` and of the exchanges meanwhile; other passes run as ever."""
    plain_product, plain_push = getattr(two_groups, product), copy_thread.run_push
    engine = domain_of(g.ulysses, None, torch.device("cpu")).engine

    def multiplied(*args: Any) -> Any:
        return log.run("product", lambda: plain_product(*args))

    def pushed(*args: Any, **settings: Any) -> None:
        if threading.current_thread() is not engine._thread:  # type: ignore[attr-defined]
            return plain_push(*args, **settings)
        return log.run("exchange", lambda: plain_push(*args, **settings))

    setattr(two_groups, product, multiplied)
    copy_thread.run_push = pushed


def _pass(g: Grid, product: str, log: Log | None) -> None:
    """One pass with that product. log: None for one that makes plans and memory."""
    common = dict(shards=g.shards(SequenceLayout("zigzag")), config=CONFIG[product.partition("_")[0]])
    plain = getattr(two_groups, product), copy_thread.run_push

    def begin() -> None:
        if log is not None:
            _record(g, product, log)

    if product.startswith("column"):
        x, w = torch.ones(12, B, HIDDEN, requires_grad=True), torch.ones(HEADS.features, HIDDEN, requires_grad=True)
        begin() if product.endswith("forward") else None
        y = torch.cat(qkv_all_to_all(x, w, heads=HEADS, **common), dim=2)
    else:
        x, w = torch.ones(48, B, 2 * DIM, requires_grad=True), torch.ones(HIDDEN, 4 * DIM, requires_grad=True)
        begin() if product.endswith("forward") else None
        y = attention_output_linear(x, w, **common)
    if product.endswith("backward"):
        begin()
        y.sum().backward()
    setattr(two_groups, product, plain[0])
    copy_thread.run_push = plain[1]


def _flight(rank: int, world: int, product: str) -> tuple[list[Pair], int, int]:
    """Pairs that were not under way together; how many products and exchanges there were."""
    parts._MIB = 1 << 10
    g, log = grid(), Log(TOGETHER[product])
    _pass(g, product, None)
    _pass(g, product, log)
    began = [what for how, what, _ in log.entries if how == "begin"]
    return log.apart(), began.count("product"), began.count("exchange")


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_and_the_exchange_of_another_part_are_under_way_together(product: str) -> None:
    exchanges = PARTS + 1 if product == "row_backward" else PARTS
    assert values(run_ranks(4, _flight, product)) == [([], PARTS, exchanges)] * 4


def _step(g: Grid, positions: int = 12, layout: SequenceLayout | None = None) -> None:
    """Forward and backward of both projections."""
    common = dict(shards=g.shards(layout or SequenceLayout("zigzag")), config=OverlapConfig(**SHORT))
    x, w = torch.ones(positions, B, HIDDEN, requires_grad=True), torch.ones(HEADS.features, HIDDEN, requires_grad=True)
    q, k, v = qkv_all_to_all(x, w, heads=HEADS, **common)
    attention_output_linear((q + k + v).flatten(2), torch.ones(HIDDEN, 4 * DIM), **common).sum().backward()


SHORT: dict[str, Any] = dict(method="chunked", exchange_mib=12, timeout_s=2.0)


def _dies(rank: int, world: int) -> str:
    """Rank 1 dies in its second step, in the middle of a part."""
    parts._MIB = 1 << 10
    g = grid()
    _step(g)
    if rank == 1:
        plain, calls = two_groups.column_forward, []

        def last(*args: Any) -> Any:
            calls.append(None)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args)

        two_groups.column_forward = last
    try:
        for _ in range(3):
            _step(g)
    except OverlapTimeoutError as error:
        return str(error)
    return "no error"


def test_a_rank_that_dies_is_named_in_both_groups() -> None:
    """Rank 0 gathers with it, rank 3 exchanges with it; rank 2 waits for one of these, who has given up or ended."""
    outcomes = run_ranks(4, _dies, limit_s=60, grace_s=10)
    assert outcomes.pop(1).exit_code == -signal.SIGKILL
    for said in (_said(outcome) for outcome in outcomes):
        assert "linear_qkv/fprop" in said and ("has ended" in said or "raised OverlapPeerError" in said)
    assert "rank 1 of the group has ended" in _said(outcomes[0]), "of its tensor-parallel group"
    assert "rank 0 of the group has ended" in _said(outcomes[2]), "of its Ulysses group"


def _said(outcome: Outcome) -> str:
    assert outcome.value is not None, outcome.error
    return outcome.value


def _differs(rank: int, world: int, wrong: tuple[int, ...], positions: int, layout: str) -> str:
    parts._MIB = 1 << 10
    g = grid()
    _step(g)
    other = rank in wrong
    try:
        _step(g, positions if other else 12, SequenceLayout(layout) if other else None)
    except (OverlapMismatchError, OverlapTimeoutError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(("wrong", "operator"), [((2, 3), "all_to_all"), ((1, 3), "all_gather_linear")])
def test_ranks_that_share_the_sequence_otherwise_are_named(wrong: tuple[int, ...], operator: str) -> None:
    """Those of a tensor-parallel group, whom the other group meets in the exchange; or of a Ulysses group, in the product."""
    for rank, said in enumerate(values(run_ranks(4, _differs, wrong, 12, "contiguous"))):
        assert said.startswith("OverlapMismatchError: ") and operator in said, said
        assert "zigzag" in said and ("contiguous" in said) == (rank in wrong), "each names what it is in itself"


@pytest.mark.parametrize(("wrong", "operator"), [((2, 3), "all_to_all"), ((1, 3), "all_gather_linear")])
def test_ranks_with_other_numbers_of_rows_are_named(wrong: tuple[int, ...], operator: str) -> None:
    """In parts of four positions each, of which the wrong ranks have two and the others three."""
    for said in values(run_ranks(4, _differs, wrong, 8, "zigzag")):
        assert said.startswith("OverlapMismatchError: ") and operator in said, said
        assert "pad them to the largest" in said and "a part of" in said, said


def _refused(rank: int, world: int) -> list[str]:
    g, x, w = grid(), torch.ones(4, 1, 8), torch.ones(HIDDEN, 16)
    calls = (2, w), (4, torch.ones(8, 16).double())
    return [refusal(attention_output_linear, x[:rows], weight, shards=g.shards()) for rows, weight in calls]


def test_calls_that_do_not_fit_say_why() -> None:
    """What else they refuse: test_tp_ulysses_refusals.py."""
    rows = (
        "linear_proj: x has 2 rows (shape (2, 1, 8)); they must be divisible by the 2 x 2 ranks of group and tp_group"
    )
    for said in values(run_ranks(4, _refused)):
        assert rows in said[0] and "linear_proj: w_shard_k has dtype torch.float64" in said[1]
