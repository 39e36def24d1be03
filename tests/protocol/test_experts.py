"""The operators of experts between real processes: every problem exact, forward and backward."""

from __future__ import annotations

import re
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from overlap_train import (
    OverlapConfig,
    OverlapMismatchError,
    OverlapTimeoutError,
    dispatch_linear,
    expert_routing,
    linear_combine,
    shutdown,
)
from overlap_train.gpu.launch import LaunchCache
from overlap_train.group.registry import tell_peers
from overlap_train.ops import grouped_wgrad
from overlap_train.ops.experts import NO_MEMORY, OVERFLOW
from overlap_train.ops.plan import Planner
from tests.expert_cases import NAMED, Experts, any_problem, check_problem, grouped_gradients, sum_in_order
from tests.linear_cases import Case
from tests.processes import run_ranks, values

CPU = torch.device("cpu")


def _case(method: str = "chunked", dtype: torch.dtype = torch.float32, **settings: Any) -> Case:
    return Case(dist.group.WORLD, CPU, OverlapConfig(method=method, timeout_s=30.0, **settings), dtype)


def _named(rank: int, world: int, method: str) -> dict[str, str]:
    ran = {name: check_problem(_case(method), make(world), seed=3) for name, make in NAMED.items()}
    for dtype in (torch.bfloat16, torch.float16):
        check_problem(_case(method, dtype), NAMED["dropped"](world), seed=4)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sum_in_order(_case(method, dtype))
    shutdown()
    return ran


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("method", ["chunked", "collective"])
def test_every_problem(method: str, world: int) -> None:
    for ran in values(run_ranks(world, _named, method)):
        assert set(ran.values()) == {method}


def _in_fp8(rank: int, world: int, method: str) -> set[str]:
    """Small integers are exact in e4m3, too, and powers of two of them."""
    ran = set()
    for dtype in (torch.float32, torch.bfloat16):
        case = _case(method, dtype, fp8="blockwise")
        settings = dict(features=256, hidden=128, spread=dtype == torch.float32)
        for seed, name in enumerate(("top 2, one expert a rank", "dropped", "all dropped", "a rank without tokens")):
            ran.add(check_problem(case, replace(NAMED[name](world), **settings), seed))
    shutdown()
    return ran


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("method", ["chunked", "collective"])
def test_every_problem_in_fp8(method: str, world: int) -> None:
    for ran in values(run_ranks(world, _in_fp8, method)):
        assert ran == {method}


def _written(rank: int, world: int) -> bool:
    """A mask that is used again for the next routing, before the first operator of this one."""
    case, mask = _case(), Experts(2 * world, 2, (9,) * world).chosen(rank)[rank]
    routing = expert_routing(mask, group=case.group, config=case.config)
    right = torch.nonzero(mask.t())[:, 1]
    same = torch.equal(expert_routing(mask.clone(), group=case.group, config=case.config).tokens, right)
    mask.zero_()
    return same and torch.equal(routing.tokens, right)


def test_a_mask_may_be_written_to_once_it_is_routed() -> None:
    assert values(run_ranks(2, _written)) == [True, True]


def _random(rank: int, world: int, seeds: range) -> Counter[str]:
    ran = Counter(check_problem(_case("auto"), any_problem(seed, world), seed) for seed in seeds)
    shutdown()
    return ran


@pytest.mark.parametrize(
    ("world", "seeds"),
    [(1, range(20)), (2, range(20, 90)), (3, range(90, 140)), (4, range(140, 180)), (8, range(180, 200))],
)
def test_random_problems(world: int, seeds: range) -> None:
    ran = values(run_ranks(world, _random, seeds, limit_s=200))
    assert ran[0].total() == len(seeds) and ran[0]["chunked"] > len(seeds) // 2


def _in_turn(tokens: int, experts: int, popular: int = 0) -> torch.Tensor:
    """bool [T, E]: one expert a token, one after the other of all, or of so many."""
    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    return chosen.scatter_(1, torch.arange(tokens)[:, None] % (popular or experts), True)


def _grows(rank: int, world: int) -> list[tuple[str, str]]:
    """Few tokens, more on two of three ranks, all on one, and evenly again."""
    ran: list[tuple[str, str]] = []
    case = _case("auto", experts_room=1.5)
    w = torch.ones(2, 8, 8)
    for tokens, popular in ((4, 0), (64, 4), (64, 2), (64, 0)):
        routing = expert_routing(_in_turn(tokens, 2 * world, popular), group=case.group, config=case.config)
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


def _little_memory(rank: int, world: int, captured: bool) -> list[Any]:
    """Of slots of 1 MiB: what they hold, but not twice as much; twice as much for one rank; and far more, evenly. captured: they
    may not grow behind the first call."""
    case, said = _case("auto", symmetric_mib=4), list[Any]()
    for tokens, popular in ((3000, 0), (3000, 2), (3000, 0), (9000, 0)):
        routing = expert_routing(_in_turn(tokens, 2 * world, popular), group=case.group, config=case.config)
        x, w = torch.ones(tokens, 64, requires_grad=True), torch.ones(2, 8, 64)
        try:
            y, _ = dispatch_linear(
                x,
                w,
                routing,
                config=case.config,
                on_plan=lambda plan, _: said.append((plan.fprop.method, plan.fprop.reason)),
            )
            y.backward(torch.ones_like(y))
            assert (y == 64).all() and (x.grad == 8).all()
        except ValueError as error:
            said.append(str(error))
        routing.domain.captured = captured
    routing.domain.captured = False
    shutdown()
    return said


@pytest.mark.parametrize("captured", [False, True])
def test_where_memory_does_not_suffice_a_skewed_call_is_a_collective(captured: bool) -> None:
    for first, skewed, again, large in values(run_ranks(2, _little_memory, captured)):
        assert first[0] == again[0] == "chunked" and skewed == ("collective", NO_MEMORY)
        assert re.search(
            "CUDA graph holds addresses" if captured else "symmetric_mib=4 is too small: dispatch_linear with 4 exp",
            large,
        )


def _in_flight(rank: int, world: int) -> Counter[str]:
    """Chunked calls and calls that overflow in turn: forward of all, then backward in either order."""
    case, ran = _case("auto", experts_room=1.0), Counter[str]()
    w1, w2 = (torch.ones(2, 8, 8, requires_grad=True) for _ in range(2))
    for order in (1, -1):
        waiting = []
        for number, popular in enumerate((0, 2, 0, 1)):
            value = torch.arange(6.0 * world)[:, None] + 100 * number + 10 * rank
            x = value.expand(-1, 8).clone().requires_grad_()
            routing = expert_routing(_in_turn(len(x), 2 * world, popular), group=case.group, config=case.config)
            y, _ = dispatch_linear(
                x, w1, routing, config=case.config, on_plan=lambda plan, _: ran.update([plan.fprop.method])
            )
            waiting.append((value, x, linear_combine(y, w2, routing, config=case.config)))
        for value, x, z in waiting[::order]:
            (z * value).sum().backward()
            assert (z == 64 * value).all() and (x.grad == 64 * value).all()
    shutdown()
    return ran


def test_overflow_and_chunked_calls_in_turn() -> None:
    assert values(run_ranks(3, _in_flight)) == [Counter(chunked=4, collective=4)] * 3


def _as_on_gpus() -> Any:
    """Counts travel as flagged words, by the kernel of GPUs in the interpreter."""
    plain = Planner.amax_gather
    return mock.patch.object(
        Planner, "amax_gather", lambda self, by_nccl, _: plain(self, by_nccl, torch.device("cuda"))
    )


def _by_words(rank: int, world: int) -> None:
    with _as_on_gpus():
        for seed, name in enumerate(("dropped", "a rank without tokens", "top 1")):
            check_problem(_case(), NAMED[name](world), seed)
    shutdown()


@pytest.mark.parametrize("world", [1, 3])
def test_counts_travel_as_flagged_words(world: int) -> None:
    values(run_ranks(world, _by_words))


def _silent(rank: int, world: int, by_words: bool) -> str:
    """Rank 1 makes one call less."""
    case = Case(dist.group.WORLD, CPU, OverlapConfig(timeout_s=1.0))
    with _as_on_gpus() if by_words else nullcontext():
        try:
            for _ in range(2 - rank):
                expert_routing(torch.ones(3, 2 * world, dtype=torch.bool), group=case.group, config=case.config)
        except OverlapTimeoutError as error:
            return str(error)
    time.sleep(4.0)
    return "nothing"


@pytest.mark.parametrize("by_words", [False, True])
def test_a_rank_that_leaves_out_a_routing_is_named(by_words: bool) -> None:
    said, _ = values(run_ranks(2, _silent, by_words))
    assert re.search(r"expert_routing/fprop.*rank 1", said), said


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


def _many(rank: int, world: int) -> list[str]:
    """Eight experts a rank on what is said to be Hopper, whose kernel torch stands for."""
    launched, run, case = list[str](), LaunchCache.run, _case(dtype=torch.bfloat16)

    def stand_in(self: LaunchCache, key: Any, values: Any, describe: Any, *told: Any) -> None:
        if key[0] == "grouped wgrad":
            launched.append("returned" if told[2] is not None else "added")
            grouped_gradients(*told)
        else:
            run(self, key, values, describe, *told)

    with (
        mock.patch.object(LaunchCache, "run", stand_in),
        mock.patch.object(grouped_wgrad, "tma_reads", return_value=True),
    ):
        check_problem(case, Experts(8 * world, 2, (9,) * world, dropped=0.5), seed=6)
        w = [torch.ones(8, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(8)]
        for weight in w:
            weight.main_grad, weight.grad_added_to_main_grad = torch.ones(8, 16), False  # type: ignore[attr-defined]

        def sum_of_y() -> torch.Tensor:
            y, _ = dispatch_linear(torch.ones(20, 16, dtype=torch.bfloat16), w, routing, config=case.config)
            return y.sum()

        def added() -> list[float]:
            """How often its rows each main_grad holds."""
            assert all((weight.main_grad == weight.main_grad[0, 0]).all() for weight in w)  # type: ignore[attr-defined]
            return [(weight.main_grad[0, 0].item() - 1) / count for weight, count in zip(w, counts, strict=True)]  # type: ignore[attr-defined]

        routing = expert_routing(_in_turn(20, 8 * world), group=case.group, config=case.config)
        counts = routing.all_places.counts
        for _ in range(2):
            sum_of_y().backward()
        assert added() == [2] * 8 and all(weight.grad_added_to_main_grad for weight in w)  # type: ignore[attr-defined]
        assert len({weight.grad.data_ptr() for weight in w}) == 1, "all have one placeholder"  # type: ignore[union-attr]
        # Who asks for gradients, or looks at them, gets them.
        asked, seen = torch.autograd.grad(sum_of_y(), w), list[float]()
        assert [dw[0, 0].item() for dw in asked] == counts
        hooks = [weight.register_hook(lambda dw: seen.append(dw[0, 0].item())) for weight in w]
        for weight in w:
            weight.grad = None
        sum_of_y().backward()
        assert sorted(seen) == sorted(counts) and not any(weight.grad_added_to_main_grad for weight in w)  # type: ignore[attr-defined]
        assert [weight.grad[0, 0].item() for weight in w] == counts and added() == [2] * 8  # type: ignore[index]
        for weight, hook in zip(w, hooks, strict=True):
            weight.grad = hook.remove()
        # One is frozen: each of the others has a product.
        w[1].requires_grad_(False)
        sum_of_y().backward()
        assert added() == [3, 2, *[3] * 6] and w[1].grad is None
        assert len({weight.grad.data_ptr() for weight in (w[0], *w[2:])}) == 1  # type: ignore[union-attr]
        w[3].main_grad = torch.ones(8, 8)  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=r"main_grad is \[8, 8\]"):
            sum_of_y().backward()
        assert added()[:3] == [3, 2, 3], "what is wrong is said before anything is added"
    shutdown()
    return launched


def test_weight_gradients_of_many_experts_are_one_launch() -> None:
    """Of both operators, returned; then of one, added in two micro-batches, and returned to those that ask."""
    assert values(run_ranks(2, _many)) == [["returned"] * 2 + ["added"] * 2 + ["returned"] * 2] * 2


class _Copies(TorchDispatchMode):
    """Counts copies of received rows to their places."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.rows += func is torch.ops.aten.index_copy_.default and args[0].dim() == 2
        return func(*args, **kwargs or {})


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
    for trained in (["x"], ["w1"], ["w2"], ["probs"], ["w1", "probs"]):
        found = run(*trained)
        for name, gradient in found.items():
            assert (gradient is not None) == (name in trained)
            assert gradient is None or torch.equal(gradient, everything[name])  # type: ignore[arg-type]
    with torch.no_grad(), _Copies() as copies:
        y, p = dispatch_linear(torch.ones(6, 8), w, routing, config=case.config)
    assert p is None and not y.requires_grad and not copies.rows
    with _Copies() as copies:
        run("x")
    assert not copies.rows
    with _Copies() as copies:
        run("w1", "w2")
    assert copies.rows == 2 * world
    shutdown()


def test_what_is_frozen_gets_no_gradient() -> None:
    values(run_ranks(2, _frozen))


def _wrong(rank: int, world: int, mistake: str, call: int) -> str:
    """Rank 1 makes a mistake in its first call, or its second; what every rank raises."""
    case = Case(dist.group.WORLD, CPU, OverlapConfig(method="chunked", timeout_s=30.0))
    chosen = Experts(2 * world, 2, (6,) * world).chosen(0)[rank]
    try:
        for number in (1, 2):
            is_wrong, w, x = rank == 1 and number == call, torch.ones(2, 8, 8), torch.ones(6, 8)
            wrongly = {"experts": chosen[:, :-1], "numbers": chosen.int()}.get(mistake, chosen)
            routing: Any = expert_routing(wrongly if is_wrong else chosen, group=case.group, config=case.config)
            if mistake == "known":  # a call that all know, and one leaves it out, or has another name
                for name in ("first", "second"):
                    dispatch_linear(x, w, routing, config=case.config, name=name)
                dispatch_linear(x, w, routing, config=case.config, name="second" if is_wrong else "first")
            config, probs = case.config, torch.ones(6, 2 * world)
            if is_wrong:
                x = {"features": x[:, :-1], "rows": x[:-1], "dtype": x.half()}.get(mistake, x)
                w = {"weights": w[:1], "flat weights": w[0], "no weights": [], "no tensors": [None] * 2}.get(mistake, w)
                config = replace(config, fp8=mistake) if mistake in ("tensorwise", "blockwise") else config
                if mistake == "half":
                    x, w, config = x.half(), w.half(), replace(config, fp8="blockwise")
                probs = {"probs": torch.ones(6, 3), "no probs": None}.get(mistake, probs)
                if mistake == "order":
                    linear_combine(torch.ones(routing.rows_received, 8), w, routing, config=config)
                if mistake == "device":
                    routing.device = torch.device("meta")
                routing = None if mistake == "none" else routing
            dispatch_linear(x, w, routing, probs, config=config)
    except Exception as error:
        if mistake in ("none", "no tensors"):  # of no group, or known too late
            tell_peers(error)  # as where nobody catches it
        return f"{type(error).__name__}: {error}"
    return "nothing"


MISTAKES = {
    "experts": r"torch.bool \(6, 3\); it must be bool", "numbers": r"torch.int32 \(6, 4\); it must be bool.*scatter_",
    "features": "a row for each of the tokens", "rows": r"\[6, 8\]", "dtype": "must be the same",
    "weights": "one .* for each of this rank's 2 experts", "flat weights": r"it must be \[E/W, N, K\]",
    "no weights": "w has 0 weights", "probs": "one for each token", "order": "linear_combine",
    "tensorwise": "fp8='tensorwise' of experts", "blockwise": "with fp8='blockwise' features must be multiples of 128",
    "half": "fp8='blockwise' with x in float16", "none": "routing is a NoneType; it must be what expert_routing returned",
    "no probs": r"float32, probs[\],]",
    "device": "x is on cpu, its routing on meta", "no tensors": r"w\[0\] is a NoneType; w must be a tensor",
}  # fmt: skip


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_calls_raise_on_all_ranks(mistake: str, call: int) -> None:
    """In a call that all know, too: peers hear what is wrong, and do not wait until the timeout."""
    for said in reversed(values(run_ranks(2, _wrong, mistake, call))):
        assert re.search(MISTAKES[mistake], said) and "waited" not in said, said


def _one_form_each(rank: int, world: int) -> tuple[str, int]:
    """What a rank hears whose peer has no probs, where all know both forms; and calls of weights in other forms, which are each
    rank's own."""
    config, chosen = OverlapConfig(method="chunked", timeout_s=30.0), torch.ones(3, world, dtype=torch.bool)
    x, w, probs = torch.ones(3, 4), torch.ones(1, 4, 4), torch.ones(3, world)
    for weights in (w, w, [torch.nn.Parameter(w[0], requires_grad=False)] if rank else w):
        routing = expert_routing(chosen, group=dist.group.WORLD, config=config)
        y, _ = dispatch_linear(x, weights, routing, probs.half() if rank else probs, config=config)
    with torch.no_grad():
        try:
            for given in (probs, None, probs if rank else None):
                routing = expert_routing(chosen, group=dist.group.WORLD, config=config)
                dispatch_linear(x, w, routing, given, config=config)
        except OverlapMismatchError as error:
            return str(error), len(y)
    return "nothing", len(y)


def test_probs_on_one_rank_are_named_and_forms_of_weights_are_each_ranks_own() -> None:
    for said, rows in values(run_ranks(2, _one_form_each)):
        assert re.search(r"float32, probs\].*float32\]|float32\].*float32, probs\]", said) and rows == 6, said


def test_a_call_that_a_peer_leaves_out_is_named() -> None:
    for said in values(run_ranks(2, _wrong, "known", 2)):
        assert re.search("rank . is in (first|second)/fprop", said), said
