"""TP x Ulysses: what does not fit on one rank is an error on every rank of both groups, at a first call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from overlap_train import AttentionHeads, OverlapConfig, OverlapTimeoutError, attention_output_linear, qkv_all_to_all
from overlap_train.ops.plan_cache import PlanCache
from tests.processes import run_ranks, values
from tests.tp_ulysses_cases import grid

CONFIG = OverlapConfig(method="chunked", timeout_s=20.0)
WRONG = 2  # of four: tensor-parallel rank 0 of the second rank of Ulysses


def _first_calls(rank: int, world: int, whats: tuple[str, ...], is_known: bool) -> list[str]:
    """What each call raises on this rank, of which one rank has a wrong argument; then all make the right calls. is_known: these
    come first instead."""
    g, heads, is_wrong = grid(), AttentionHeads(4, 2, 4), rank == WRONG
    common = dict(config=CONFIG, shards=g.shards())
    x, w, bias = torch.ones(4, 1, 8), torch.ones(heads.features, 8), torch.ones(heads.features)
    context, w_out = torch.ones(16, 1, 8), torch.ones(8, 16)

    def right() -> None:
        y = attention_output_linear(qkv_all_to_all(x, w, bias, heads=heads, **common)[0].flatten(2), w_out, **common)
        assert bool((y == 2 * 16 * 9).all())

    calls: dict[str, Callable[[], object]] = {
        "x": lambda: qkv_all_to_all(x[:, 0] if is_wrong else x, w, bias, heads=heads, **common),
        "w": lambda: qkv_all_to_all(x, w[is_wrong:], heads=heads, **common),
        "features": lambda: qkv_all_to_all(x[..., int(is_wrong) :], w, bias, heads=heads, **common),
        "rows": lambda: qkv_all_to_all(x[int(is_wrong) :], w, bias, heads=heads, **common),
        "context": lambda: attention_output_linear(context[:, 0] if is_wrong else context, w_out, **common),
        "context after qkv": lambda: (qkv_all_to_all(x, w, bias, heads=heads, **common), calls["context"]()),
        "context rows": lambda: attention_output_linear(context[int(is_wrong) :], w_out, **common),
        "w_out": lambda: attention_output_linear(context, w_out[:, 1:] if is_wrong else w_out, **common),
    }
    if is_known:
        right()
    said = []
    for what in whats:
        with pytest.raises(ValueError) as raised:
            calls[what]()
        assert raised.value.__cause__ is None, "nobody has waited in vain"
        said.append(str(raised.value))
    if not is_known:
        right()
    return said


OF_THE_INPUT = "linear_qkv: the input has shape (4, 8); it must be [sequence, batch, features]"


@pytest.mark.parametrize(
    ("whats", "wrong"),
    [
        (("x", "w"), (OF_THE_INPUT, "linear_qkv: w has 31 rows (shape (31, 8))")),
        (("features", "x"), ("linear_qkv: x_shard_m has 7 features", OF_THE_INPUT)),
        (("context after qkv",), ("linear_proj: the input has shape (16, 8); it must be [sequence, batch, features]",)),
        (("context rows", "w_out"), ("linear_proj: x has 15 rows", "linear_proj: x_shard_k has 16 features")),
    ],
)
def test_what_does_not_fit_on_one_rank_is_an_error_on_all(whats: tuple[str, ...], wrong: tuple[str, ...]) -> None:
    """Each names the rank; the right call works afterwards."""
    for rank, of_rank in enumerate(values(run_ranks(4, _first_calls, whats, False))):
        for said, expected in zip(of_rank, wrong, strict=True):
            assert said.startswith(expected)
            assert said.endswith("(on rank 0 of tp_group)") == (rank == 3), said
            assert said.endswith("(on rank 1 of the group)") == (rank < 2), said
            assert ("(on rank 0 of tp_group)" in said) == (rank % 2 == 1), said


def test_ranks_of_one_tp_group_that_differ_are_an_error_on_all() -> None:
    said = [of_rank[0] for of_rank in values(run_ranks(4, _first_calls, ("rows",), False))]
    for number, text in enumerate(said):
        assert "all ranks of a group must call the same operator" in text
        assert ("of tp_group has linear_qkv" in text) or number >= 2
    assert all(text.endswith("(on rank 1 of the group)") for text in said[:2])


def _known(rank: int, world: int) -> list[str]:
    return _first_calls(rank, world, ("x",) if rank == WRONG else (), True)


def _once_more(rank: int, world: int) -> tuple[str, list[str]]:
    """What the second call raises, and which groups this rank asks in it. A rank of the other TP group has the wrong argument
    there, whose peer knows the product."""
    g, heads, asked = grid(), AttentionHeads(4, 2, 4), []
    common = dict(config=replace(CONFIG, timeout_s=2.0), shards=g.shards())
    x, w, said, refuse = torch.ones(4, 1, 8), torch.ones(heads.features, 8), "", PlanCache.refuse

    def noted(book: PlanCache, *problem: Any) -> None:
        asked.append("tp_group" if book.domain.group is g.tensor else "group")
        refuse(book, *problem)

    PlanCache.refuse = noted
    for wrong in (WRONG, 0):
        asked.clear()
        with pytest.raises((ValueError, OverlapTimeoutError)) as raised:
            qkv_all_to_all(x[:, 0] if rank == wrong else x, w, heads=heads, **common)
        said = f"{type(raised.value).__name__}: {raised.value}"
    return said, asked


def test_a_tp_group_that_knows_its_product_is_not_asked() -> None:
    """It waits in that product. The Ulysses group is asked: it is in its first call."""
    (own, asked), _, (peer, _), _ = values(run_ranks(4, _once_more))
    assert own == f"ValueError: {OF_THE_INPUT}" and asked == ["group"]
    assert peer == f"ValueError: {OF_THE_INPUT} (on rank 0 of the group)"


def test_in_a_known_call_the_rank_raises_at_once() -> None:
    assert values(run_ranks(4, _known))[WRONG] == [OF_THE_INPUT]
