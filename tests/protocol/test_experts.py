"""The operators of experts between real processes: every problem exact, forward and backward, and the same bits on every run."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_train import OverlapConfig, dispatch_linear, expert_routing, linear_combine, shutdown
from overlap_train.ops.experts import OVERFLOW
from tests.expert_cases import NAMED, Experts, any_problem, check_problem, sum_in_order
from tests.linear_cases import Case
from tests.processes import run_ranks, values

CPU = torch.device("cpu")


def _case(method: str = "chunked", dtype: torch.dtype = torch.float32, **settings: Any) -> Case:
    return Case(dist.group.WORLD, CPU, OverlapConfig(method=method, timeout_s=30.0, **settings), dtype)


def _named(rank: int, world: int, method: str) -> dict[str, str]:
    ran = {name: check_problem(_case(method), make(world), seed=3) for name, make in NAMED.items()}
    for dtype in (torch.bfloat16, torch.float16):
        check_problem(_case(method, dtype), NAMED["dropped"](world), seed=4)
    sum_in_order(_case(method))
    shutdown()
    return ran


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("method", ["chunked", "collective"])
def test_every_problem(method: str, world: int) -> None:
    for ran in values(run_ranks(world, _named, method)):
        assert set(ran.values()) == {method}


def _random(rank: int, world: int, seeds: range) -> Counter[str]:
    ran = Counter(check_problem(_case("auto"), any_problem(seed, world), seed) for seed in seeds)
    shutdown()
    return ran


@pytest.mark.parametrize(
    ("world", "seeds"), [(1, range(20)), (2, range(20, 90)), (3, range(90, 140)), (4, range(140, 200))]
)
def test_random_problems(world: int, seeds: range) -> None:
    ran = values(run_ranks(world, _random, seeds, limit_s=200))
    assert ran[0].total() == len(seeds) and ran[0]["chunked"] > len(seeds) // 2


def _noise(rank: int, world: int, dtype: torch.dtype) -> None:
    """Ranks come in different orders."""
    case, runs = _case(dtype=dtype), []
    problem = Experts(4 * world, 3, (20,) * world, dropped=0.2)
    chosen = problem.chosen(1)[rank]
    x, w1, w2 = (torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype) for shape in
                 ((20, 24), (4, 32, 24), (4, 24, 16)))  # fmt: skip
    for run in range(4):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, w1, w2)]
        time.sleep(0.02 * (rank if run % 2 else world - rank))
        routing = expert_routing(chosen, group=case.group, config=case.config)
        y, _ = dispatch_linear(leaves[0], leaves[1], routing, torch.ones(20, 4 * world), config=case.config)
        z = linear_combine(y[:, :16] * y[:, 16:], leaves[2], routing, config=case.config)
        time.sleep(0.02 * (rank if run // 2 else world - rank))
        z.square().sum().backward()
        runs.append([z, *(leaf.grad for leaf in leaves)])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
    shutdown()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_run_gives_the_same_bits(dtype: torch.dtype) -> None:
    values(run_ranks(3, _noise, dtype))


def _grows(rank: int, world: int) -> list[tuple[str, str]]:
    """Few tokens, more on two of three ranks, all on one, and evenly again."""
    ran: list[tuple[str, str]] = []
    case = _case("auto", experts_room=1.5)
    w = torch.ones(2, 8, 8)
    for tokens, popular in ((4, 0), (64, 4), (64, 2), (64, 0)):
        evenly = torch.arange(tokens)[:, None] % (popular or 2 * world)
        routing = expert_routing(evenly, num_experts=2 * world, group=case.group, config=case.config)
        y, _ = dispatch_linear(
            torch.ones(tokens, 8), w, routing, config=case.config,
            on_plan=lambda plan, _: ran.append((plan.fprop.method, plan.fprop.reason)),
        )  # fmt: skip
        assert y.shape[0] == routing.rows_received and (y == 8).all()
    shutdown()
    with pytest.raises(RuntimeError, match="made before shutdown"):
        linear_combine(y, w, routing)
    return ran


def test_slots_grow_as_far_as_even_routing_needs_and_more_rows_are_a_collective() -> None:
    for ran in values(run_ranks(3, _grows)):
        assert [method for method, _ in ran] == ["chunked", "chunked", "collective", "chunked"]
        assert ran[2][1] == OVERFLOW != ran[3][1]


def _little_memory(rank: int, world: int) -> list[str]:
    """Slots of 1 MiB hold what is needed, but not twice as much; then not even that."""
    case, said = _case("auto", symmetric_mib=4), []
    for tokens in (900, 3000):
        try:
            routing = expert_routing(
                torch.ones(tokens, 2 * world, dtype=torch.bool), group=case.group, config=case.config
            )
            dispatch_linear(torch.ones(tokens, 64), torch.ones(2, 8, 64), routing, config=case.config)
            said.append("runs")
        except ValueError as error:
            said.append(str(error))
    shutdown()
    return said


def test_slots_are_as_large_as_memory_allows() -> None:
    for first, second in values(run_ranks(2, _little_memory)):
        assert first == "runs" and re.search("symmetric_mib=4 is too small: dispatch_linear with 4 experts", second)


def _two_nodes(rank: int, world: int) -> str:
    method = check_problem(_case("auto", node_ranks=1), NAMED["dropped"](world), seed=3)
    shutdown()
    return method


def test_across_nodes_it_is_a_collective() -> None:
    assert values(run_ranks(2, _two_nodes)) == ["collective"] * 2


def _main_grads(rank: int, world: int) -> None:
    """Two micro-batches, of which expert 1 of each rank gets nothing."""
    case = _case(dtype=torch.bfloat16)
    w = [torch.full((4, 3), 2.0, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    for weight in w[:2]:
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones(4, 3), False  # type: ignore[attr-defined]
    chosen = torch.tensor([[True, False, True] * world] * 5)
    for _ in range(2):
        routing = expert_routing(chosen, group=case.group, config=case.config)
        y, _ = dispatch_linear(torch.ones(5, 3, dtype=torch.bfloat16), w, routing, config=case.config)
        y.backward(torch.ones_like(y))
    rows = 2.0 * 5 * world
    assert torch.equal(w[0].main_grad, torch.full((4, 3), 1 + rows)) and w[0].grad_added_to_main_grad
    assert torch.equal(w[1].main_grad, torch.ones(4, 3)) and w[1].grad_added_to_main_grad
    assert w[2].grad is not None and torch.equal(w[2].grad, torch.full_like(w[2], rows))
    # Who asks for the gradient itself gets it, and main_grad stays; who asks for one weight's gets no other's.
    w[2].main_grad, w[2].grad_added_to_main_grad = torch.zeros(4, 3), False  # type: ignore[attr-defined]
    for ask in (lambda y: torch.autograd.grad(y, [w[0]]), lambda y: torch.autograd.backward(y, inputs=[w[2]])):
        y, _ = dispatch_linear(torch.ones(5, 3, dtype=torch.bfloat16), w, routing, config=case.config)
        got = ask(y.sum())
        assert got is None or torch.equal(got[0], torch.full_like(w[0], 5 * world))
    assert torch.equal(w[0].main_grad, torch.full((4, 3), 1 + rows))
    assert torch.equal(w[2].main_grad, torch.full((4, 3), 5.0 * world))  # type: ignore[attr-defined]
    shutdown()


def test_gradients_of_weights_go_into_main_grad() -> None:
    values(run_ranks(2, _main_grads))


def _frozen(rank: int, world: int) -> None:
    case, w = _case(), torch.ones(2, 8, 8)
    chosen = Experts(2 * world, 2, (6,) * world).chosen(0)[rank]
    count = chosen.sum(1, keepdim=True).float()
    routing = expert_routing(chosen, group=case.group, config=case.config)

    def run(*trained: str) -> dict[str, torch.Tensor | None]:
        leaves = {"x": torch.ones(6, 8), "w1": w.clone(), "w2": w.clone(), "probs": torch.ones(6, 2 * world)}
        for name in trained:
            leaves[name].requires_grad_()
        y, p = dispatch_linear(leaves["x"], leaves["w1"], routing, leaves["probs"], config=case.config)
        z = linear_combine(y * p[:, None], leaves["w2"], routing, config=case.config)  # type: ignore[index]
        assert torch.equal(z, 64 * count.expand(6, 8))
        z.sum().backward()
        return {name: leaf.grad for name, leaf in leaves.items()}

    everything = run("x", "w1", "w2", "probs")
    for trained in (["x"], ["w1"], ["w2"], ["w2"], ["w2"], ["probs"], ["w1", "probs"]):
        found = run(*trained)
        for name, gradient in found.items():
            assert (gradient is not None) == (name in trained)
            assert gradient is None or torch.equal(gradient, everything[name])  # type: ignore[arg-type]
    with torch.no_grad():
        y, p = dispatch_linear(torch.ones(6, 8), w, routing, config=case.config)
    assert p is None and not y.requires_grad
    shutdown()


def test_what_is_frozen_gets_no_gradient() -> None:
    values(run_ranks(2, _frozen))


def _wrong(rank: int, world: int, mistake: str) -> str:
    """Rank 1 makes a mistake in its first call; what every rank raises."""
    case = Case(dist.group.WORLD, CPU, OverlapConfig(method="chunked", timeout_s=3.0))
    is_wrong, w, x = rank == 1, torch.ones(2, 8, 8), torch.ones(6, 8)
    chosen = Experts(2 * world, 2, (6,) * world).chosen(0)[rank]
    try:
        if mistake == "experts" and is_wrong:
            chosen = chosen[:, :-1]
        routing = expert_routing(chosen, group=case.group, config=case.config)
        if mistake == "known":  # a call that all know, and one leaves it out, or has another name
            for name in ("first", "second"):
                dispatch_linear(x, w, routing, config=case.config, name=name)
            dispatch_linear(x, w, routing, config=case.config, name="second" if is_wrong else "first")
        if is_wrong:
            x = {"features": x[:, :-1], "rows": x[:-1], "dtype": x.half()}.get(mistake, x)
            w = w[:1] if mistake == "weights" else w
        if mistake == "order" and is_wrong:
            linear_combine(torch.ones(routing.rows_received, 8), w, routing, config=case.config)
        probs = torch.ones(6, 3) if mistake == "probs" and is_wrong else torch.ones(6, 2 * world)
        dispatch_linear(x, w, routing, probs, config=case.config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("experts", "divisible by the group's 2 ranks"), ("features", "a row for each of the tokens"), ("rows", r"\[6, 8\]"),
        ("dtype", "must be the same"), ("weights", "one .* for each of this rank's 2 experts"), ("probs", "one for each token"),
        ("known", "rank . is in (first|second)/fprop"), ("order", "linear_combine"),
    ],
)  # fmt: skip
def test_wrong_calls_raise_on_all_ranks(mistake: str, text: str) -> None:
    for said in values(run_ranks(2, _wrong, mistake)):
        found = re.search(text, said) is not None or (mistake == "experts" and said.startswith("Overlap"))
        assert found, said
