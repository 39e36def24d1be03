"""What can be planned: how many ranks a group has, on how many nodes, and whether a model's sizes can be shared by so many."""

from __future__ import annotations

import math
from dataclasses import replace

from ...planning.machines import System
from ..measure.cases import check_divisible
from ..measure.models import Model
from .inputs import EXCHANGED, Strategy, heads_of, linears_of


def check(system: System, strategy: Strategy, model: Model) -> None:
    """Raises ValueError for what cannot be planned."""
    _check_nodes(system, strategy)
    try:
        _check_sizes(strategy, model)
    except ValueError as error:
        raise ValueError(f"{error}: {_what_fits(system, strategy, model)}") from None


def _check_nodes(system: System, strategy: Strategy) -> None:
    """Whether a group has as many ranks on each of its nodes, and GPUs for all of them."""
    ranks, nodes, gpus = strategy.ranks, strategy.nodes, system.gpus_per_node
    flag, most = _flag(strategy), gpus * nodes
    asked = f"{_asked(strategy)} with --nodes {nodes}"
    if ranks > most:
        enough = next(count for count in range(math.ceil(ranks / gpus), ranks + 1) if ranks % count == 0)
        raise ValueError(
            f"{asked}: nodes of {gpus} GPUs hold {most} ranks; set --nodes {enough}, or {flag} to at most {most}"
        )
    inside = "leave out --nodes, which says how many nodes one group spans, or " if ranks <= gpus else ""
    if ranks % nodes:
        raise ValueError(
            f"{asked}: a group must have as many ranks on each node that it spans; {inside}set {flag} to a multiple of {nodes}, "
            f"at most {most}"
        )
    if strategy.local % strategy.tp and strategy.tp % strategy.local:
        raise ValueError(
            f"{asked}: each node has {strategy.local} ranks, and tensor-parallel groups of {strategy.tp} neither fit into nodes "
            f"nor fill them; set --tp to a divisor or a multiple of {strategy.local}"
        )


def _check_sizes(strategy: Strategy, model: Model) -> None:
    check_divisible("seq times micro_batch", strategy.rows, strategy.ranks)
    for linear in linears_of(model, strategy.tp):
        sharing = strategy.cp if linear.name in EXCHANGED and strategy.tp == 1 else strategy.tp
        check_divisible(f"{linear.name}: features", linear.n if linear.is_column else linear.k, sharing)
    if strategy.is_grid:
        _check_heads(strategy, model)


def _check_heads(strategy: Strategy, model: Model) -> None:
    """Whether whole heads are exchanged, of each position of each rank's shard."""
    tp, kv = strategy.tp, model.num_query_groups
    check_divisible("seq", strategy.seq, strategy.ranks)
    check_divisible("query heads", model.num_attention_heads, tp)
    if kv % tp:
        raise ValueError(
            f"{kv} KV heads cannot be divided among {tp} tensor-parallel ranks; Megatron then gathers the product before it "
            f"exchanges, which is not planned"
        )
    error = heads_of(model, tp).error(strategy.cp, "qkv")
    if error is not None:
        raise ValueError(error)


def _what_fits(system: System, strategy: Strategy, model: Model) -> str:
    """The numbers of ranks on so many nodes that the sizes allow, in words; of both axes cp, beside this tp."""
    nodes, axis = strategy.nodes, "cp" if strategy.cp > 1 else "tp"
    other = strategy.tp if strategy.is_grid else 1
    found = [
        str(ranks // other)
        for ranks in range(nodes, nodes * system.gpus_per_node + 1, nodes)
        if ranks % other == 0 and _fits(replace(strategy, **{axis: ranks // other}), model)
    ]
    beside = f" beside --tp {strategy.tp}" if strategy.is_grid else ""
    across = f" with --nodes {nodes}" if nodes > 1 else ""
    return f"--{axis} {' or '.join(found)} fits{beside}{across}" if found else f"no --{axis} fits{beside}{across}"


def _fits(strategy: Strategy, model: Model) -> bool:
    try:
        _check_sizes(strategy, model)
    except ValueError:
        return False
    return True


def hints(system: System, strategy: Strategy, model: Model) -> list[str]:
    """What can be planned, but hardly be meant."""
    ranks, nodes, gpus, found = strategy.ranks, strategy.nodes, system.gpus_per_node, []
    if nodes > 1 and ranks <= gpus:
        found.append(
            f"{_asked(strategy)} fits in one node; --nodes {nodes} spreads it over {ranks // nodes} of {gpus} GPUs of "
            f"each of {nodes}. Without --nodes it is planned in one; the others are then for replicas or pipeline stages."
        )
    query, kv = model.num_attention_heads, model.num_query_groups
    if query % ranks or (kv % ranks and ranks % kv):
        found.append(
            f"{query} query heads and {kv} KV heads cannot be divided among {ranks} ranks. Megatron-Core refuses to build such a "
            f"model: the figures are those of its shapes alone."
        )
    return found


def _asked(strategy: Strategy) -> str:
    return f"--tp {strategy.tp} --cp {strategy.cp}" if strategy.is_grid else f"{_flag(strategy)} {strategy.ranks}"


def _flag(strategy: Strategy) -> str:
    if strategy.is_grid:
        return "--tp times --cp"
    return "--cp" if strategy.cp > 1 else "--tp"
