"""Linears in fp8 with a scale for each block between real processes: against fp64 of the same rounded operands, and refusals."""

from __future__ import annotations

from functools import partial
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
from tests.linear_cases import poison
from tests.processes import run_ranks, values
from tests.protocol.test_blocks import by_formula
from tests.protocol.test_fp8 import CPU, LINEARS, OPERATORS, case_of, exactly, refused, right_results

_case = partial(case_of, fp8="blockwise")


def rounded(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """What x is in e4m3 with a scale for each block, in fp64."""
    numbers, scales = map(torch.from_numpy, by_formula(x, height, width))
    return numbers / scales.repeat_interleave(height, 0).repeat_interleave(width, 1)


def _rounded_for(x: torch.Tensor, name: str, of_dw: bool) -> torch.Tensor:
    """With a scale for each 128 elements of a row, for dw of a column, and for each 128 x 128 of w."""
    return rounded(x, 128 if of_dw or name == "w" else 1, 1 if of_dw else 128)


def _errors(rank: int, world: int, method: str, settings: dict[str, Any]) -> tuple[dict[str, float], bool]:
    """The largest error of each result against fp64 of the rounded operands, over the largest element of its row or of its
    column, whichever is smaller; whether a second run has the same bits. Numbers differ in size from row to row and from column
    to column: what is small in its block has few digits, and other blocks give it others."""
    case, errors, same = _case(method, torch.float32, **settings), {}, []
    random = torch.Generator().manual_seed(3)
    m, k, n = 384 * world, 640, 128
    x, w, dy = (torch.randn(*shape, generator=random) for shape in ((m, k), (n * world, k), (m, n * world)))
    of_rows, of_columns = (torch.randn(m, generator=random).mul(2).exp() for _ in range(2))
    x, w = (matrix * of_rows[: len(matrix), None] * of_columns[:k] for matrix in (x, w))
    operands = {"column": (x, w, dy), "row": (torch.randn(m, n * world, generator=random), w.t().contiguous(), x)}
    for kind, (x, w, dy) in operands.items():
        linear, runs = LINEARS[kind], []
        x_shard, w_shard, dy_shard = case.mine(x, linear.x), case.mine(w, linear.w), case.mine(dy, linear.y).detach()
        bias = torch.randn(len(w_shard), generator=random)
        w_shard.fp8_copies = Fp8Copies()  # type: ignore[attr-defined]
        for _ in range(2):
            x_shard.grad, w_shard.main_grad = None, torch.ones_like(w_shard)  # type: ignore[attr-defined]
            poison(case)
            y = linear.operator(x_shard, w_shard, bias, group=case.group, config=case.config)
            y.backward(dy_shard)
            runs.append([y.detach(), x_shard.grad, w_shard.main_grad - 1])  # type: ignore[attr-defined]
        same.append(all(map(torch.equal, *runs)))
        right_y, *right = right_results(kind, case, x, w, dy, _rounded_for)
        for name, result, expected in zip(("y", "dx", "dw"), runs[0], (right_y + bias, *right), strict=True):
            size = torch.minimum(*(expected.abs().amax(dim, keepdim=True) for dim in (0, 1))).clamp(min=1e-30)
            errors[f"{kind} {name}"] = float(((result.double() - expected).abs() / size).max())
    shutdown()
    return errors, all(same)


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


@pytest.mark.parametrize("method", ["chunked", "low_latency"])
def test_integers_exactly(method: str) -> None:
    shapes = (((128,), 128, 256), ((64, 2), 256, 128))
    assert values(run_ranks(2, exactly, method, {"fp8": "blockwise"}, shapes, limit_s=60)) == [2, 2]


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


REFUSALS = (  # of x and w of these shapes
    (all_gather_linear, (64, 128), (128, 128), "chunked", "fp8 with 128 rows of all ranks: not a multiple of 2 x 128"),
    (linear_reduce_scatter, (384, 128), (128, 128), "chunked", "384 rows of all ranks"),
    (all_gather_linear, (128, 128), (192, 128), "chunked", r"w_shard_n \(192, 128\)"),
    (all_gather_linear, (128, 128), (128, 128), "fused", "method='fused' with fp8='blockwise': .*on Hopper GPUs"),
    (all_gather_linear, (128, 128), (128, 128), "direct", "method='direct' with fp8='blockwise'"),
)


def test_refusals_are_told_to_every_rank() -> None:
    both = "fp8=tensorwise.*fp8=blockwise|fp8=blockwise.*fp8=tensorwise"
    values(run_ranks(2, refused, "blockwise", REFUSALS, "tensorwise", both, limit_s=60))


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


def _while_methods_take_turns(rank: int, world: int, folder: str) -> list[bool]:
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
    assert values(run_ranks(2, _while_methods_take_turns, str(tmp_path), limit_s=60)) == [[True] * 4] * 2


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_weight_is_kept_until_its_owner_clears_it(operator: str) -> None:
    assert values(run_ranks(2, _keeps, operator, limit_s=60)) == [[True] * 4 + [False] * 2] * 2
