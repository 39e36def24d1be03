"""Whole attention blocks of Ulysses, forward and backward: projections, rotation, core attention, exchanges.

    x [s/W, 1, hidden] -> q, k, v of all rows -> causal attention -> y [s/W, 1, hidden]

Each rank holds an equal part of the sequence, in order. Beside ours: the same block with NCCL's all-to-all and the copies that it
needs (`sequence`), the same work without any exchange (`alone`), which nobody can beat by hiding communication, and
TransformerEngine's where it is importable (te_attention.py). All split and rotate in one pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...config import OverlapConfig
from ...ulysses.attention import attention_output_linear, qkv_all_to_all
from ...ulysses.layout import SequenceLayout
from ...ulysses.shards import SequenceShards
from ..measure.models import Model
from ..measure.results import Row
from ..measure.runs import Session
from ..measure.timing import Call, Timing
from ..measure.world import World
from . import te_attention, transformer_engine
from .attention_data import Block, Data, Outcome, check_block, forward_backward
from .attention_parts import Unpacked, core_attention, exchange, in_torchs_words

BASELINES = ("sequence", "alone", "te", "te_alone")


def run(models: Sequence[tuple[str, Model]], tokens: Sequence[int], session: Session) -> None:
    """Measure every block; one row for each method that computes what torch's own operations do. Collective."""
    for name, model in models:
        for number in tokens:
            data, decoy = (Data.make(model, number, session.world, session.settings.dtype, seed) for seed in (0, 99))
            rows = measure_block(Case(name, number, data, decoy, session))
            session.world.say(f"{name} attention, {number} tokens: {session.results.outcome(rows)}")


@dataclass(frozen=True)
class Case:
    """One block to measure. decoy: data as large, with other numbers."""

    name: str
    tokens: int
    data: Data
    decoy: Data
    session: Session

    def note(self, name: str, problem: str, failure: bool) -> None:
        self.session.results.note(f"{self.name} attention, {self.tokens} tokens: {name}: {problem}", failure)

    def rows(self, calls: Mapping[str, Call]) -> list[Row]:
        """All calls in turns; a row for each method of ours."""
        data, session = self.data, self.session
        timings = session.time(calls, 6 * data.x.numel() * sum(w.shape[0] for w in (data.w_qkv, data.w_proj)))
        methods = [method for method in session.settings.methods if method in timings]
        return [row(self.name, self.tokens, method, timings, session.world.size) for method in methods]


def measure_block(case: Case) -> list[Row]:
    """Check, then time, every method and baseline of one block; its rows, which are saved."""
    data, session, world = case.data, case.session, case.session.world
    baselines: dict[str, Block] = {"sequence": partial(by_nccl, world), "alone": partial(alone, world)}
    calls = {baseline: forward_backward(block, data) for baseline, block in baselines.items()}
    expected = expected_of(partial(in_torchs_words, world, SequenceLayout()), data)
    check_block(baselines["sequence"], data, case.decoy, expected)
    for method in session.settings.methods:
        config = replace(session.settings.config, method=method)
        block = partial(overlapped, config, world.group)
        problem = world.attempt(partial(check_block, block, data, case.decoy, expected))
        if problem is None:
            calls[method] = forward_backward(block, data)
        else:
            case.note(method, problem, failure=True)
    began = time.monotonic()
    rows = case.rows(calls)
    session.results.add(rows)
    took = time.monotonic() - began
    if rows and (te := transformer_engine.load(session)):
        with transformer_engine.limited(took):
            rows = with_te(te, calls, case)
    return rows


def with_te(te: Any, calls: Mapping[str, Call], case: Case) -> list[Row]:
    """The rows of all calls once more, with TransformerEngine's attention among them; saved instead of those of before."""
    world, found = case.session.world, dict(calls)
    in_zigzag = partial(in_torchs_words, world, te_attention.LAYOUT)
    baselines = {"te": (te_attention.exchanging, in_zigzag), "te_alone": (te_attention.alone, partial(alone, world))}
    for name, (make, same) in baselines.items():
        problem = world.attempt(partial(_add, found, name, partial(make, te, world), same, case))
        if problem is not None:
            found.pop(name, None)  # on some ranks it may have worked
            case.note(name, problem, failure=False)
    rows = case.rows(found)
    case.session.results.revise(rows)
    return rows


def _add(calls: dict[str, Call], name: str, make: Callable[[Data], Block], same: Block, case: Case) -> None:
    """A block's call, after a check against another that computes the same."""
    block = make(case.data)
    check_block(block, case.data, case.decoy, expected_of(same, case.data))
    calls[name] = forward_backward(block, case.data)


def expected_of(block: Block, data: Data) -> Outcome:
    return cast(Outcome, forward_backward(block, data)(0))


def overlapped(config: OverlapConfig, group: dist.ProcessGroup, data: Data) -> torch.Tensor:
    """One attention block by our operators."""
    shards = SequenceShards(group)
    q, k, v = qkv_all_to_all(data.x, data.w_qkv, shards=shards, heads=data.heads, rotary=data.rotary, config=config)
    return attention_output_linear(core_attention(q, k, v), data.w_proj, shards=shards, config=config)


def by_nccl(world: World, data: Data) -> torch.Tensor:
    """One attention block by NCCL: one QKV GEMM, one exchange, one pass that splits and rotates as ours does; one exchange, one
    GEMM."""
    y = exchange(F.linear(data.x, data.w_qkv), world.group, to_heads=True)
    out = core_attention(*Unpacked.apply(y, data.heads.of_rank(world.size), data.rotary))
    return F.linear(exchange(out, world.group, to_heads=False), data.w_proj)


def alone(world: World, data: Data) -> torch.Tensor:
    """One attention block without communication. What a rank has is taken for what it would receive, which is as large."""
    y = F.linear(data.x, data.w_qkv).view(-1, 1, data.w_qkv.shape[0] // world.size)
    heads = data.heads.of_rank(world.size)
    out = core_attention(*Unpacked.apply(y, heads, data.rotary))
    return F.linear(out.reshape(len(data.x), 1, -1), data.w_proj)


def row(name: str, tokens: int, method: str, timings: Mapping[str, Timing], world: int) -> Row:
    """One line of layers.json; times in milliseconds of one forward and backward, host_us in microseconds."""
    baselines = {f"{baseline}_ms": timings[baseline].ms if baseline in timings else None for baseline in BASELINES}
    return {
        "layer": f"{name}-ulysses", "world": world, "seq": tokens, "method": method, "ms": timings[method].ms, **baselines,
        "host_us": timings[method].host_us,
    }  # fmt: skip
