"""Which method runs, and why. The reason is part of the answer: what ran is never silent (docs/design.md, rule 8).

What was measured decides (table.py), else an estimate for this GPU (cost.py); one rule says who wins (`fastest`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from .cost import NOISE, Estimate, reach_of, sum_us
from .method import LOW_LATENCY, NAMES, Method, Pass, serving
from .system import System
from .table import Table, Winner, quickest_variant
from .tiles import HOPPER_TILE, count_waves, on_hopper

# If the host needs more than this part of the GPU's time to launch a method, a layer may wait for the host.
_LAUNCHES_THAT_SHOW = 0.5
# Hosts differ: estimates are for a fast one, and the slowest that was measured needs 1.8 times as long.
_SLOWER_HOST = 1.5
# (microseconds, how many times as long one side of the weight is as the other): where both are at least these, as in output
# layers, the library is faster in training by 1 % of a step, which bursts do not show.
_LONG_AND_NARROW = ((6000.0, 4), (3000.0, 6))
# With so few rows `fused` took up to 1.11 times as long as `direct`, whatever the product.
_FEW_ROWS = 1024
# Where copies take more than this part of the GEMM's time, each push costs more than chunks shorten the tail.
_COPIES_THAT_SHOW = 0.62
# A split reduction pays where a column's backward sends x, or its partials, for so many times as long as it multiplies before the
# own tiles: at 0.66 it gained 7 %, at 0.59 it cost 2 %.
_LATE = 0.625
# Skewed ranks hit the same destination, and stay skewed. Where a column linear's backward gathers and scatters for longer than it
# multiplies, and longer than this, a barrier first gained 20 %; of shorter copies it gained nothing.
_LONG_COPY_US, _COLLIDES = 125.0, 0.83
_SECOND_KERNEL_US = 5.0  # that a split reduction takes beside reading and writing


def fastest(took: Mapping[Method, Estimate], default: str, noise: float = NOISE) -> Method:
    """The winner of what was measured, or estimated. default: the name of the method that wins against those that are as fast.

    Times that differ by no more than `noise` are equal. If launches show in the time of the fastest, methods within twice the
    noise are equal, and the one with the least host time wins. `collective` wins against equals only as the default: a burst
    flatters it. Of one method the plain variant stays unless options make it faster by more than table.SAME. It must have run.
    """
    us = {how: one.us for how, one in took.items()}
    best = {how.name: quickest_variant(us, how.name) or how for how in took if how.is_plain}
    of = {name: took[how] for name, how in best.items()}
    late = {name for name, one in of.items() if one.host_us > _LAUNCHES_THAT_SHOW * one.us}
    equal = _equal(of, noise)
    if default in equal and (default == "collective" or default not in late):
        return best[default]
    shows = not late.isdisjoint(equal)
    if shows and "collective" in of:
        equal = [name for name in _equal(of, 2 * noise) if of["collective"].us >= (1 - noise) * of[name].us]
    elif shows:
        equal = _equal(of, 2 * noise)
    names = [name for name in equal if name != "collective"] or equal
    return best[min(names, key=lambda name: of[name].host_us if shows else of[name].us)]


def _equal(of: Mapping[str, Estimate], share: float) -> list[str]:
    """The methods that are slower than the fastest by no more than this share of their time."""
    least = min(took.us for took in of.values())
    return [name for name, took in of.items() if least >= (1 - share) * took.us]


@dataclass(frozen=True)
class Choice:
    """How one operator pass runs, and why."""

    how: Method
    why: str

    @property
    def method(self) -> str:
        return self.how.name

    @property
    def reason(self) -> str:
        """Why, and with which options."""
        return self.why + self.how.options

    def by(self, **options: bool | int) -> Choice:
        """The same method with other options."""
        return replace(self, how=replace(self.how, **options))  # type: ignore[arg-type]


def choose(
    requested: str, pass_: Pass, device: torch.device | System, table: Table, nodes: int = 1, all_reduces: bool = False,
    in_forward: bool = False, without: Collection[str] = (),
) -> Choice:  # fmt: skip
    """The method for a pass: the one asked for, or for `auto` the measured winner, or the estimated one.

    nodes: that the group spans, as the one that has measured the table. all_reduces: the sums of the pass are gathered again;
    in_forward: behind nothing else. without: methods that `auto` does not take.
    """
    winner = winner_of(pass_, device, table)
    if requested != "auto":
        choice = Choice(Method(requested), "asked for")
    elif winner is not None:
        choice = Choice(Method(winner.how.name), f"auto: tuned for {winner.measured}")
    else:
        choice = untuned(pass_, device, nodes, all_reduces, in_forward, without)
    return replace(choice, how=with_options(choice.how.name, pass_, _system_of(pass_, device), winner, nodes))


def winner_of(pass_: Pass, device: torch.device | System, table: Table) -> Winner | None:
    """What was measured for a pass. A bucket may hold features that the Hopper kernels serve and others: a measurement of one
    kind says nothing about the other."""
    winner = table.get(pass_.bucket) if table else None
    fits = winner is not None and on_hopper(winner.measured, device) == on_hopper(pass_, device)
    return winner if fits else None


def untuned(
    pass_: Pass, device: torch.device | System, nodes: int = 1, all_reduces: bool = False, in_forward: bool = False,
    without: Collection[str] = (),
) -> Choice:  # fmt: skip
    """What `auto` takes where nothing was measured: `fused`, or with few rows `direct`, unless another method is
    estimated to be faster. all_reduces, in_forward, without: see choose."""
    system, reach = _system_of(pass_, device), reach_of(nodes)
    if system.type != "cuda":
        return Choice(Method("chunked"), "auto: not tuned: CPU tensors")
    served = on_hopper(pass_, system)  # kernels of ours that multiply were measured on Hopper only
    names = [name for name in NAMES if served or not Method(name).multiplies]
    fits = [name for name in serving(names, pass_) if reach.may_choose(name) and name not in without]
    took = {}
    for name in fits:
        how = with_options(name, pass_, system, nodes=nodes)
        if all_reduces:
            one = reach.all_reduce(pass_, how, system, in_forward)
        else:
            one = reach.estimate(pass_, how, system, backward=pass_.kind.before_wgrad)
        took[Method(name)] = Estimate(one.device_us, _SLOWER_HOST * one.host_us)
    default = "chunked" if not served or _is_narrow(pass_, system) else "fused"
    if default == "fused" and pass_.m <= _FEW_ROWS and reach.may_choose("direct"):
        # Where estimates are equal `direct` took 1.05 to 1.08 times as long as `low_latency`; timed on two ranks only.
        default = LOW_LATENCY if all_reduces and pass_.world == 2 and LOW_LATENCY in fits else "direct"
    how = fastest(took, default)
    why = f"estimated for {system.name}" if served else "no Hopper kernel for this GPU, dtype or shape"
    return Choice(how, f"auto: not tuned: {why}")


def _is_narrow(pass_: Pass, system: System) -> bool:
    """Whether a GEMM is long and its weight narrow, as that of an output layer is."""
    short, long = sorted((pass_.n, pass_.k))
    return any(_long_gemm_us(pass_, system) >= us and long >= times * short for us, times in _LONG_AND_NARROW)


def alone(choice: Choice, pass_: Pass, device: torch.device | System) -> Choice:
    """The choice for a pass that nothing comes after: a reduction that is split to let a weight gradient run first is not."""
    return choice.by(split_reduction=choice.how.split_reduction and _saves_a_wave(pass_, _system_of(pass_, device)))


def _system_of(pass_: Pass, device: torch.device | System) -> System:
    system = System.of(device)
    return system.in_fp8(pass_.blockwise) if pass_.fp8 else system


def with_options(name: str, pass_: Pass, system: System, winner: Winner | None = None, nodes: int = 1) -> Method:
    """How a method runs a pass: as measured, else as the rules say."""
    measured = None if winner is None else quickest_variant(winner.ms, name)
    if not reach_of(nodes).has_rules:
        return measured or Method(name)
    if system.type != "cuda":
        return Method(name)
    by_rules = _by_rules(pass_, name, system)
    if winner is None or measured is None:  # an autotune run times one variant, which is the rules'
        return by_rules
    # Rows that share a measurement may have other waves.
    saves = winner.measured != pass_ and measured.cuts and _saves_a_wave(pass_, system)
    measured = replace(measured, split_reduction=saves or measured.split_reduction)
    # Backward passes that follow each other wait for each other anyway, for their slots: the tuner cannot tell what a barrier
    # gains.
    return replace(measured, barrier_first=by_rules.barrier_first) if pass_.kind.before_wgrad else measured


def _by_rules(pass_: Pass, name: str, system: System) -> Method:
    """The options of a method inside one node of GPUs where nobody has measured them, by what copies and the GEMM take."""
    plain, kind = Method(name), pass_.kind
    copies, gemm = pass_.sent_bytes / (system.copy_gbs * 1e3), _long_gemm_us(pass_, system)
    outweighs = copies > _COPIES_THAT_SHOW * gemm
    # The peers' partials follow the blocks of x: they arrive when the last tiles already wait for them.
    is_late = kind.before_wgrad and copies > _LATE * (1 - 1 / pass_.world) * gemm
    whole = plain.cuts and outweighs and (kind.before_wgrad or not kind.reduces)
    splits = plain.cuts and (is_late or _saves_a_wave(pass_, system))
    # Pushes to several peers collide in a gather's whole blocks, and in two rounds that take longer than the GEMMs.
    two_rounds = kind.before_wgrad and copies > max(_LONG_COPY_US, _COLLIDES * gemm)
    barrier = pass_.world > 2 and plain.pushes and ((kind.gathers and whole) or two_rounds)
    return Method(name, whole, splits, barrier)


def _long_gemm_us(pass_: Pass, system: System) -> float:
    """This rank's GEMM at the rate of a long run."""
    return 2 * pass_.rows * pass_.n * pass_.k / (system.sustained_tflops * 1e6)


def _saves_a_wave(pass_: Pass, system: System) -> bool:
    """Whether a scatter takes half a wave of tiles less, or more, and less time, with a split reduction.

    Own tiles that add the peers' partials have no rows of peers (schedule/order.py: units_in_run). So 4100 rows of 4096 columns
    on two GPUs are 544 tiles, four waves and one of halves, and with a split reduction 528, four: 332 us instead of 386.
    """
    rows, n, world = pass_.m // pass_.world, pass_.n, pass_.world
    if not (rows and n and pass_.kind.reduces and on_hopper(pass_, system)):
        return False
    apart = HOPPER_TILE.count(rows, n, world - 1) + HOPPER_TILE.count(rows, n)
    own = HOPPER_TILE.pairs(rows, n)
    before, after = (count_waves(tiles, system.sms, own) for tiles in (apart, HOPPER_TILE.count(rows, n, world)))
    adds_us = sum_us(system, (world + 1) * rows * n * pass_.dtype.itemsize)  # own and received partials, and their sum
    return (1 - after / before) * _long_gemm_us(pass_, system) > _SECOND_KERNEL_US + adds_us
