"""The tables that a plan prints, at most 120 characters wide, and the same as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...planning.cost import communication_sms, needed_sms
from ...planning.machines import System
from ...planning.sm_budget import MOST_SMS
from ..measure.models import Model
from ..measure.results import aligned, cell
from .estimates import COLLECTIVE, METHODS
from .fits import hints
from .inputs import EXCHANGED, OUTPUT, Strategy
from .prediction import Prediction, Sum, in_layer, total

HEADINGS = (
    "linear", "pass", "M, N, K of a rank", "GEMM", "NCCL", "bound", *METHODS, "exposed", "choose", "gain",
)  # fmt: skip
KEEP, NO_ENGINE = "no overlap", "-"
ACROSS_NODES = "-: not estimated. The kernels of direct send inside one node only."
ONE_QUEUE, MANY_QUEUES = "All streams share one hardware queue", "Each stream has a hardware queue of its own"
IN_PARTS = "The product of one part hides the all-to-all of another:"
APART = "so only TP is overlapped, and the all-to-all is NCCL's:"
HOST_IS_FITTED = (
    "host_exchange_us, the host's time across nodes: of calls over sockets, which took 0.6 to 2.2 times as long in three "
    "records"
)
MEASURED_RANKS = (1, 2, 4)
FEW_ROWS = 1024
# A tile takes the simulation about 15 microseconds. With twice as many, by two methods, three spans inside a node would take
# longer than 1,024 nodes do.
MOST_TILES = 1 << 16


@dataclass(frozen=True)
class SpanSum:
    """What a layer takes in one span. is_coarse: by chunked and collective alone; of the others too many tiles would be
    simulated."""

    layer: Sum
    is_coarse: bool = False


def linears_table(predictions: Sequence[Prediction], num_layers: int) -> list[str]:
    """Every pass of every linear, then the sums of a layer, and of all layers with the output layer."""
    rows = [_row(p) for p in predictions]
    layer = in_layer(predictions)
    for what, some in (
        *((d, [p for p in layer if p.direction == d]) for d in ("forward", "backward")),
        ("both", layer),
    ):
        rows.append(_sum_row("layer", what, total(some)))
    output = [p for p in predictions if p.linear == OUTPUT]
    rows.append(_sum_row("model", "both", total([*layer * num_layers, *output])))
    return aligned([HEADINGS, *rows])


def spans_table(spans: Mapping[Strategy, SpanSum], strategy: Strategy) -> list[str]:
    """What each span pays: the layer, and the GPU time that it takes on all of its ranks together."""
    across = ("nodes",) if strategy.nodes > 1 else ()
    figures = ("GEMMs", "NCCL alone", COLLECTIVE, "chosen", "exposed", "gain", "GPU-ms of a layer", "over the least")
    axes = ("tp", "cp") if strategy.is_grid else ("tp",) if strategy.cp == 1 else ("cp",)
    rows: list[tuple[str, ...]] = [(*axes, *across, *figures)]
    layers = {span: planned.layer for span, planned in spans.items()}
    least = min(span.ranks * layer.ours_us for span, layer in layers.items())
    for span, layer in layers.items():
        exposed = max(0.0, layer.ours_us - layer.gemm_us)
        times = (layer.gemm_us, layer.nccl_us, layer.without_us, layer.ours_us, exposed)
        paid, nodes = span.ranks * layer.ours_us, (str(span.nodes),) if across else ()
        gain = _gain(layer.without_us, layer.ours_us)
        sizes = (str(getattr(span, axis)) for axis in axes)
        rows.append((*sizes, *nodes, *map(_ms, times), gain, _ms(paid), f"{paid / least:.2f}"))
    return aligned(rows)


def axis_of(strategy: Strategy) -> str:
    """What the spans are of."""
    if strategy.is_grid:
        return "tensor parallelism (tp) and Ulysses (cp)"
    return "tensor parallelism" if strategy.cp == 1 else "Ulysses (cp)"


def divided_by(strategy: Strategy) -> str:
    """How the model is divided, where not by tensor parallelism alone."""
    if strategy.is_grid:
        return f" by tensor parallelism (tp {strategy.tp}) and Ulysses (cp {strategy.cp})"
    return f" by Ulysses (cp {strategy.cp})" if strategy.cp > 1 else ""


def notes(system: System, strategy: Strategy, predictions: Sequence[Prediction]) -> list[str]:
    """What has to be known to read the table of linears."""
    found: list[str] = []
    if strategy.is_grid:
        found += _of_two_groups(strategy, predictions)
    if strategy.overlap_nodes > 1:
        sms = node_sms(system, strategy)
        found += [
            ACROSS_NODES,
            f"Reckons with {sms['network_sms']} SMs for the network, and {sms['reduce_sms']} for sums of a node.",
            *_clamped(system, strategy, sms),
            f"{ONE_QUEUE if system.connections == 1 else MANY_QUEUES} (CUDA_DEVICE_MAX_CONNECTIONS={system.connections}).",
        ]
    return found


def _of_two_groups(strategy: Strategy, predictions: Sequence[Prediction]) -> list[str]:
    """Which projections hide their all-to-all under TP x Ulysses."""
    parts = {p.linear: p.parts for p in predictions if p.linear in EXCHANGED}
    hidden = ", ".join(f"{name} in {count} parts" for name, count in parts.items() if count > 1)
    apart = ", ".join(name for name, count in parts.items() if count == 1)
    why = "Ulysses' ranks are on several nodes" if strategy.cp_nodes > 1 else "Too short for parts"
    said = [f"{IN_PARTS} {hidden}."] if hidden else []
    if apart:
        said.append(f"{why}, {APART} {apart}.")
    return said


def not_measured(system: System, strategy: Strategy, spans: Mapping[Strategy, SpanSum]) -> list[str]:
    """What the figures of this plan do not rest on, or leave out. spans: all that are in it."""
    found = []
    if system.not_measured:
        found.append(f"{system.name}: scaled from the H200 by data sheets: {', '.join(system.not_measured)}")
    if system.assumed:
        found.append(f"{system.name}: assumed from another card of its family: {', '.join(system.assumed)}")
    others = map(str, sorted({span.ranks for span in spans}.difference(MEASURED_RANKS)))
    if names := ", ".join(others):
        found.append(f"{names} ranks: links and NCCL were measured with 2 and 4 GPUs")
    if strategy.nodes > 1:
        found += _not_measured_across_nodes(system)
    if coarse := ", ".join(dict.fromkeys(str(span.ranks) for span, planned in spans.items() if planned.is_coarse)):
        axis = "--tp and --cp" if strategy.is_grid else "--tp" if strategy.cp == 1 else "--cp"
        found.append(
            f"spans of {coarse} ranks by fused and direct: more than {MOST_TILES:,} tiles of a rank are not simulated one by one "
            f"in a plan across nodes; a plan by {axis} without --nodes has them"
        )
    if strategy.cp > 1:
        found.append(
            "the all-to-all operators: compared with runs of 2 H200, 4 % off in the mean, and of 4 H100, 11 % off. That torch "
            "orders rows by an index as slowly as it copies blocks that lie apart is assumed"
        )
    if strategy.is_grid:
        found.append(
            "TP x Ulysses: training steps were timed on GPUs, no passes. Here copies of both groups share NVLink, but not "
            "with stores of direct"
        )
    if strategy.rows < FEW_ROWS:
        found.append(f"{strategy.rows} rows: below {FEW_ROWS} the host decides, and it differs from machine to machine")
    return [
        *found,
        "NCCL with NVLink multicast, which may be faster",
        "ranks that start at different times; attention, norms and optimizer, which are no part of the plan",
    ]


def _not_measured_across_nodes(system: System) -> list[str]:
    assumed = system.network_not_measured
    return [
        *([f"across nodes: {', '.join(assumed)} of {system.name}"] if assumed else []),
        *([HOST_IS_FITTED] if "host_exchange_us" in assumed else []),
        "nodes of several GPUs: sums beside products, copies passed on: compared with 16 passes of two nodes of two GPUs alone",
        "NCCL across nodes: a flat ring as fast as its slowest link, as its own model has it; no sums in switches",
    ]


def node_sms(system: System, strategy: Strategy) -> dict[str, int]:
    """SMs that products leave to NCCL, and a scatter's also to sums of a node."""
    network, sums = communication_sms(system, strategy.overlap_local)
    return {"network_sms": network, "reduce_sms": sums if strategy.tp > 1 else 0}


def _clamped(system: System, strategy: Strategy, sms: dict[str, int]) -> list[str]:
    """A line where these are fewer than the NIC needs."""
    network, sums = needed_sms(system, strategy.overlap_local)
    if sms["network_sms"] >= network and (sms["reduce_sms"] >= sums or strategy.tp == 1):
        return []
    return [f"The NIC needs {network} and {sums}; communication holds {MOST_SMS} SMs at most."]


def document(
    system: System, strategy: Strategy, model: Model, predictions: Sequence[Prediction],
    spans: Mapping[Strategy, SpanSum],
) -> dict[str, Any]:  # fmt: skip
    """All of it as JSON: inputs, passes, sums, spans; times in microseconds."""
    layer, output = in_layer(predictions), [p for p in predictions if p.linear == OUTPUT]
    return {
        "system": asdict(system), "strategy": asdict(strategy), "model": asdict(model), "unit": "us",
        "passes": [_entry(p) for p in predictions],
        "layer": asdict(total(layer)), "output": asdict(total(output)),
        "model_sum": asdict(total([*layer * model.num_layers, *output])),
        **(node_sms(system, strategy) if strategy.overlap_nodes > 1 else {}),
        "spans": [
            {"tp": span.tp, "cp": span.cp, "nodes": span.nodes, **asdict(planned.layer), "is_coarse": planned.is_coarse}
            for span, planned in spans.items()
        ],
        "notes": hints(system, strategy, model), "not_measured": not_measured(system, strategy, spans),
    }  # fmt: skip


def _entry(p: Prediction) -> dict[str, Any]:
    methods = {
        name: {"us": e.us, "device_us": e.device_us, "host_us": e.host_us, "variant": e.variant}
        for name, e in p.by_method.items()
    }
    return {
        "linear": p.linear, "pass": p.direction, "m": p.m, "n": p.n, "k": p.k, "gemm_us": p.gemm_us, "nccl_us": p.nccl_us,
        "bound_us": p.bound_us, "methods": methods, "chosen": p.chosen.method, "exposed_us": p.exposed_us, "parts": p.parts,
    }  # fmt: skip


def _row(p: Prediction) -> tuple[str, ...]:
    shape = f"{p.m}, {p.n}, {p.k}"
    methods = [_ms(p.by_method[name].us) if name in p.by_method else NO_ENGINE for name in METHODS]
    times = [*map(_ms, (p.gemm_us, p.nccl_us, p.bound_us)), *methods, _ms(p.exposed_us)]
    chosen = KEEP if p.chosen.method == COLLECTIVE else p.chosen.method
    if not p.nccl_us:
        chosen = "-"  # nothing to hide
    return p.linear, p.direction, shape, *times, chosen, _gain(p.by_method[COLLECTIVE].us, p.chosen.us)


def _sum_row(name: str, what: str, s: Sum) -> tuple[str, ...]:
    none = ["-"] * (len(METHODS) - 1)
    exposed = max(0.0, s.ours_us - s.gemm_us)
    chosen = f"{_ms(s.ours_us)} ms"
    gain = _gain(s.without_us, s.ours_us)
    return name, what, "", _ms(s.gemm_us), _ms(s.nccl_us), "-", *none, _ms(s.without_us), _ms(exposed), chosen, gain


def _ms(us: float) -> str:
    return cell(us / 1e3)


def _gain(without_us: float, ours_us: float) -> str:
    return f"{without_us / ours_us:.2f}" if ours_us else "-"
