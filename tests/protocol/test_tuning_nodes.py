"""The tuner across nodes, on real CPU ranks that are told where a node ends: what it finds is what `auto` then does there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_train import OverlapConfig, all_gather_linear, linear_all_to_all, linear_reduce_scatter, shutdown
from overlap_train.group.registry import made_domain
from overlap_train.schedule.order import GATHER, GEMM_A2A, SCATTER
from overlap_train.select.method import Method
from overlap_train.select.passes import SCATTER_AND_WGRAD, Pass
from overlap_train.select.table import Winner, key_of, read, save
from tests.processes import run_ranks, values
from tests.script_server import ScriptServer

CPU = torch.device("cpu")
M, INSIDE, OUTSIDE = 64, 64, 32  # the linears of the model "tiny": qkv and fc1 [64, 32], proj and fc2 [32, 32]
WORLD, NODE_RANKS, NODES = 4, 2, 2
TUNE = ("-m", "overlap_train", "tune", "--model", "tiny", "--seq", str(M), "--quick", "--node-ranks", str(NODE_RANKS))
TP = {
    "fc1/fprop": Pass(GATHER, M, INSIDE // WORLD, OUTSIDE, torch.float32, WORLD),
    "fc1/dgrad": Pass(SCATTER_AND_WGRAD, M, OUTSIDE, INSIDE // WORLD, torch.float32, WORLD),
    "fc2/fprop": Pass(SCATTER, M, OUTSIDE, OUTSIDE // WORLD, torch.float32, WORLD),
    "fc2/dgrad": Pass(GATHER, M, OUTSIDE // WORLD, OUTSIDE, torch.float32, WORLD),
}
QKV = Pass(GEMM_A2A, M, INSIDE, OUTSIDE, torch.float32, WORLD)
ULYSSES = {"qkv/fprop": QKV, "qkv/dgrad": QKV.dgrad}
IN_CHUNKS = {("chunked", 0), ("chunked", 2), ("chunked", 4), ("chunked", 8), ("collective", 0)}
Engines = dict[str, tuple[str, int, str]]  # "fc1/fprop" -> method, chunks, reason


def _train(rank: int, world: int, folder: str, node_ranks: int) -> Engines:
    """Forward and backward of a column, a row and a QKV linear, compared with one rank's; how they were done, and why."""
    config = OverlapConfig(tuning_dir=folder, timeout_s=30.0, node_ranks=node_ranks)
    generator, group = torch.Generator().manual_seed(1), dist.group.WORLD

    def ones(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=generator).float()

    x, w1, h, w2, wq = (
        ones(M, OUTSIDE),
        ones(INSIDE, OUTSIDE),
        ones(M, OUTSIDE),
        ones(OUTSIDE, OUTSIDE),
        ones(INSIDE, OUTSIDE),
    )

    def mine(full: torch.Tensor, dim: int) -> torch.Tensor:
        return full.chunk(world, dim)[rank].clone().requires_grad_()

    xs, ws, hs, vs, xq, q = mine(x, 0), mine(w1, 0), mine(h, 1), mine(w2, 1), mine(x, 0), wq.clone().requires_grad_()
    y = all_gather_linear(xs, ws, group=group, config=config, name="fc1")
    z = linear_reduce_scatter(hs, vs, group=group, config=config, name="fc2")
    a = linear_all_to_all(xq, q, group=group, config=config, name="qkv")
    assert torch.equal(y, (x @ w1.t()).chunk(world, 1)[rank]) and torch.equal(z, (h @ w2.t()).chunk(world, 0)[rank])
    assert torch.equal(a.flatten(0, -2), (x @ wq.t()).chunk(world, 1)[rank])
    (y.sum() + z.sum() + a.sum()).backward()
    for leaf, whole, dim in (
        (xs, torch.ones(M, INSIDE) @ w1, 0), (ws, torch.ones(INSIDE, M) @ x, 0), (hs, torch.ones(M, OUTSIDE) @ w2, 1),
        (vs, torch.ones(OUTSIDE, M) @ h, 1), (xq, torch.ones(M, INSIDE) @ wq, 0),
    ):  # fmt: skip
        assert leaf.grad is not None and torch.equal(leaf.grad, whole.chunk(world, dim)[rank])
    found = _engines()
    shutdown()
    return found


def _engines() -> Engines:
    domain, found = made_domain(dist.group.WORLD), {}
    assert domain is not None
    names = {"all_gather_linear": "fc1", "linear_reduce_scatter": "fc2", "linear_all_to_all": "qkv"}
    for planned in map(domain.book.plans.get, domain.book.plans):
        for one in planned.values():
            for part in ("fprop", "dgrad"):
                engine: Any = getattr(one.plan, part)
                found[f"{names[one.plan.spec.name]}/{part}"] = (engine.method, engine.chunks, engine.reason)
    return found


def _steps(rank: int, world: int, folders: tuple[str, ...]) -> list[Engines]:
    """With each of these folders on two nodes; with the last one also on one."""
    return [_train(rank, world, folder, NODE_RANKS) for folder in folders] + [_train(rank, world, folders[-1], world)]


def trained(*folders: Path) -> list[Engines]:
    """The same on all ranks."""
    first, *others = values(run_ranks(WORLD, _steps, tuple(map(str, folders)), limit_s=60))
    assert all(other == first for other in others)
    return list(first)


def stored(folder: Path) -> dict[tuple[str, int, int, int], dict[str, Any]]:
    (file,) = folder.glob("tuned-*-4-ranks-2-nodes-*.json")
    document = json.loads(file.read_text())
    assert document["key"]["nodes"] == NODES
    return {(entry["kind"], entry["m"], entry["n"], entry["k"]): entry for entry in document["winners"]}


def test_what_was_measured_on_two_nodes_is_what_auto_does_there_and_only_there(
    script_server: ScriptServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tuned, four, one = (tmp_path / name for name in ("tuned", "four", "one"))
    for more in ((), ("--ulysses",)):
        arguments = ("--tuning-dir", str(tuned), *more)
        status, said = script_server.run(*TUNE, *arguments, folder=tmp_path_factory.mktemp("tune"), world=WORLD)
        assert status == 0, said
        assert said.count("a group of 4 ranks on 2 nodes of 2, as node_ranks says: ranks 0-1, 2-3; gloo") == 1
    for (kind, *_), entry in stored(tuned).items():
        in_one = {("chunked", 0), ("collective", 0)}
        timed = {(one["name"], one.get("chunks", 0)) for one in entry["timed"]}
        assert timed == (IN_CHUNKS if kind in (GATHER, SCATTER, SCATTER_AND_WGRAD) else in_one), kind
    in_four = Method("chunked", chunks=4)
    fastest = [Winner(pass_, in_four, {Method("chunked"): 2.0, in_four: 1.0}) for pass_ in TP.values()]
    save(str(four), key_of(CPU, WORLD, NODES), fastest)
    save(str(one), key_of(CPU, WORLD, 1), [Winner(pass_, Method("collective"), {}) for pass_ in TP.values()])
    table = read(str(tuned), key_of(CPU, WORLD, NODES))
    by_tuner, in_chunks, untuned, inside = trained(tuned, four, one)
    assert by_tuner.keys() == (TP | ULYSSES).keys()
    for name, pass_ in (TP | ULYSSES).items():
        winner = table.find(pass_)
        assert winner is not None
        method, chunks, reason = by_tuner[name]
        assert method == winner.how.name and reason.startswith(f"auto: tuned for {pass_}")
        assert chunks == max(1, winner.how.chunks)
    assert {found[:2] for name, found in in_chunks.items() if name in TP} == {("chunked", 4)}
    assert {reason for _, _, reason in untuned.values()} == {"auto: not tuned: CPU tensors on several nodes"}
    assert {found[:2] for name, found in inside.items() if name in TP} == {("collective", 1)}


def test_what_does_not_fit_the_nodes_is_said_before_anything_is_measured(
    script_server: ScriptServer, tmp_path: Path
) -> None:
    for words, message in (
        (("--node-ranks", "3"), "node_ranks=3 does not divide the group's 4 ranks"),
        (("--methods", "direct"), "--methods: 'direct' stays inside a node, and the ranks are on 2; leave it out"),
    ):
        status, said = script_server.run(
            *TUNE, *words, "--tuning-dir", str(tmp_path), folder=tmp_path, world=WORLD, TRITON_INTERPRET="1"
        )
        assert status == 2 and said.count(message) == 1 and "[1/" not in said, said
