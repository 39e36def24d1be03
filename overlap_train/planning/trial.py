"""Which method won in training's own first calls: what ranks measured, and the winners for the tuning table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..methods import TRAITS
from ..select.low_latency import serving
from ..select.passes import Bucket, Pass
from .choice import may_choose, untuned, winner_of
from .table import SAME, Table, Winner
from .waves import on_hopper

Times = Mapping[tuple[str, str], float]  # (kind of a pass, method) -> milliseconds
TrialKey = tuple[Bucket, bool]


def key_of(fprop: Pass, device: torch.device) -> TrialKey:
    """What linears of one trial have in common: the bucket of their forward pass, and whether the Hopper kernels serve it."""
    return fprop.bucket, on_hopper(fprop, device)


def methods_to_try(fprop: Pass, device: torch.device, nodes: int) -> tuple[str, ...]:
    """The methods that may serve a linear in both directions, the forward's default first: they take turns, and it has the
    first."""
    asked = serving(serving(TRAITS, fprop), fprop.dgrad)
    fits = [method for method in asked if may_choose(method, nodes)]
    return tuple(dict.fromkeys([untuned(fprop, device, nodes).method, *fits]))


def is_known(fprop: Pass, table: Table, device: torch.device, nodes: int) -> bool:
    """Whether `auto` goes by measurements in both passes of a linear."""
    return all(winner_of(pass_, device, table, nodes) is not None for pass_ in (fprop, fprop.dgrad))


def winners(fprop: Pass, of_all_ranks: Sequence[Times], table: Table, device: torch.device, nodes: int) -> list[Winner]:
    """The winner of each pass that has none yet. The slowest rank counts; the default stays unless another is faster by more
    than noise. A method that some rank has not timed is left out. Without the default, or with nothing else, none is found."""
    found = []
    for pass_ in (fprop, fprop.dgrad):
        ms, default = _slowest(pass_.kind, of_all_ranks), untuned(pass_, device, nodes).method
        if len(ms) < 2 or default not in ms or winner_of(pass_, device, table, nodes) is not None:
            continue
        fastest = min(ms, key=lambda method: ms[method])
        found.append(Winner(pass_, default if ms[fastest] > (1 - SAME) * ms[default] else fastest, ms))
    return found


def _slowest(kind: str, of_all_ranks: Sequence[Times]) -> dict[str, float]:
    """Method -> milliseconds of the slowest rank, of the methods that all have timed."""
    timed = [method for of, method in of_all_ranks[0] if of == kind]
    everywhere = [method for method in timed if all((kind, method) in times for times in of_all_ranks)]
    return {method: max(times[kind, method] for times in of_all_ranks) for method in everywhere}
