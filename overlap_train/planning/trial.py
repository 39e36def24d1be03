"""Which method won in training's own first calls: what ranks measured, and the winners for the tuning table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..methods import TRAITS
from .choice import untuned
from .low_latency import serving
from .passes import Pass
from .table import SAME, Table, Winner

Times = Mapping[tuple[str, str], float]  # (kind of a pass, method) -> milliseconds


def methods_to_try(fprop: Pass, device: torch.device, interpreted: bool, nodes: int) -> tuple[str, ...]:
    """Those that serve a linear in both directions, the forward's default first: they take turns, and it has the first."""
    asked = [method for method in serving(serving(TRAITS, fprop), fprop.dgrad) if _runs(method, device, interpreted)]
    fits = [method for method in asked if nodes == 1 or not TRAITS[method].kernels]
    default = untuned(fprop, device, nodes).method
    return tuple(dict.fromkeys([default, *fits]))


def _runs(method: str, device: torch.device, interpreted: bool) -> bool:
    return device.type == "cuda" or interpreted or not TRAITS[method].kernels


def is_known(fprop: Pass, table: Table) -> bool:
    """Whether both passes of a linear have been measured."""
    return all(table.find(pass_) is not None for pass_ in (fprop, fprop.dgrad))


def winners(fprop: Pass, of_all_ranks: Sequence[Times], table: Table, device: torch.device) -> list[Winner]:
    """The winner of each pass that has none yet. The slowest rank counts; the default stays unless another is faster by more
    than noise. A method that some rank has not timed is left out; fewer than two are no measurement."""
    found = []
    for pass_ in (fprop, fprop.dgrad):
        ms = _slowest(pass_.kind, of_all_ranks)
        if len(ms) < 2 or table.find(pass_) is not None:
            continue
        default, fastest = untuned(pass_, device, table.nodes).method, min(ms, key=lambda method: ms[method])
        stays = default in ms and ms[fastest] > (1 - SAME) * ms[default]
        found.append(Winner(pass_, default if stays else fastest, ms))
    return found


def _slowest(kind: str, of_all_ranks: Sequence[Times]) -> dict[str, float]:
    """Method -> milliseconds of the slowest rank, of the methods that all have timed."""
    timed = [method for of, method in of_all_ranks[0] if of == kind]
    everywhere = [method for method in timed if all((kind, method) in times for times in of_all_ranks)]
    return {method: max(times[kind, method] for times in of_all_ranks) for method in everywhere}
