"""The operators themselves: equal to torch's collectives and products, again and again for some seconds, and timed.

Inputs are sparse and of values -1, 0, 1: every partial sum is a small integer, exact in bf16. Results must therefore be equal.
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ... import OverlapConfig, all_gather_linear, all_to_all_linear, linear_all_to_all, linear_reduce_scatter
from ... import check as check_timeouts
from ...group.registry import domain_of
from ...select.method import Method
from ...select.system import system_of
from ...select.tiling import tma_reads
from ..measure import timing
from ..measure.operands import gathered
from ..measure.pretended import pretends
from ..measure.world import World
from .report import Finding, fail, ok, warn

Linear = Callable[..., torch.Tensor]
_WRONG_FIX = (
    "do not train with this method here: --overlap-train-method collective; see this rank's link and memory lines, then file "
    "an issue with this report"
)
_ERROR_FIX = "see docs/troubleshooting.md for the message; a named rank's own lines and log come first"


@dataclass(frozen=True)
class Trial:
    """What the check of the operators is told. m, k, n: global; few_rows: instead of m for methods that serve no more. seconds:
    how long to repeat. methods: of OverlapConfig.method. call_s: see Agreement. Tests plant faults in the operators."""

    m: int
    k: int
    n: int
    dtype: torch.dtype
    seconds: float
    methods: tuple[str, ...]
    provider: str
    few_rows: int = 0
    timeout_s: float = 30.0
    call_s: float | None = None
    gather: Linear = all_gather_linear
    scatter: Linear = linear_reduce_scatter
    to_heads: Linear = linear_all_to_all
    to_rows: Linear = all_to_all_linear

    def config(self, method: str) -> OverlapConfig:
        return OverlapConfig(method=method, provider=self.provider, timeout_s=self.timeout_s)


def trial_of(here: World, seconds: float, provider: str) -> Trial:
    """The fc1 of Llama-3-8B at 8192 tokens on GPUs, a small one on CPUs; sizes that W ranks divide. Methods: all that untuned
    `auto` takes there, and `fused`."""
    size = here.size
    if here.device.type != "cuda":
        return Trial(16 * size, 64, 24 * size, torch.float32, seconds, ("chunked",), provider)
    m, n = (full // (8 * size) * 8 * size for full in (8192, 14336))
    direct = ("direct",) if tma_reads(here.device, torch.bfloat16, 4096, n // size) else ()
    kernels = ("fused", *direct, "low_latency") if importlib.util.find_spec("triton") else ()
    return Trial(m, 4096, n, torch.bfloat16, seconds, ("chunked", *kernels), provider, few_rows=16 * size)


@torch.no_grad()
def check_trial(here: World, trial: Trial) -> list[Finding]:
    """Every method: its operators against torch until the time is up, then, among several ranks, AG + GEMM against NCCL +
    cuBLAS. Collective."""
    found: list[Finding] = []
    domain_of(here.group, trial.config("auto"), here.device).agreement.call_s = trial.call_s
    for method in trial.methods:
        rows = trial.few_rows if Method(method).few_rows else trial.m
        verified = _verify(here, replace(trial, m=rows), method)
        found += verified
        if here.any(not verified or bool(verified[0].fix)):
            return found  # after a time-out every later call raises
    return found if here.size == 1 else found + judge_times(here, _times(here, trial))


def _verify(here: World, trial: Trial, method: str) -> list[Finding]:
    """Compare with torch for this method's share of the seconds, at least once."""
    name, expected, rounds, is_over = f"operator {method}", "bitwise equal to torch", 0, False
    problems: list[str] = []
    deadline = time.monotonic() + trial.seconds / len(trial.methods)

    def compare() -> None:
        problems.extend(_differences(here, trial, method, seed=rounds))

    while not is_over:
        error = here.attempt(compare)
        rounds += 1
        if error is not None:
            return [] if error == "failed on another rank" else [fail(name, error, "all operators end", _ERROR_FIX)]
        is_over = here.any(bool(problems) or time.monotonic() > deadline)  # one rank's clock or result ends it for all
    if problems:
        return [fail(name, f"{'; '.join(problems)}, in round {rounds}", expected, _WRONG_FIX)]
    operators = f"AG + GEMM and GEMM + RS of {trial.m} rows" if Method(method).few_rows else "all four operators"
    return [ok(name, f"{rounds} round{'s' * (rounds != 1)} of {operators} on new inputs", expected)]


def _differences(here: World, trial: Trial, method: str, seed: int) -> Iterator[str]:
    """Ulysses' linears get the weights of all ranks, and with them the results of tensor parallelism."""
    x, w, h, v = _inputs(here, trial, seed)
    settings = {"group": here.group, "config": trial.config(method)}
    results = [
        ("AG + GEMM", trial.gather(x, w, **settings, name="doctor/ag_gemm")),
        ("GEMM + RS", trial.scatter(h, v, **settings, name="doctor/gemm_rs")),
    ]
    if not Method(method).few_rows:
        all_w, all_v = gathered(w, here), gathered(v.t().contiguous(), here).t().contiguous()  # [N, K], [K, N]
        results += [
            ("GEMM + A2A", trial.to_heads(x, all_w, **settings, name="doctor/gemm_a2a")),
            ("A2A + GEMM", trial.to_rows(h, all_v, **settings, name="doctor/a2a_gemm")),
        ]
    here.synchronize()  # a wait on the GPU gives up there; then its output is NaN, but the reason is the time-out
    check_timeouts()
    products, sums = gathered(x, here).float() @ w.float().t(), torch.empty_like(results[1][1], dtype=torch.float32)
    dist.reduce_scatter_tensor(sums, h.float() @ v.float().t(), group=here.group)
    for (name, y), expected in zip(results, itertools.cycle((products, sums))):
        wrong = y != expected.to(y.dtype)
        if bool(wrong.any()):
            told = f"{name}: {int(wrong.sum())} of {y.numel()} elements wrong"
            sources = wrong.view(here.size, -1).any(dim=1).nonzero().flatten().tolist()
            yield f"{told}, in rows of {', '.join(map(here.who, sources))}" if expected is products else told


def _times(here: World, trial: Trial) -> dict[str, timing.Timing]:
    """AG + GEMM by each method, and the collective and the product in sequence; the slowest rank's time."""
    x, w, _, _ = _inputs(here, trial, 0)

    def call_of(method: str) -> timing.Call:
        config = trial.config(method)
        return lambda index: trial.gather(x, w, group=here.group, config=config, name="doctor/ag_gemm")

    calls = {method: call_of(method) for method in trial.methods if not Method(method).few_rows}
    calls["sequence"] = lambda index: gathered(x, here) @ w.t()
    pace = timing.pace(2 * trial.m * trial.k * trial.n / here.size)
    return timing.measure(calls, pace, here.group, here.device)


def judge_times(here: World, times: dict[str, timing.Timing]) -> list[Finding]:
    """The finding about the operators' times, of the first rank only: the figures are the same on every rank."""
    if here.rank != 0:
        return []
    sequence = times["sequence"].ms
    methods = {name: took.ms for name, took in times.items() if name != "sequence"}
    best = min(methods, key=methods.__getitem__)
    told = ", ".join(f"{name} {ms:.3f} ms" for name, ms in methods.items())
    measured = f"{told}; collective then GEMM {sequence:.3f} ms: {sequence / methods[best]:.2f} x by {best}"
    name, expected = "operator time", "faster than the sequence"
    model = system_of(torch.cuda.get_device_name(here.device)) if here.device.type == "cuda" else None
    if model is None or not model.is_measured:
        return [ok(name, measured, "not judged: unknown hardware")]
    if pretends():
        return [ok(name, measured, "not judged: NCCL goes over sockets, as between nodes")]
    if methods[best] > sequence:
        fix = "overlap does not pay here: see the lines on links, slow ranks and environment; other load on the host"
        return [warn(name, measured, expected, fix)]
    return [ok(name, measured, expected)]


def _inputs(here: World, trial: Trial, seed: int) -> tuple[torch.Tensor, ...]:
    """x_shard_m [M/W, K], w_shard_n [N/W, K], h_shard_k [M, N/W], v_shard_k [K, N/W]"""
    generator = torch.Generator(here.device).manual_seed(1000 * seed + here.rank)

    def sparse(rows: int, columns: int) -> torch.Tensor:
        # Two of 17 are not zero: a sum over 14336 products has a deviation of 14, and bf16 is exact to 256.
        numbers = torch.randint(-8, 9, (rows, columns), device=here.device, generator=generator)
        return numbers.div_(8, rounding_mode="trunc").to(trial.dtype)

    m, k, n, size = trial.m, trial.k, trial.n, here.size
    return sparse(m // size, k), sparse(n // size, k), sparse(m, n // size), sparse(k, n // size)
