"""The whole operator by each candidate method, on all ranks, and which of them wins.

The measurement is the benchmark's: operands as in training, results checked first, interleaved bursts, the slowest rank's time.
So every rank has the same figures and comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from ..bench.operands import Operands, make_operands
from ..bench.operators import Run, overlapped, pass_of, reference_of, rotating, try_run
from ..bench.output import Results
from ..bench.settings import Settings
from ..bench.shapes import Case
from ..bench.timing import Call, Timing, input_sets, measure, pace
from ..bench.world import World
from ..choice import GATHER, SCATTER_AND_WGRAD, Choice, Pass, untuned
from ..domain import OverlapDomain
from ..methods import TRAITS
from ..operators.all_gather_gemm import start_all_gather_whole
from ..operators.gemm_reduce_scatter import start_gemm_reduce_scatter
from ..operators.tiles import chunk_count
from ..tuned.table import Winner
from ..tuned.ways import WAYS, Way, method_of

# Two measurements of one method differ by 2 %, and a layer around it does more: collective won a backward by 2.1 % here, and in
# training that backward took 0.61 instead of 0.51 ms (Llama-3 8B qkv, 4 x H200).
NOISE = 0.05
# Where launches take the host more than this part of the GPU's time, a layer may wait for them: 8B attention took 2.6 times its
# GEMMs' time with chunked for qkv and 1.75 with direct, which alone was 2 % slower (4 x H200, a slow host). Long products have
# launches to spare: there the default knows what bursts do not show (choice.py, LONG_GEMM_US).
LAUNCHES_THAT_SHOW = 0.5
# There so much is equal: chunked won 8B proj's backward by 6 %, and with it the layer took 1.39 ms, with fused throughout 1.28.
WORTH_LAUNCHES = 0.1
# A barrier takes 10 microseconds; collisions of shorter copies cost less.
SHORT_COPY_US = 40.0


def candidates(methods: Sequence[str], default: str) -> list[str]:
    """The methods to try: those asked for, the default, and always collective: auto must never be slower than that."""
    return list(dict.fromkeys([*methods, default, "collective"]))


def ways_to_run(pass_: Pass, method: str, device: torch.device) -> list[Way]:
    """Those worth trying: whole blocks where there would be several chunks, a late reduction where there is something to do
    meanwhile, ranks in step where their pushes may collide."""
    row_bytes = (pass_.k if pass_.kind == GATHER else pass_.n) * pass_.dtype.itemsize
    traits = TRAITS[method]
    cuts = traits.cuts and chunk_count((pass_.m or 0) // pass_.world, row_bytes, device) > 1
    collides = pass_.world > 2 and traits.pushes and pass_.copy_us > SHORT_COPY_US
    # One backward of a column linear behind another needs a barrier for its slots in any case.
    is_free = pass_.kind != SCATTER_AND_WGRAD
    defers = traits.defers and pass_.kind == SCATTER_AND_WGRAD
    possible = [way for way in WAYS if (cuts or not way.whole) and (defers or not way.deferred)]
    return [way for way in possible if (collides and is_free) or not way.in_step]


def decide(timings: Mapping[str, Timing], default: str) -> str:
    """The fastest method; of those that are equal but for noise the default. Where launches show, the method with the least of
    them, of all that are slower by no more than WORTH_LAUNCHES, and than collective by no more than noise.

    Equal to others, collective wins where it is the default, and only there. A method that did not work plainly is none, though
    it may have worked in another way. timings: under the names of a Winner.
    """
    best = {name: timing for name, timing in timings.items() if method_of(name) == name}
    for name, timing in timings.items():
        method = method_of(name)
        if method in best and timing.ms < best[method].ms:
            best[method] = timing
    equal = _equal(best, NOISE)
    if default in equal and (default == "collective" or not launches_show(best[default])):
        return default
    if not any(launches_show(best[method]) for method in equal):
        return min(_overlapping(equal), key=lambda method: best[method].ms)
    rivals = set(_equal(best, WORTH_LAUNCHES))
    if "collective" in best:
        rivals &= {method for method in best if best["collective"].ms >= (1 - NOISE) * best[method].ms}
    return min(_overlapping(sorted(rivals)), key=lambda method: best[method].host_us)


def _equal(best: Mapping[str, Timing], share: float) -> list[str]:
    """The methods that are slower than the fastest by no more than this share of their time."""
    least = min(timing.ms for timing in best.values())
    return [method for method, timing in best.items() if least >= (1 - share) * timing.ms]


def _overlapping(methods: list[str]) -> list[str]:
    """Without collective, unless there is nothing else: a burst flatters it."""
    return [method for method in methods if method != "collective"] or methods


def launches_show(timing: Timing) -> bool:
    """Whether the host may be what a layer of such operators waits for."""
    return timing.host_us > LAUNCHES_THAT_SHOW * 1e3 * timing.ms


@torch.no_grad()
def tune_case(case: Case, settings: Settings, domain: OverlapDomain, world: World, results: Results) -> Winner | None:
    """The winner of one pass, None if no method works; what fails is left out and noted in `results`. Collective."""
    pass_ = pass_of(case, world.size, settings.dtype)
    default = untuned(pass_, world.device).method
    calls = working(case, candidates(settings.methods, default), settings, domain, world, results)
    if not any(method_of(name) == name for name in calls):
        results.note(f"{case.name}: no method works, so nothing is stored", failure=True)
        return None
    timings = measure(calls, pace(case.flops(world.size), settings.quick), world.group, world.device)
    return Winner(pass_, decide(timings, default), {name: timing.ms for name, timing in timings.items()})


def working(
    case: Case, methods: Sequence[str], settings: Settings, domain: OverlapDomain, world: World, results: Results
) -> dict[str, Call]:
    """The methods that give the right result on every rank, ready to be timed, under their names in a Winner."""
    first, decoy = (make_operands(case, world, settings.dtype, seed) for seed in (0, 99))
    more = [make_operands(case, world, settings.dtype, seed) for seed in range(1, input_sets(first.nbytes))]
    reference = reference_of(case, first, world)
    calls = {}
    for name, run in runs_of(case, methods, settings, domain).items():
        problem = world.attempt(partial(try_run, case.name, run, first, decoy, reference))
        if problem is None:
            calls[name] = rotating(run, [first, *more])
        else:
            results.note(f"{case.name}: {name} left out: {problem}", failure=False)
    return calls


def runs_of(case: Case, methods: Sequence[str], settings: Settings, domain: OverlapDomain) -> dict[str, Run]:
    """Every method, in every way."""
    pass_ = pass_of(case, domain.world_size, settings.dtype)
    run_of = partial(backward, domain) if pass_.kind == SCATTER_AND_WGRAD else partial(overlapped, case, domain)
    return {
        way.named(method): run_of(Choice(method, "a candidate", way))
        for method in methods
        for way in ways_to_run(pass_, method, domain.device)
    }


def backward(domain: OverlapDomain, choice: Choice) -> Run:
    """Of a column linear, as autograd runs it (linear.py): alone, a method that leaves its end to the weight gradient would look
    worse than it is."""

    def run(o: Operands) -> torch.Tensor:
        # In step, whether training has it so or not: one backward behind another needs a barrier for its slots, and collective,
        # which needs none, is measured with it too.
        with domain.operator("tune", calls=2, in_step=True):
            x_shard_m = o.whole.chunk(domain.world_size)[domain.rank]  # any rows do: o.whole is as large as x
            gather = start_all_gather_whole(domain, x_shard_m, choice.method, "tune/wgrad")
            scatter = start_gemm_reduce_scatter(domain, o.left, o.right, choice.method, "tune/dgrad", choice.way)
            torch.mm(o.left.t(), gather.full())
            return scatter.finish()

    return run
