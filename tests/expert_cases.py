"""Problems of experts that CPU processes and GPUs share: both operators, forward and backward, on every rank of a group, against
a dense reference in fp64 of all ranks. Inputs are small integers, mostly zero: every difference is an error, never rounding."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from overlap_train import dispatch_linear, expert_routing, linear_combine
from tests.linear_cases import Case


@dataclass(frozen=True)
class Experts:
    """tokens: of each rank. top: experts of a token. dropped: the share of choices that is dropped. popular: so many experts get
    everything; 0: all may. spread: blocks of 128 features, and of experts, are of several sizes."""

    experts: int
    top: int
    tokens: tuple[int, ...]
    features: int = 24
    hidden: int = 16
    dropped: float = 0.0
    popular: int = 0
    spread: bool = False

    def chosen(self, seed: int) -> list[torch.Tensor]:
        """bool [T, E] of each rank."""
        generator = torch.Generator().manual_seed(seed)
        found = []
        for tokens in self.tokens:
            scores = torch.rand(tokens, self.experts, generator=generator)
            scores[:, self.popular or self.experts :] -= 1
            picked = scores.topk(self.top).indices
            kept = torch.rand(picked.shape, generator=generator) >= self.dropped
            found.append(torch.zeros(tokens, self.experts, dtype=torch.bool).scatter_(1, picked, kept))
        return found


NAMED = {
    "top 1": lambda world: Experts(2 * world, 1, (9,) * world),
    "top 2, one expert a rank": lambda world: Experts(world, min(2, world), (5,) * world),
    "top 8 of 256": lambda world: Experts(-(-256 // world) * world, 8, (6,) * world),
    "dropped": lambda world: Experts(4 * world, 2, (8,) * world, dropped=0.5),
    "all dropped": lambda world: Experts(2 * world, 2, (4,) * world, dropped=1.0),
    "a rank without tokens": lambda world: Experts(2 * world, 2, (*range(world),)),
    "nobody has tokens": lambda world: Experts(2 * world, 2, (0,) * world),
    "one expert gets all": lambda world: Experts(3 * world, 1, (16,) * world, popular=1),
    "odd sizes": lambda world: Experts(2 * world, 2, (*range(3, 3 + world),), features=13, hidden=7),
}


def any_problem(seed: int, world: int) -> Experts:
    """A random one of 2 to 256 experts."""
    pick = random.Random(seed)
    here = pick.choice([1, 2, 3, 5, 8, 16, 64]) if pick.random() < 0.8 else 256 // world
    experts = max(here, 2 if world == 1 else 1) * world
    tokens = tuple(pick.choice([0, 1, 2, 7, 16, 33]) for _ in range(world))
    if pick.random() < 0.5:
        tokens = (tokens[0],) * world
    return Experts(
        experts, min(experts, pick.randint(1, 8)), tokens, pick.choice([1, 8, 13, 24]), pick.choice([1, 7, 16]),
        pick.choice([0.0, 0.0, 0.3]), min(experts, 8) * (pick.random() < 0.3),
    )  # fmt: skip


def check_problem(case: Case, problem: Experts, seed: int, before: Callable[[int], None] = lambda step: None) -> str:
    """Run and compare. Returns the method by which dispatch_linear ran. before: is called behind the routing, before each of both
    operators (0, 1) and before their backward (2, 3)."""
    world, rank, here = case.world, case.rank, problem.experts // case.world
    chosen, mine = problem.chosen(seed), slice(rank * here, (rank + 1) * here)
    experts = range(mine.start, mine.stop)

    def of_ranks(shapes: list[tuple[int, ...]], number: int) -> list[torch.Tensor]:
        return [case.integers(*shape, seed=1000 * seed + 10 * number + r).cpu() for r, shape in enumerate(shapes)]

    rows = [
        [
            (e, s, int(t))
            for e in range(r * here, (r + 1) * here)
            for s in [*range(r, -1, -1), *range(world - 1, r, -1)]
            for t in chosen[s][:, e].nonzero()
        ]
        for r in range(world)
    ]
    tokens, received = problem.tokens, [len(of_rank) for of_rank in rows]
    k, n = problem.features, problem.hidden
    x, dz = of_ranks([(t, k) for t in tokens], 1), of_ranks([(t, k) for t in tokens], 2)
    dy, a = of_ranks([(r, 2 * n) for r in received], 3), of_ranks([(r, n) for r in received], 4)
    dp = [case.integers(r, 1, seed=77 + s)[:, 0].cpu() for s, r in enumerate(received)]
    probs = [case.integers(t, problem.experts, seed=99 + s).cpu() for s, t in enumerate(tokens)]
    w1 = case.integers(problem.experts, 2 * n, k, seed=5).cpu()
    w2 = case.integers(problem.experts, k, n, seed=6).cpu()
    if problem.spread:
        for matrix in (*x, *dz, *dy, *a, w1, w2):
            for dim in range(matrix.dim()):
                shape = [-1 if dim == each else 1 for each in range(matrix.dim())]
                size = 1 if dim == 0 else 128  # of tokens, or experts, and of features
                matrix *= (2.0 ** (torch.arange(matrix.shape[dim]) // size % 3 * max(dim, 1))).view(shape)

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(case.device, case.dtype).requires_grad_()

    settings, ran = dict(config=case.config), []
    routing = expert_routing(chosen[rank].to(case.device), group=case.group, config=case.config)
    x_leaf, a_leaf, probs_leaf = leaf(x[rank]), leaf(a[rank]), probs[rank].float().to(case.device).requires_grad_()
    w1_leaves, w2_leaf = [leaf(w1[e]) for e in experts], leaf(w2[mine])
    if seed % 2:  # they lie as Megatron's distributed optimizer has them
        lying = w1[mine].flip(0).to(case.device, case.dtype)
        w1_leaves = [weight.detach().requires_grad_() for weight in reversed(lying.unbind(0))]
    w1_leaves[0].stacked = None  # type: ignore[attr-defined]
    before(0)
    y, p = dispatch_linear(
        x_leaf, w1_leaves, routing, probs_leaf, on_plan=lambda plan, _: ran.append(plan.fprop.method), **settings
    )
    before(1)
    z = linear_combine(a_leaf, w2_leaf, routing, **settings)
    assert p is not None
    # Gradients may lie apart, as those of a stack do.
    dp_there = torch.stack([dp[rank].to(p), torch.full_like(p, torch.nan)], 1)[:, 0]
    before(2)
    torch.autograd.backward([y, p], [dy[rank].to(y), dp_there])
    before(3)
    z.backward(dz[rank].to(z))

    expected = {name: torch.zeros(leaf.shape, dtype=torch.float64) for name, leaf in (("dx", x_leaf), ("z", z))}
    expected |= {"dprobs": torch.zeros_like(probs[rank])}
    expected |= {"dw1": torch.zeros_like(w1), "dw2": torch.zeros_like(w2)}
    empty = torch.zeros(0, 1, dtype=torch.float64)
    for r, of_rank in enumerate(rows):
        for at, (e, s, t) in enumerate(of_rank):
            if s == rank:
                expected["dx"][t] += dy[r][at] @ w1[e]
                expected["z"][t] += w2[e] @ a[r][at]
                expected["dprobs"][t, e] = dp[r][at]
            if r == rank:
                expected["dw1"][e] += torch.outer(dy[r][at], x[s][t])
                expected["dw2"][e] += torch.outer(dz[s][t], a[r][at])
    own = rows[rank]
    expected["y"] = torch.stack([w1[e] @ x[s][t] for e, s, t in own]) if own else empty.expand(0, 2 * n)
    expected["p"] = torch.stack([probs[s][t, e] for e, s, t in own]) if own else empty[:, 0]
    expected["da"] = torch.stack([dz[s][t] @ w2[e] for e, s, t in own]) if own else empty.expand(0, n)
    found = dict(y=y, p=p, z=z, dx=x_leaf.grad, da=a_leaf.grad, dprobs=probs_leaf.grad, dw2=w2_leaf.grad)
    found["dw1"] = torch.stack([w.grad for w in w1_leaves])
    expected |= {name: expected[name][mine] for name in ("dw1", "dw2")}
    for name, tensor in found.items():
        wrong = tensor.detach().double().cpu() != expected[name]
        assert not wrong.any(), f"{problem}, seed {seed}, rank {rank}: {name} differs in {int(wrong.sum())} elements"
    return ran[0]


def grouped_gradients(
    dy: torch.Tensor, x: torch.Tensor, dws: torch.Tensor | None, words: torch.Tensor, ends: torch.Tensor
) -> None:
    """What the kernel of weight gradients does, in the host's memory: it fills dws, or adds at the addresses in words."""
    counters, addresses = words.split([2, len(words) - 2])
    assert not counters.any()
    for number, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        dw = dy[start:end].float().t() @ x[start:end].float()
        if dws is None:
            memory = (ctypes.c_float * dw.numel()).from_address(int(addresses[number]))
            torch.frombuffer(memory, dtype=torch.float32).view(dw.shape).add_(dw)
        else:
            dws[number] = dw


def sum_in_order(case: Case) -> None:
    """The sum of a token's rows is in order of expert, whichever rank they come from, in fp32, and rounded once: any other order
    rounds otherwise, and in 16 bits large + 1 + 1 is large, if each sum is rounded."""
    experts, large = 4 * case.world, 2 / torch.finfo(case.dtype).eps
    numbers = torch.tensor([1.0, large, 1.0, 1.0, -large, 3.0, 1.0, large] * experts)[:experts]
    tokens = 8
    chosen = Experts(experts, min(6, experts), (tokens,) * case.world).chosen(case.rank)[case.rank]
    routing = expert_routing(chosen.to(case.device), group=case.group, config=case.config)
    first, here = case.rank * 4, 4
    w = numbers[first : first + here].view(here, 1, 1).expand(here, 8, 1).contiguous().to(case.device, case.dtype)
    z = linear_combine(w.new_ones(routing.rows_received, 1), w, routing, config=case.config)
    for token in range(tokens):
        total = torch.zeros(())
        for expert in chosen[token].nonzero().flatten():
            total = total + numbers[expert]
        assert torch.equal(z[token].cpu(), total.to(case.dtype).expand(8)), (token, z[token], total)
