"""The tuner between real CPU ranks: what it finds is what `auto` then does, on every rank alike."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_train import OverlapConfig, all_gather_linear, linear_reduce_scatter, shutdown
from overlap_train.group.domain import OverlapDomain
from overlap_train.group.signals import Tag
from overlap_train.ops.plan import EnginePlan
from overlap_train.ops.table import IN_NODE
from overlap_train.schedule.kinds import Kind
from overlap_train.select.method import Method, Pass
from overlap_train.select.table import Winner, key_of, path_of, read, save
from overlap_train.tools.measure.results import Results
from overlap_train.tools.measure.runs import Session
from overlap_train.tools.measure.world import World
from overlap_train.tools.tune.candidates import model_cases, one_a_bucket, tune_case
from overlap_train.tools.tune.command import keep
from tests.processes import run_ranks, values
from tests.script_server import ScriptServer

GATHERS, SCATTERS = IN_NODE[Kind.AG_GEMM], IN_NODE[Kind.GEMM_RS]

CPU = torch.device("cpu")
M, INSIDE, OUTSIDE = 16, 64, 32  # the linears of the model "tiny": qkv and fc1 [64, 32], proj and fc2 [32, 32]
TUNE = ("-m", "overlap_train", "tune", "--model", "tiny", "--seq", str(M))
Choices = dict[str, tuple[str, str]]  # "fc1/fprop" -> method, reason


def train_a_step(config: OverlapConfig, world: int) -> Choices:
    """Forward and backward of the tiny layer, compared with one rank's; how its passes were done, and why."""
    group, ran = dist.group.WORLD, record_engines()
    generator = torch.Generator().manual_seed(1)

    def ones(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=generator).float()

    x, w1, h, w2 = ones(M, OUTSIDE), ones(INSIDE, OUTSIDE), ones(M, OUTSIDE), ones(OUTSIDE, OUTSIDE)
    mine = [
        t.chunk(world, dim)[dist.get_rank()].clone().requires_grad_() for t, dim in ((x, 0), (w1, 0), (h, 1), (w2, 1))
    ]
    y = all_gather_linear(mine[0], mine[1], group=group, config=config, name="fc1")
    z = linear_reduce_scatter(mine[2], mine[3], group=group, config=config, name="fc2")
    (y.sum() + z.sum()).backward()
    rank = dist.get_rank()
    assert torch.equal(y, (x @ w1.t()).chunk(world, 1)[rank]) and torch.equal(z, (h @ w2.t()).chunk(world, 0)[rank])
    expected = [
        torch.ones(M, INSIDE) @ w1,
        torch.ones(INSIDE, M) @ x,
        torch.ones(M, OUTSIDE) @ w2,
        torch.ones(OUTSIDE, M) @ h,
    ]
    for leaf, whole, dim in zip(mine, expected, (0, 0, 1, 1), strict=True):
        assert torch.equal(leaf.grad, whole.chunk(world, dim)[rank])
    shutdown()
    assert ran.pop("fc1/wgrad")[0] == ran["fc1/fprop"][0], "the weight gradient gathers as the forward pass does"
    return ran


def record_engines() -> Choices:
    """Pass -> the method of the engine that was made for it, and its plan's reason; filled in as engines are made."""
    ran: Choices = {}

    def recording(method: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(domain: OverlapDomain, plan: EnginePlan, tag: Tag, *operands: torch.Tensor) -> Any:
            ran[tag.op] = (method, plan.reason)
            return make(domain, plan, tag, *operands)

        return made

    for engines in (GATHERS, SCATTERS):
        engines.update({method: recording(method, make) for method, make in engines.items()})  # type: ignore[arg-type]
    return ran


def _train(rank: int, world: int, folder: str) -> Choices:
    return train_a_step(OverlapConfig(tuning_dir=folder, timeout_s=30.0), world)


PASSES = {  # of one rank of two
    "fc1/fprop": Pass(Kind.AG_GEMM, M, INSIDE // 2, OUTSIDE, torch.float32, 2),
    "fc1/dgrad": Pass(Kind.GEMM_RS_AND_WGRAD, M, OUTSIDE, INSIDE // 2, torch.float32, 2),
    "fc2/fprop": Pass(Kind.GEMM_RS, M, OUTSIDE, OUTSIDE // 2, torch.float32, 2),
    "fc2/dgrad": Pass(Kind.AG_GEMM, M, OUTSIDE // 2, OUTSIDE, torch.float32, 2),
}


def test_the_second_run_uses_what_the_first_has_measured_and_says_so(
    script_server: ScriptServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = values(run_ranks(2, _train, str(tmp_path)))
    assert all("not tuned" in reason for choices in before for _, reason in choices.values())
    arguments = ("--quick", "--tuning-dir", str(tmp_path))
    status, said = script_server.run(*TUNE, *arguments, folder=tmp_path_factory.mktemp("tune"))
    assert status == 0, said
    (file,) = tmp_path.iterdir()
    assert file.name in said and len(re.findall(r"\d\.\d\d x as fast as collective", said)) == 4
    stored = json.loads(file.read_text())["winners"]
    assert len(stored) == 4 and all(
        {one["name"] for one in winner["timed"]} == {"chunked", "collective"} for winner in stored
    )
    first, second = values(run_ranks(2, _train, str(tmp_path)))
    assert first == second and first.keys() == PASSES.keys()
    table = read(str(tmp_path), key_of(CPU, 2))
    for name, pass_ in PASSES.items():
        winner = table.get(pass_.bucket)
        assert winner is not None
        assert first[name] == (winner.how.name, f"auto: tuned for {pass_}")


def slow(start: Callable[..., Any]) -> Callable[..., Any]:
    def started(*arguments: Any) -> Any:
        time.sleep(0.03)
        return start(*arguments)

    return started


def broken(*arguments: Any) -> Any:
    raise RuntimeError("no kernel image is available")


def _tune(rank: int, world: int, folder: str) -> list[str]:
    """With a slow chunked and a fused that does not compile; returns the notes."""
    for methods in (GATHERS, SCATTERS):
        methods["chunked"], methods["fused"] = slow(methods["chunked"]), broken  # type: ignore[index]
    here = World(dist.group.WORLD, CPU, rank, world)
    config = OverlapConfig(timeout_s=30.0, tuning_dir=folder)
    results = Results()
    session = Session(("chunked", "fused", "collective"), torch.float32, True, config, here, results)
    domain = session.domain([M * INSIDE * 4])
    for case in one_a_bucket(model_cases("tiny", [M], world), world):
        keep(folder, key_of(CPU, world), tune_case(case, domain, session), here)
    shutdown()
    return [] if results.failed else results.notes


def test_a_slow_default_loses_and_a_broken_candidate_is_left_out_and_noted(tmp_path: Path) -> None:
    for notes in values(run_ranks(2, _tune, str(tmp_path))):
        assert len(notes) == 10, "four passes in two variants, one of them, a column's backward, in two more"
        assert all(
            re.search("fused(; whole blocks)?(; split reduction)? left out: RuntimeError: no kernel image", note)
            for note in notes
        )
    for choices in values(run_ranks(2, _train, str(tmp_path))):
        assert {method for method, _ in choices.values()} == {"collective"}
        assert all("tuned for M=16" in reason for _, reason in choices.values())


EACH = {"fc1/fprop": "collective", "fc1/dgrad": "chunked", "fc2/fprop": "collective", "fc2/dgrad": "chunked"}


def _by_tables(rank: int, world: int, homes: str) -> tuple[list[Choices], str]:
    """Steps with what lies in several home folders, of which each rank has its own; and a folder that comes too late."""
    ran, engines = [], (dict(GATHERS), dict(SCATTERS))
    for home in ("each", "differ", "none", "three"):
        os.environ["HOME"] = f"{homes}/{home}/{rank}"
        ran.append(train_a_step(OverlapConfig(timeout_s=30.0), world))
        GATHERS.update(engines[0]), SCATTERS.update(engines[1])
    x, w = torch.ones(4, 8), torch.ones(4, 8)
    all_gather_linear(x, w, group=dist.group.WORLD, config=OverlapConfig(tuning_dir=homes))
    try:
        all_gather_linear(x, w, group=dist.group.WORLD, config=OverlapConfig(tuning_dir=homes + "/other"))
    except ValueError as error:
        return ran, str(error)
    return ran, "no error"


def test_all_ranks_go_by_what_rank_0_has_measured(tmp_path: Path) -> None:
    """each: a method for each pass. differ: rank 1 has other winners. none: rank 0 has no table. three: that of other ranks."""

    def write(home: str, rank: int, method: Callable[[str], str], world: int = 2) -> Path:
        folder = tmp_path / home / str(rank) / ".cache" / "overlap_train"
        passes = {name: replace(pass_, world=world) for name, pass_ in PASSES.items()}
        return save(
            str(folder), key_of(CPU, world), [Winner(p, Method(method(name)), {}) for name, p in passes.items()]
        )

    write("each", 0, EACH.__getitem__)
    write("differ", 0, lambda name: "collective")
    write("differ", 1, lambda name: "chunked")
    write("none", 1, lambda name: "collective")
    three = write("three", 0, lambda name: "collective", world=3)
    shutil.copy(three, path_of(str(three.parent), key_of(CPU, 2)))  # the fault: a file under another's name
    with pytest.warns(UserWarning, match="it was measured with"):
        read(str(three.parent), key_of(CPU, 2))
    (first, error), (second, _) = values(run_ranks(2, _by_tables, str(tmp_path)))
    assert first == second and "--overlap-train-tuning-dir" in error and "shutdown()" in error
    each, differ, none, others = first
    assert {name: method for name, (method, _) in each.items()} == EACH
    assert {method for method, _ in differ.values()} == {"collective"}
    for choices in (none, others):
        assert {method for method, _ in choices.values()} == {"chunked"}
        assert all("not tuned" in reason for _, reason in choices.values())


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_measured(
    script_server: ScriptServer, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    status, said = script_server.run(*TUNE, "--tuning-dir", str(tmp_path / "file"), folder=tmp_path)
    assert status != 0
    assert said.count("rank 0 cannot write there (") == 1 and "[1/4]" not in said
