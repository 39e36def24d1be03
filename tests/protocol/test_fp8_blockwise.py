"""Linears in fp8 with a scale for each block between real processes: against fp64 of the same rounded operands, and refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_train import Fp8Copies, OverlapConfig, all_gather_linear, linear_reduce_scatter, shutdown
from overlap_train.group.copy_engine import HostCopyEngine
from overlap_train.group.workspace import Workspace
from overlap_train.select.choose import Choice
from overlap_train.select.method import Method, packed_bytes
from overlap_train.tools.bench.operators import baselines_of
from overlap_train.tools.measure.cases import OPS, PASSES
from overlap_train.tools.measure.cases import Case as Measured
from overlap_train.tools.measure.results import Results
from overlap_train.tools.measure.runs import Session, inputs_of, overlapped, problem_of
from overlap_train.tools.measure.world import World
from tests.linear_cases import Case, column, poison, row
from tests.processes import run_ranks, values
from tests.protocol.test_blocks import by_formula
from tests.protocol.test_fp8 import CPU, OPERATORS


def _case(method: str, dtype: torch.dtype, **settings: Any) -> Case:
    config = OverlapConfig(**{"method": method, "fp8": "blockwise", "timeout_s": 30.0, **settings})
    return Case(dist.group.WORLD, CPU, config, dtype)


def rounded(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """What x is in e4m3 with a scale for each block, in fp64."""
    numbers, scales = map(torch.from_numpy, by_formula(x, height, width))
    return numbers / scales.repeat_interleave(height, 0).repeat_interleave(width, 1)


def _errors(rank: int, world: int, method: str, settings: dict[str, Any]) -> tuple[dict[str, float], bool]:
    """The largest error of each result against fp64 of the rounded operands; whether a second run has the same bits. Numbers
    differ in size from row to row and from column to column: a scale of others would be wrong by far."""
    case, errors, runs = _case(method, torch.float32, **settings), {}, []
    random = torch.Generator().manual_seed(3)
    m, k, n = 384 * world, 640, 128
    x, w, dy = (torch.randn(*shape, generator=random) for shape in ((m, k), (n * world, k), (m, n * world)))
    of_rows, of_columns = (torch.randn(m, generator=random).exp() for _ in range(2))
    x, w = (matrix * of_rows[: len(matrix), None] * of_columns[:k] for matrix in (x, w))
    bias, mine = torch.randn(n, generator=random), (lambda full, dim: full.chunk(world, dim)[rank])

    def note(what: str, found: torch.Tensor, right: torch.Tensor) -> None:
        errors[what] = float((found.double() - right).abs().max() / right.abs().max())

    def run(operator: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        w.main_grad, w.fp8_copies, found = torch.ones_like(w), Fp8Copies(), []  # type: ignore[attr-defined]
        for _ in range(2):
            x.grad, w.main_grad = None, torch.ones_like(w)  # type: ignore[attr-defined]
            poison(case)
            y = operator(x, w, b, group=case.group, config=case.config)
            y.backward(dy)
            found.append([y.detach(), x.grad, w.main_grad - 1])  # type: ignore[attr-defined]
        runs.append(all(torch.equal(*pair) for pair in zip(*found, strict=True)))
        return found[0]

    y, dx, dw = run(all_gather_linear, case.mine(x, 0), case.mine(w, 0), bias, mine(dy, 1))
    w8s = [rounded(s, 128, 128) for s in w.chunk(world)]
    dys = [rounded(s, 1, 128) for s in dy.chunk(world, 1)]
    note("column y", y, rounded(x, 1, 128) @ w8s[rank].t() + bias)
    note("column dx", dx, mine(sum(a @ b for a, b in zip(dys, w8s, strict=True)), 0))  # type: ignore[arg-type]
    note("column dw", dw, rounded(mine(dy, 1), 128, 1).t() @ rounded(x, 128, 1))
    # row: x of other features a rank, dy of other rows
    x, w, dy = torch.randn(m, n * world, generator=random), w.t().contiguous(), x
    bias = torch.randn(k, generator=random)
    y, dx, dw = run(linear_reduce_scatter, case.mine(x, 1), case.mine(w, 1), bias, mine(dy, 0))
    w8s = [rounded(s, 128, 128) for s in w.chunk(world, 1)]
    xs = [rounded(s, 1, 128) for s in x.chunk(world, 1)]
    note("row y", y, mine(sum(a @ b.t() for a, b in zip(xs, w8s, strict=True)), 0) + bias)  # type: ignore[arg-type]
    note("row dx", dx, rounded(dy, 1, 128) @ w8s[rank])
    note("row dw", dw, rounded(dy, 128, 1).t() @ rounded(mine(x, 1), 128, 1))
    shutdown()
    return errors, all(runs)


@pytest.mark.parametrize(
    ("method", "world", "settings"),
    [
        ("chunked", 2, {}),
        ("auto", 3, {}),
        ("chunked", 2, {"gathered_input": "keep"}),
        ("collective", 2, {}),
        ("collective", 2, {"gathered_input": "keep"}),
    ],
)
def test_results_are_those_of_the_rounded_operands(method: str, world: int, settings: dict[str, Any]) -> None:
    for errors, same in values(run_ranks(world, _errors, method, settings, limit_s=60)):
        assert len(errors) == 6 and max(errors.values()) < 1e-5 and same, errors


def _exactly(rank: int, world: int, method: str) -> int:
    case = _case(method, torch.bfloat16)
    for seed, shape in enumerate((((128,), 128, 256), ((64, 2), 256, 128))):
        column(case, *shape, seed=seed, bias=seed == 0)
        row(case, *shape, seed=seed, bias=seed == 0)
    return 2


@pytest.mark.parametrize("method", ["chunked", "low_latency"])
def test_integers_exactly(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert values(run_ranks(2, _exactly, method, limit_s=60)) == [2, 2]


def _sent(rank: int, world: int) -> list[tuple[int, ...]]:
    """Shapes of what gathers push, and of the blocks of their slots."""
    case, shapes = _case("chunked", torch.float32), []
    w = torch.randn(128, 640).requires_grad_()
    own_push, own_open = HostCopyEngine.push, Workspace.open

    def push(engine: Any, tensor: torch.Tensor, routes: Any) -> None:
        shapes.append(tuple(tensor.shape))
        own_push(engine, tensor, routes)

    def opened(workspace: Any, shape: Any, *rest: Any) -> Any:
        shapes.append(tuple(shape))
        return own_open(workspace, shape, *rest)

    with mock.patch.object(HostCopyEngine, "push", push), mock.patch.object(Workspace, "open", opened):
        x = torch.randn(128, 640).requires_grad_()
        all_gather_linear(x, w, group=case.group, config=case.config).sum().backward()
        column, shapes[:] = shapes[:], []
        x = torch.randn(256, 640).requires_grad_()
        linear_reduce_scatter(x, w, group=case.group, config=case.config).sum().backward()
    return [shape for shape in (*column, *shapes) if shape[-1] not in (128, 640)]


def test_numbers_and_scales_are_one_copy_under_one_signal() -> None:
    """So none can be late or stale without the other: each gather opens one call, and pushes one tensor that holds both."""
    alone, both = (128, packed_bytes(640)), (128, 2 * packed_bytes(128))
    assert values(run_ranks(2, _sent, limit_s=60)) == [[alone] * 4 + [both] * 2] * 2


def _measured(rank: int, world: int) -> list[tuple[int, int]]:
    """Of what `bench` times: bytes that a gather's row has, and those of training. Results are checked."""
    session = Session(
        ("chunked",), torch.float32, True, OverlapConfig(timeout_s=30.0), World(dist.group.WORLD, CPU, rank, world), Results(),
        "blockwise",
    )  # fmt: skip
    cases = [Measured(op, op, pass_, 256, 256, 768) for op in OPS for pass_ in PASSES]
    domain = session.domain([case.slot_bytes(world, session.dtype, session.fp8) for case in cases])
    found = []
    for case in cases:
        inputs, planned = inputs_of(case, session), case.planned(world, session.dtype, "blockwise")
        baselines = baselines_of(case, session.world, inputs.first)
        for run in (overlapped(case, domain, Choice(Method("chunked"), ""), inputs.first), baselines["sequence"]):
            assert problem_of(case.name, run, inputs, session.world, inputs.check) is None
        if planned.kind.gathers:
            found.append((inputs.first.left.shape[1], planned.row_bytes))
    return found


def test_what_is_measured_sends_what_training_sends() -> None:
    alone, both = packed_bytes(768), 2 * packed_bytes(256)
    assert values(run_ranks(2, _measured, limit_s=60)) == [[(alone, alone), (both, both)]] * 2


def _strange_numbers(rank: int, world: int) -> list[bool]:
    """What is no number on one rank shows in its row on all of them; infinity is the largest number."""
    case, found = _case("chunked", torch.float32), []
    w = torch.eye(128)
    for strange, shown in ((0.0, 0.0), (torch.inf, 448.0), (torch.nan, torch.nan)):
        x = torch.zeros(128, 128)
        x[3, 5] = strange if rank == 1 else 0.0
        y = all_gather_linear(x, w, group=case.group, config=case.config)
        found.append(y[131, 5].item() == shown or bool(y[131].isnan().all() and strange != strange))
        y[131] = 0.0
        found.append(bool(y.eq(0).all()))
    return found


def test_strange_numbers() -> None:
    assert values(run_ranks(2, _strange_numbers, limit_s=60)) == [[True] * 6] * 2


def _refusals(rank: int, world: int) -> list[str]:
    case, said = _case("chunked", torch.float32), []
    x, w = torch.ones(128, 128), torch.ones(128, 128)
    calls = (
        lambda: all_gather_linear(torch.ones(64, 128), w, group=case.group, config=case.config),
        lambda: linear_reduce_scatter(torch.ones(384, 128), w, group=case.group, config=case.config),
        lambda: all_gather_linear(x, torch.ones(192, 128), group=case.group, config=case.config),
        lambda: all_gather_linear(x, w, group=case.group, config=case.config.by("fused")),
        lambda: all_gather_linear(x, w, group=case.group, config=case.config.by("direct")),
        lambda: all_gather_linear(
            x, w, group=case.group,
            config=case.config if rank else OverlapConfig(method="chunked", fp8="tensorwise", timeout_s=30.0),
        ),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_refusals_are_told_to_every_rank() -> None:
    for said in values(run_ranks(2, _refusals, limit_s=60)):
        patterns = (
            "fp8 with 128 rows of all ranks: not a multiple of 2 x 128", "384 rows of all ranks", r"w_shard_n \(192, 128\)",
            "method='fused' with fp8='blockwise': .*on Hopper GPUs", "method='direct' with fp8='blockwise'",
            "fp8=tensorwise.*fp8=blockwise|fp8=blockwise.*fp8=tensorwise",
        )  # fmt: skip
        assert all(map(re.search, patterns, said)), said


def _keeps(rank: int, world: int, operator: str) -> list[bool]:
    """A weight with a holder is made once: what is written into it later through .data is not seen before clear()."""
    case, found = _case("chunked", torch.float32), []
    w, x = torch.nn.Parameter(torch.randn(256, 128)), torch.randn(256, 128)
    w.fp8_copies = copies = Fp8Copies()  # type: ignore[attr-defined]
    for change in (lambda: None, lambda: w.data.fill_(torch.nan), copies.clear):
        change()
        leaf = x.clone().requires_grad_()
        y = OPERATORS[operator](leaf, w, group=case.group, config=case.config)
        y.sum().backward()
        found += [bool(y.isfinite().all()), bool(leaf.grad.isfinite().all())]  # type: ignore[union-attr]
    return found


def _in_a_trial(rank: int, world: int, folder: str) -> list[bool]:
    """Whether what is written into a weight is seen: in the first call, by the untuned plan, and while methods take turns."""
    case, found = _case("auto", torch.float32, tune_steps=100, tuning_dir=folder), []
    w = torch.nn.Parameter(torch.ones(256, 128))
    w.fp8_copies = Fp8Copies()  # type: ignore[attr-defined]
    for number in range(4):
        w.data.fill_(number)
        y = all_gather_linear(torch.ones(128, 128), w, group=case.group, config=case.config)
        found.append(y[0, 0].item() == 128 * number)
    return found


def test_methods_that_take_turns_all_quantise(tmp_path: Path) -> None:
    assert values(run_ranks(2, _in_a_trial, str(tmp_path), limit_s=60)) == [[True] * 4] * 2


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_weight_is_kept_until_its_owner_clears_it(operator: str) -> None:
    assert values(run_ranks(2, _keeps, operator, limit_s=60)) == [[True] * 4 + [False] * 2] * 2
