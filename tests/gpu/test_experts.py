"""The operators of experts on GPUs: the problems of CPU processes, exact in bf16, also where the products of many experts are one
kernel; the same bits on every run; and two micro-batches in flight. Kernels of our own get features that they serve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from overlap_train import dispatch_linear, expert_routing, linear_combine
from overlap_train.group.registry import domain_of
from overlap_train.ops.grouped_wgrad import grouped_gradients
from overlap_train.ops.routing import Places
from tests.expert_cases import NAMED, Experts, any_problem, check_problem, sum_in_order
from tests.linear_cases import Case

MILLISECOND = 2_000_000  # cycles


@pytest.fixture(params=["fused", "chunked", "collective"])
def method(request: pytest.FixtureRequest) -> str:
    return request.param


def check(case: Case, problem: Experts, seed: int, runs_as: str = "", **told: Any) -> None:
    """check_problem, for `fused` with features that it serves, and with room for what one rank gets."""
    method, case = case.config.method, replace(case, config=replace(case.config, experts_room=64.0))
    if method == "fused" or case.config.fp8 != "off":
        unit, most = (16, 20) if case.config.fp8 == "off" else (128, 5)
        problem = replace(problem, features=unit * (1 + 3 * seed % most), hidden=unit * (1 + seed % (most - 2)))
    assert check_problem(case, problem, seed, **told) == (runs_as or method)


@pytest.mark.parametrize("name", NAMED)
def test_every_problem(case: Case, name: str) -> None:
    check(case, NAMED[name](case.world), seed=3)


def test_many_experts_are_one_kernel(case: Case) -> None:
    """Features are multiples of eight, as the library's kernel wants them; some experts get nothing."""
    for seed, dropped in enumerate((0.0, 0.7)):
        check(case, Experts(16 * case.world, 4, (40,) * case.world, 64, 32, dropped), seed)


def test_problems_in_fp8(case: Case) -> None:
    """Small integers are exact in e4m3, too."""
    case = replace(case, config=replace(case.config, fp8="blockwise"))
    for seed, problem in enumerate(
        (*(make(case.world) for make in NAMED.values()), Experts(16 * case.world, 12, (0, 700)))
    ):
        if len(problem.tokens) == case.world:
            check(case, problem, seed)


def test_more_rows_of_a_token_than_there_is_room_for_at_first(case: Case) -> None:
    check(case, Experts(16 * case.world, 12, (*range(40, 40 + case.world),), 64, 32), seed=1)


def test_masks_that_lie_otherwise(case: Case) -> None:
    """Transposed, and a slice of a wider one."""
    mask = Experts(4 * case.world, 2, (9,) * case.world).chosen(case.rank)[case.rank].to(case.device)
    right = expert_routing(mask, group=case.group, config=case.config)
    for other in (mask.t().contiguous().t(), torch.cat((mask, ~mask), 1)[:, : mask.shape[1]]):
        routing = expert_routing(other, group=case.group, config=case.config)
        assert routing.sent == right.sent and torch.equal(routing.places_of_tokens, right.places_of_tokens)


def test_experts_of_several_tiles(case: Case) -> None:
    """Rows that fill tiles, and end anywhere in one."""
    for seed, tokens in enumerate((256, 301, 1000)):
        check(case, Experts(2 * case.world, 2, (tokens,) * (case.world - 1) + (tokens + 5,), 64, 32), seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(case: Case, dtype: torch.dtype) -> None:
    served = dtype == torch.float16 or case.config.method != "fused"
    check(replace(case, dtype=dtype), NAMED["dropped"](case.world), seed=5, runs_as="" if served else "chunked")


@pytest.mark.parametrize("method", ["fused"])
@pytest.mark.parametrize(
    ("features", "hidden", "runs_as"), [(8, 264, "fused"), (328, 24, "fused"), (68, 64, "chunked")]
)
def test_features_that_fused_takes(case: Case, features: int, hidden: int, runs_as: str) -> None:
    """Multiples of 8: else it falls back."""
    assert check_problem(case, Experts(2 * case.world, 2, (9,) * case.world, features, hidden), seed=1) == runs_as


def test_sums_are_in_order_of_expert(case: Case) -> None:
    sum_in_order(case)


def test_random_problems(case: Case) -> None:
    for seed in range(200):
        check(case, any_problem(seed, case.world), seed)


RAGGED = (64, 0, 1, 130, 63, 0, 65, 128, 300, 17)


@pytest.mark.parametrize("method", ["fused"])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("shape", [(1536, 2048), (384, 512), (264, 136), (8, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_grouped_weight_gradients_are_exact(case: Case, dtype: torch.dtype, shape: tuple[int, int], adds: bool) -> None:
    """Rows of one expert, and those beyond the last one's, are no numbers: they reach no other gradient."""
    domain, poisoned = domain_of(case.group, case.config, case.device), 3
    ends = torch.tensor(RAGGED).cumsum(0)
    spans = list(zip((ends - torch.tensor(RAGGED)).tolist(), ends.tolist(), strict=True))
    dy, x = (
        case.integers(sum(RAGGED) + 64, features, seed=seed).to(case.device, dtype)
        for seed, features in enumerate(shape, 1)
    )
    expected = [dy[start:end].double().t() @ x[start:end].double() for start, end in spans]
    for matrix in (dy, x):
        matrix[slice(*spans[poisoned])], matrix[sum(RAGGED) :] = torch.nan, torch.inf
    places = Places([start for start, _ in spans], [*RAGGED], None, ends.int().to(case.device))
    weights = [torch.empty(shape, device=case.device, dtype=dtype) for _ in RAGGED]
    for weight in weights * adds:
        weight.main_grad = torch.full(shape, 0.5, device=case.device)  # type: ignore[attr-defined]
    for call in (1, 2):
        gradients = grouped_gradients(domain, weights, "accumulate", None, dy[: sum(RAGGED)], x[: sum(RAGGED)], places)
        assert (gradients is not None) is (torch.cuda.get_device_capability(case.device)[0] == 9)
        for number, dw in enumerate(gradients or ()):
            found = weights[number].main_grad if dw is None else dw  # type: ignore[attr-defined]
            right = 0.5 + call * expected[number] if adds else expected[number].to(dtype)
            right = torch.full_like(right, torch.nan) if number == poisoned else right
            assert torch.equal(found.double().nan_to_num(7e7), right.double().nan_to_num(7e7)), number


def test_late_copies(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy of one rank starts late, so that waits have to hold."""
    if case.config.method != "chunked":
        pytest.skip("no copies of ours")
    engine: Any = domain_of(case.group, case.config, case.device).engine
    enqueue = engine._enqueue

    def late(*arguments: Any) -> None:
        with torch.cuda.stream(engine.stream):
            torch.cuda._sleep(3 * MILLISECOND)
        enqueue(*arguments)

    for slow_rank in range(case.world):
        with monkeypatch.context() as patch:
            if case.rank == slow_rank:
                patch.setattr(engine, "_enqueue", late)
            for seed in range(3):
                check_problem(case, Experts(4 * case.world, 2, (64,) * case.world, 64, 32), seed)


def test_late_ranks(case: Case) -> None:
    """One rank starts each operator late, another one each backward: the others' kernels wait for it, tile by tile."""
    for seed in range(2 * case.world):

        def late(step: int, seed: int = seed) -> None:
            torch.cuda._sleep(20 * MILLISECOND * (case.rank == (seed + step // 2) % case.world))

        check(case, Experts(8 * case.world, 2, (64,) * case.world, 64, 32), seed, before=late)


def test_every_run_gives_the_same_bits(case: Case) -> None:
    """Of numbers that round. In every run another rank is late, in forward or in backward."""
    generator, here, runs = torch.Generator(case.device).manual_seed(case.rank), 8, []
    shapes = ((512, 256), (here, 256, 256), (here, 256, 128))
    x, w1, w2 = (torch.randn(shape, generator=generator, device=case.device).to(case.dtype) for shape in shapes)
    chosen = Experts(here * case.world, 4, (512,) * case.world).chosen(7)[case.rank].to(case.device)
    probs = torch.rand(chosen.shape, generator=generator, device=case.device)
    for run in range(4):
        leaves, is_late = (
            [tensor.clone().requires_grad_() for tensor in (x, w1, w2, probs)],
            case.rank == run % case.world,
        )
        routing = expert_routing(chosen, group=case.group, config=case.config)
        torch.cuda._sleep(5 * MILLISECOND * is_late)
        y, p = dispatch_linear(leaves[0], leaves[1], routing, leaves[3], config=case.config)
        assert p is not None
        a = (torch.nn.functional.silu(y[:, :128]) * y[:, 128:] * p[:, None]).to(case.dtype)
        z = linear_combine(a, leaves[2], routing, config=case.config)
        torch.cuda._sleep(5 * MILLISECOND * (not is_late))
        z.float().square().sum().backward()
        runs.append([z, *(leaf.grad for leaf in leaves)])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("here", [4, 8])
def test_two_micro_batches_in_flight(case: Case, here: int) -> None:
    """Forward of both, then backward in either order; weights' gradients go into fp32 main_grad, of eight by one kernel."""
    world = case.world
    w = [torch.ones(8, 16, device=case.device, dtype=case.dtype, requires_grad=True) for _ in range(here)]
    for weight in w:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(8, 16, device=case.device), False  # type: ignore[attr-defined]
    chosen = Experts(here * world, 2, (32,) * world).chosen(1)[case.rank].to(case.device)
    for order in ((0, 1), (1, 0)):
        ys = []
        for batch in range(2):
            x = torch.full((32, 16), batch + 1.0, device=case.device, dtype=case.dtype)
            routing = expert_routing(chosen, group=case.group, config=case.config)
            ys.append(dispatch_linear(x, w, routing, config=case.config)[0])
        for batch in order:
            ys[batch].backward(torch.ones_like(ys[batch]))
    for weight, count in zip(w, routing.all_places.counts, strict=True):
        assert (weight.main_grad == 6 * count).all() and weight.grad_added_to_main_grad  # type: ignore[attr-defined]
