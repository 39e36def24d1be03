"""The operators themselves: equal to torch's collectives and products, again and again for some seconds, and timed.

Inputs are sparse and of values -1, 0, 1: every partial sum is a small integer, exact in bf16, so that results must be equal.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import OverlapConfig, all_gather_linear, linear_reduce_scatter
from .. import check as check_timeouts
from ..bench import timing
from .hardware import model_of
from .links import Measure
from .place import Place
from .report import Finding

Linear = Callable[..., torch.Tensor]
_WRONG_FIX = (
    "do not train with this method here: --overlap-train-method collective; see this rank's link and memory lines, then file "
    "an issue with this report"
)
_ERROR_FIX = "see docs/troubleshooting.md for the message; a named rank's own lines and log come first"


@dataclass(frozen=True)
class Trial:
    """m, k, n: global; seconds: how long to repeat; methods: of OverlapConfig.method."""

    m: int
    k: int
    n: int
    dtype: torch.dtype
    seconds: float
    methods: tuple[str, ...]
    provider: str
    timeout_s: float = 30.0

    def config(self, method: str) -> OverlapConfig:
        return OverlapConfig(method=method, provider=self.provider, timeout_s=self.timeout_s)


@dataclass(frozen=True)
class Operators:
    """What is checked; tests plant faults here."""

    gather: Linear = all_gather_linear
    scatter: Linear = linear_reduce_scatter
    measure: Measure = timing.measure


@dataclass(frozen=True)
class Inputs:
    """x_shard_m [M/W, K], w_shard_n [N/W, K], h_shard_k [M, N/W], v_shard_k [K, N/W]"""

    x_shard_m: torch.Tensor
    w_shard_n: torch.Tensor
    h_shard_k: torch.Tensor
    v_shard_k: torch.Tensor


def trial_of(place: Place, seconds: float, provider: str) -> Trial:
    """The fc1 of Llama-3-8B at 8192 tokens on GPUs, a small one on CPUs; sizes that W ranks divide."""
    size = place.size
    if place.device.type != "cuda":
        return Trial(16 * size, 64, 24 * size, torch.float32, seconds, ("chunked",), provider)
    fused = ("fused",) if importlib.util.find_spec("triton") else ()
    m, n = (full // (8 * size) * 8 * size for full in (8192, 14336))
    return Trial(m, 4096, n, torch.bfloat16, seconds, ("chunked", *fused), provider)


def check_operator(place: Place, trial: Trial, operators: Operators | None = None) -> list[Finding]:
    """Every method: both operators against torch until the time is up, then AG + GEMM against NCCL + cuBLAS. Collective."""
    operators, found = operators or Operators(), []
    with torch.no_grad():
        for method in trial.methods:
            verified = _verify(place, trial, method, operators)
            found += verified
            if place.any(not verified or bool(verified[0].fix)):
                return found  # after a time-out every later call raises
        return found + _timed(place, trial, operators)


def _verify(place: Place, trial: Trial, method: str, operators: Operators) -> list[Finding]:
    """Compare with torch for this method's share of the seconds, at least once."""
    name, rounds = f"operator {method}", 0
    problems: list[str] = []
    deadline = time.monotonic() + trial.seconds / len(trial.methods)

    def compare() -> None:
        problems.extend(_differences(place, trial, method, operators, rounds))

    while True:
        error = place.world.attempt(compare)
        rounds += 1
        if error is not None:
            fault = place.fail(name, error, "both operators end", _ERROR_FIX)
            return [] if error == "failed on another rank" else [fault]
        if place.any(bool(problems) or time.monotonic() > deadline):  # one rank's clock or result ends it for all
            break
    if problems:
        return [place.fail(name, f"{'; '.join(problems)}, in round {rounds}", "bitwise equal to torch", _WRONG_FIX)]
    return [place.ok(name, f"{rounds} rounds of AG + GEMM and GEMM + RS on new inputs", "bitwise equal to torch")]


def _differences(place: Place, trial: Trial, method: str, operators: Operators, seed: int) -> Iterator[str]:
    inputs, config, group = _inputs(place, trial, seed), trial.config(method), place.joined
    gathered = _gathered(place, trial, inputs.x_shard_m)
    y = operators.gather(inputs.x_shard_m, inputs.w_shard_n, group=group, config=config, name="doctor/ag_gemm")
    z = operators.scatter(inputs.h_shard_k, inputs.v_shard_k, group=group, config=config, name="doctor/gemm_rs")
    place.synchronize()  # a wait on the GPU gives up there; then its output is NaN, but the reason is the time-out
    check_timeouts()
    wrong_rows = (y != (gathered.float() @ inputs.w_shard_n.float().t()).to(y.dtype)).any(dim=1)
    if bool(wrong_rows.any()):
        sources = wrong_rows.view(place.size, -1).any(dim=1).nonzero().flatten().tolist()
        owners = ", ".join(map(place.who, sources))
        yield f"AG + GEMM: {int(wrong_rows.sum())} of {len(y)} rows wrong, gathered from {owners}"
    wrong = int((z != _scattered(place, inputs).to(z.dtype)).sum())
    if wrong:
        yield f"GEMM + RS: {wrong} of {z.numel()} elements wrong"


def _timed(place: Place, trial: Trial, operators: Operators) -> list[Finding]:
    """AG + GEMM by each method against the collective and the product in sequence; the slowest rank's time."""
    inputs, group = _inputs(place, trial, 0), place.joined

    def method_call(method: str) -> timing.Call:
        config, x, w = trial.config(method), inputs.x_shard_m, inputs.w_shard_n
        return lambda index: operators.gather(x, w, group=group, config=config, name="doctor/ag_gemm")

    calls = {method: method_call(method) for method in trial.methods}
    calls["sequence"] = lambda index: _gathered(place, trial, inputs.x_shard_m) @ inputs.w_shard_n.t()
    pace = timing.pace(2 * trial.m * trial.k * trial.n / place.size)
    return judge_times(place, operators.measure(calls, pace, group, place.device))


def judge_times(place: Place, times: dict[str, timing.Timing]) -> list[Finding]:
    """The same figures on every rank, so only the first one speaks."""
    if place.rank != 0:
        return []
    sequence = times["sequence"].ms
    methods = {name: took.ms for name, took in times.items() if name != "sequence"}
    best = min(methods, key=methods.__getitem__)
    told = ", ".join(f"{name} {ms:.3f} ms" for name, ms in methods.items())
    measured = f"{told}; collective then GEMM {sequence:.3f} ms: {sequence / methods[best]:.2f} x by {best}"
    name, expected = "operator time", "faster than the sequence"
    known = place.device.type == "cuda" and model_of(torch.cuda.get_device_name(place.device)) is not None
    if not known or place.size == 1:
        return [place.ok(name, measured, "not judged: " + ("a single rank" if place.size == 1 else "unknown hardware"))]
    if methods[best] > sequence:
        fix = (
            "overlap does not pay here: see the lines on links, slow ranks and the environment; other load on the host"
        )
        return [place.warn(name, measured, expected, fix)]
    return [place.ok(name, measured, expected)]


def _inputs(place: Place, trial: Trial, seed: int) -> Inputs:
    generator = torch.Generator(place.device).manual_seed(1000 * seed + place.rank)

    def sparse(rows: int, columns: int) -> torch.Tensor:
        # Two of 17 are not zero: a sum over 14336 products has a deviation of 14, and bf16 is exact to 256.
        numbers = torch.randint(-8, 9, (rows, columns), device=place.device, generator=generator)
        return numbers.div_(8, rounding_mode="trunc").to(trial.dtype)

    m, k, n, size = trial.m, trial.k, trial.n, place.size
    return Inputs(sparse(m // size, k), sparse(n // size, k), sparse(m, n // size), sparse(k, n // size))


def _gathered(place: Place, trial: Trial, x_shard_m: torch.Tensor) -> torch.Tensor:
    whole = x_shard_m.new_empty(trial.m, trial.k)
    dist.all_gather_into_tensor(whole, x_shard_m, group=place.joined)
    return whole


def _scattered(place: Place, inputs: Inputs) -> torch.Tensor:
    partial = inputs.h_shard_k.float() @ inputs.v_shard_k.float().t()
    mine = partial.new_empty(partial.shape[0] // place.size, partial.shape[1])
    dist.reduce_scatter_tensor(mine, partial, group=place.joined)
    return mine
