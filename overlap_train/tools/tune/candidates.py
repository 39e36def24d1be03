"""The whole operator by each candidate method, on all ranks, and which of them wins.

It is measured as the benchmark measures: operands as in training, results checked first, interleaved bursts, the time of the
slowest rank. Every rank has the same figures, and therefore comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...group.domain import OverlapDomain
from ...group.signals import Tag
from ...methods import TRAITS
from ...ops.plan import chunks_of, planner_of
from ...ops.table import start_gather, start_scatter
from ...planning.choice import Choice, may_choose, untuned
from ...planning.table import Winner
from ...planning.variants import IN_CHUNKS, PLAIN, VARIANTS, Variant, method_of
from ...planning.waves import saves_a_wave
from ...schedule.order import EXCHANGES, GATHER, SCATTER
from ...select.low_latency import serving
from ...select.passes import SCATTER_AND_WGRAD, Pass
from ...select.tiling import equal_chunks
from ..measure.cases import Case
from ..measure.operands import Operands
from ..measure.runs import Inputs, Run, Session, overlapped, plan_of, problem_of, tag_of
from ..measure.timing import Call, Timing

# Two measurements of one method differ by 2 %, and in a layer the order may change: collective won one backward by 2.1 % here,
# but in training that backward took 0.61 instead of 0.51 ms (Llama-3 8B qkv, 4 x H200).
NOISE = 0.05
# If the host needs more than this part of the GPU's time to launch a method, a layer may wait for the host: 8B attention took 2.6
# times its GEMMs' time with chunked for qkv and 1.75 with direct, which alone was 2 % slower (4 x H200, a slow host). Long
# products hide their launches; of output layers the default knows what bursts do not show (planning/untuned.py: LONG_AND_NARROW).
LAUNCHES_THAT_SHOW = 0.5
# In that case methods within this part count as equal: chunked won 8B proj's backward by 6 %, but the layer took 1.39 ms with it
# and 1.28 with fused throughout.
WORTH_LAUNCHES = 0.1
# A barrier takes 10 microseconds; collisions of shorter copies cost less than that.
SHORT_COPY_US = 40.0
# A message between nodes takes about 14 microseconds (machines.py: nic_us, not measured), in which a NIC of 50 GB/s sends 0.7 MB.
SHORTEST_MESSAGE = 1 << 20


def candidates(methods: Sequence[str], default: str, pass_: Pass, nodes: int = 1) -> list[str]:
    """The methods to try: those asked for that serve the pass, the default, and always collective: auto must never be slower
    than that. Across nodes only those that `auto` may choose there."""
    asked = [method for method in serving(methods, pass_) if may_choose(method, nodes)]
    return list(dict.fromkeys([*asked, default, "collective"]))


def variants_to_run(pass_: Pass, method: str, device: torch.device, nodes: int = 1, gbs: float = 0.0) -> list[Variant]:
    """The variants of a method that are worth a measurement: across nodes numbers of chunks, inside a node these. gbs: of the
    network.

    Whole blocks: where the method would cut them into several chunks. Split reduction: in a column linear's backward, whose
    weight gradient can run in between, and where it saves half a wave of tiles or more. Starting with a barrier: where pushes of
    several ranks may meet on one link.
    """
    if nodes > 1:
        return _in_chunks(pass_, method, device, nodes, gbs)
    traits = TRAITS[method]
    cuts = traits.cuts and chunks_of(Choice(method, ""), pass_, device, nodes=1) > 1
    # A column linear's backward starts with a barrier in any case: `backward` below needs one for its slots. Ulysses' never
    # starts with one.
    is_free = pass_.kind in (GATHER, SCATTER)
    collides = pass_.world > 2 and traits.pushes and pass_.copy_us > SHORT_COPY_US and is_free
    splits = traits.splits and (pass_.kind == SCATTER_AND_WGRAD or saves_a_wave(pass_, device))
    inside = [v for v in VARIANTS if not v.chunks]
    return [v for v in inside if cuts >= v.whole and splits >= v.split_reduction and collides >= v.barrier_first]


def _in_chunks(pass_: Pass, method: str, device: torch.device, nodes: int, gbs: float) -> list[Variant]:
    """The plan's own number of chunks, and all others that cut a block into equal chunks, none too short for a message.

    `chunked` has one number for an all-to-all of CPU processes: it multiplies whole blocks, and more chunks would be messages for
    nothing.
    """
    if not TRAITS[method].pushes or (method == "chunked" and pass_.kind in EXCHANGES and device.type != "cuda"):
        return [PLAIN]
    rows = pass_.m // pass_.world
    most = rows * pass_.row_features * pass_.dtype.itemsize // SHORTEST_MESSAGE if device.type == "cuda" else rows
    own = chunks_of(Choice(method, "a candidate"), pass_, device, nodes, gbs)
    fits = [v for v in IN_CHUNKS if v.chunks <= max(1, most) and equal_chunks(rows, v.chunks) == v.chunks]
    return [PLAIN, *(v for v in fits if v.chunks != own)]


def decide(timings: Mapping[str, Timing], default: str) -> str:
    """The winner. timings: under the names of a Winner.

    Methods whose times differ by no more than NOISE are equal. If the default is among the fastest, it wins. If launches show in
    the time of the fastest, methods within WORTH_LAUNCHES are equal, and the one with the least host time wins. `collective` wins
    against equals only as the default. A method must have worked in its plain variant.
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
    near = set(_equal(best, WORTH_LAUNCHES))
    if "collective" in best:
        near &= {method for method in best if best["collective"].ms >= (1 - NOISE) * best[method].ms}
    return min(_overlapping(sorted(near)), key=lambda method: best[method].host_us)


def _equal(best: Mapping[str, Timing], share: float) -> list[str]:
    """The methods that are slower than the fastest by no more than this share of their time."""
    least = min(timing.ms for timing in best.values())
    return [method for method, timing in best.items() if least >= (1 - share) * timing.ms]


def _overlapping(methods: list[str]) -> list[str]:
    """The methods without `collective`, unless there is nothing else: a burst flatters it."""
    return [method for method in methods if method != "collective"] or methods


def launches_show(timing: Timing) -> bool:
    """Whether the host may be what a layer of such operators waits for."""
    return timing.host_us > LAUNCHES_THAT_SHOW * 1e3 * timing.ms


@torch.no_grad()
def tune_case(case: Case, domain: OverlapDomain, session: Session) -> Winner | None:
    """The winner of one pass, None if no method works; what fails is left out and noted in the results. Collective."""
    world, settings = session.world, session.settings
    planned, nodes = case.planned(world.size, settings.dtype), domain.topology.nodes
    default = untuned(planned, world.device, nodes).method
    calls = working(case, candidates(settings.methods, default, planned, nodes), domain, session)
    if not any(method_of(name) == name for name in calls):
        session.results.note(f"{case.name}: no method works, so nothing is stored", failure=True)
        return None
    timings = session.time(calls, case.flops(world.size))
    return Winner(planned, decide(timings, default), {name: timing.ms for name, timing in timings.items()})


def working(case: Case, methods: Sequence[str], domain: OverlapDomain, session: Session) -> dict[str, Call]:
    """The methods that give the right result on every rank, ready to be timed, under their names in a Winner."""
    inputs, calls = Inputs(case, session), {}
    for name, run in runs_of(case, methods, domain, inputs.first).items():
        problem = problem_of(case.name, run, inputs, session.world)
        if problem is None:
            calls[name] = inputs.call(run)
        else:
            session.results.note(f"{case.name}: {name} left out: {problem}", failure=False)
    return calls


def runs_of(case: Case, methods: Sequence[str], domain: OverlapDomain, like: Operands) -> dict[str, Run]:
    """Every method, in every variant."""
    planned, nodes = case.planned(domain.world_size, like.left.dtype), domain.topology.nodes
    domain.span.settled(domain.config)  # the network is measured
    run_of = backward if planned.kind == SCATTER_AND_WGRAD else overlapped
    return {
        variant.named(method): run_of(case, domain, Choice(method, "a candidate", variant), like)
        for method in methods
        for variant in variants_to_run(planned, method, domain.device, nodes, domain.span.network_gbs)
    }


def backward(case: Case, domain: OverlapDomain, choice: Choice, like: Operands) -> Run:
    """A column linear's whole backward, as autograd runs it (linear.py). Without the weight gradient, a method whose reduction
    ends under that gradient would look slower than it is."""
    plan, tag = plan_of(case, domain, choice, like), tag_of(case, choice)
    whole = planner_of(domain.topology, domain.config).sent_again(replace(plan, kind=GATHER))
    wgrad = Tag(f"{tag.op}/wgrad", tag.what)

    def run(o: Operands) -> torch.Tensor:
        # With a barrier, whether training has one or not: one backward after another needs it for its slots. `collective` does
        # not, but is measured with it too.
        with domain.operator(tag, whole.slots + plan.slots, barrier_first=True):
            x_shard_m = o.whole.chunk(domain.world_size)[domain.rank]  # any rows do: o.whole is as large as x
            gather = start_gather(domain, whole, wgrad, x_shard_m)
            scatter = start_scatter(domain, plan, tag, o.left, o.right)
            gather.keep_own(plan)
            torch.mm(o.left.t(), gather.gathered_view())
            return scatter.finish()

    return run
