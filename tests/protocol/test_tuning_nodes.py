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
from overlap_train.planning.table import Winner, read, save
from overlap_train.planning.table_key import Key, key_of
from overlap_train.schedule.order import GATHER, GEMM_A2A, SCATTER
from overlap_train.select.passes import SCATTER_AND_WGRAD, Pass
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
IN_CHUNKS = {"chunked", "chunked in 2", "chunked in 4", "chunked in 8", "collective"}
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


def trained(folder: Path, node_ranks: int = NODE_RANKS) -> Engines:
    """The same on all ranks."""
    first, *others = values(run_ranks(WORLD, _train, str(folder), node_ranks))
    assert all(other == first for other in others)
    return dict(first)


def stored(folder: Path) -> dict[tuple[str, int, int, int], dict[str, Any]]:
    (file,) = folder.glob("tuned-*-4-ranks-2-nodes-*.json")
    document = json.loads(file.read_text())
    assert document["key"]["nodes"] == NODES
    return {(entry["kind"], entry["m"], entry["n"], entry["k"]): entry for entry in document["winners"]}


def expected(winner: Winner, pass_: Pass) -> tuple[str, int, str]:
    """What `auto` makes of it. CPU processes send whole blocks where nothing was measured."""
    variant = winner.variant_of(winner.method)
    chunks = max(1, variant.chunks) if variant else 1
    told = {1: ""}.get(chunks, f"; blocks in {chunks} chunks")
    return winner.method, chunks, f"auto: tuned for {pass_}{told}"


def test_what_was_measured_on_two_nodes_is_what_auto_does_there_and_only_there(
    script_server: ScriptServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    said = ""
    for more in ((), ("--ulysses",)):
        arguments = ("--tuning-dir", str(tmp_path), *more)
        status, said = script_server.run(*TUNE, *arguments, folder=tmp_path_factory.mktemp("tune"), world=WORLD)
        assert status == 0, said
        assert said.count("a group of 4 ranks on 2 nodes of 2, as node_ranks says: ranks 0-1, 2-3; gloo") == 1
    for (kind, *_), entry in stored(tmp_path).items():
        in_one = {"chunked", "collective"}
        assert set(entry["ms"]) == (IN_CHUNKS if kind in (GATHER, SCATTER, SCATTER_AND_WGRAD) else in_one), kind
    table = read(str(tmp_path), key_of(CPU, WORLD, NODES))
    there = trained(tmp_path)
    assert there.keys() == (TP | ULYSSES).keys()
    for name, pass_ in (TP | ULYSSES).items():
        winner = table.find(pass_)
        assert winner is not None
        assert there[name] == expected(winner, pass_)
    assert all("not tuned" in reason for _, _, reason in trained(tmp_path, node_ranks=4).values())


def winners(method: str, best: str = "") -> list[Winner]:
    ms = {"chunked": 2.0, "collective": 2.0} | ({best: 1.0} if best else {})
    return [Winner(pass_, method, ms) for pass_ in TP.values()]


def of_key(nodes: int) -> Key:
    return key_of(CPU, WORLD, nodes)


def test_the_number_of_chunks_that_was_fastest_runs_and_is_right(tmp_path: Path) -> None:
    save(str(tmp_path), of_key(NODES), winners("chunked", "chunked in 4"))
    for name, (method, chunks, reason) in trained(tmp_path).items():
        if name in TP:
            assert (method, chunks) == ("chunked", 4) and reason.endswith("; blocks in 4 chunks")


def test_rows_of_one_node_and_of_two_are_never_mixed(tmp_path: Path) -> None:
    """As many ranks in both."""
    save(str(tmp_path), of_key(1), winners("collective"))
    assert {reason for _, _, reason in trained(tmp_path).values()} == {"auto: not tuned: CPU tensors on several nodes"}
    save(str(tmp_path), of_key(NODES), winners("chunked", "chunked in 2"))
    assert {there[:2] for name, there in trained(tmp_path).items() if name in TP} == {("chunked", 2)}
    in_one = trained(tmp_path, node_ranks=4)
    assert {here[:2] for name, here in in_one.items() if name in TP} == {("collective", 1)}


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
