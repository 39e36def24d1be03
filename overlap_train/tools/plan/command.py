"""`overlap-train plan`: tables and JSON of a plan, or a check of its estimates against records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...flags import Parser, add_options, from_args, option, positive_int
from ...select.system import SYSTEMS, System
from ..measure.models import Model
from ..measure.results import aligned, cell
from . import check
from .inputs import OUTPUT, PLANNED_MODELS, STRATEGIES, Strategy, read_model, read_strategy, read_system
from .prediction import BACKWARD, COLLECTIVE, FORWARD, METHODS, Prediction, Sum, in_layer, predict, total

_DEFAULT = "h200"  # which was measured
_ABOUT = "Says what overlap brings on a machine that need not be here, by an estimate. Nothing is run on a GPU."
_GAIN = (
    "gain: of these linears over collective, which is NCCL and cuBLAS without overlap. A whole step gains less: attention,\n"
    "norms and optimizer take as long as before."
)
_SPANS = (1, 2, 4, 8)  # ranks of one node


@dataclass(frozen=True)
class Asked:
    """What `plan` is told. tp, cp, nodes, seq, micro_batch: in place of those of the strategy."""

    system: str = option(
        "", f"one of {', '.join(SYSTEMS)}; without it {_DEFAULT}, or the machine of each record", metavar="NAME"
    )
    strategy: str = option(
        "tp4",
        f"what the five flags below replace: one of {', '.join(STRATEGIES)} (8192 tokens), or a JSON file",
        metavar="NAME|FILE",
    )
    model: str = option("llama3-8b", f"one of {', '.join(PLANNED_MODELS)}, or a JSON file", metavar="NAME|FILE")
    tp: int | None = option(None, "tensor-parallel size", parse=positive_int, metavar="N")
    cp: int | None = option(None, "ranks that share the sequence (Ulysses)", parse=positive_int, metavar="N")
    nodes: int | None = option(
        None, "nodes that one group spans; without --tp and --cp it takes all their GPUs", parse=positive_int, metavar="N"
    )  # fmt: skip
    seq: int | None = option(None, "sequence length", parse=positive_int, metavar="TOKENS")
    micro_batch: int | None = option(None, "sequences in one forward call", parse=positive_int, metavar="N")
    json: str = option("", "write inputs and results to FILE", metavar="FILE")
    check: tuple[str, ...] = option(
        (),
        "instead, compare estimates with the records of overlap-train bench in these folders",
        parse=str,
        metavar="FOLDER",
        spaced=True,
    )


def main(arguments: list[str]) -> int:
    """Run the command. Exit status: 0; with --check 1 where the mean error is above 12 %.

    Raises:
        ValueError: wrong arguments or files, or what cannot be planned.
    """
    parser = Parser("overlap-train plan", description=_ABOUT)
    add_options(parser, Asked)
    asked = from_args(Asked(), parser.parse_args(arguments))
    if asked.check:
        system = read_system(asked.system) if asked.system else None
        compared = [one for folder in asked.check for one in check.compare(Path(folder), system)]
        print(*check.report(compared), sep="\n")
        return int(check.mean_error(compared) > check.MEAN)
    _plan(asked, read_system(asked.system or _DEFAULT), read_model(asked.model))
    return 0


def _plan(asked: Asked, system: System, model: Model) -> None:
    strategy = _strategy(asked, system)
    predictions = predict(system, strategy, model)
    spans = _spans(system, strategy, model)
    ranks = f"{strategy.ranks} x {system.name} (tp {strategy.tp}, cp {strategy.cp}, nodes {strategy.nodes})"
    print(
        f"{Path(asked.model).stem} on {ranks}, {strategy.rows} tokens, bf16. Estimated, not measured; times in ms.", "",
        *_linears_table(predictions, model.num_layers), "", _GAIN, "",
        "Other numbers of ranks, one layer forward and backward:", *_spans_table(spans), "",
        *_not_measured(system, strategy),
        sep="\n",
    )  # fmt: skip
    if asked.json:
        document = _document(system, strategy, model, predictions, spans)
        try:
            Path(asked.json).write_text(json.dumps(document, indent=1) + "\n")
        except OSError as error:
            raise ValueError(f"--json {asked.json} cannot be written ({error.strerror}); name another file") from error


def _strategy(asked: Asked, system: System) -> Strategy:
    given = {name: getattr(asked, name) for name in ("tp", "cp", "nodes", "seq", "micro_batch")}
    named = replace(read_strategy(asked.strategy), **{name: value for name, value in given.items() if value})
    if asked.tp:
        return named
    if asked.cp and asked.cp > 1:
        return replace(named, tp=1)
    fills = asked.nodes and asked.nodes > 1 and named.cp == 1 and asked.strategy in STRATEGIES
    return replace(named, tp=named.nodes * system.gpus_per_node) if fills else named


def _spans(system: System, strategy: Strategy, model: Model) -> dict[Strategy, Sum]:
    """What a layer takes by other numbers of ranks, of Ulysses where this strategy has no tensor parallelism, that the model
    allows: inside a node, then across these nodes with as many ranks in each as here."""
    axis = "cp" if strategy.tp == 1 and strategy.cp > 1 else "tp"
    other = strategy.ranks // getattr(strategy, axis)
    inside = [replace(strategy, **{axis: n}, nodes=1) for n in _SPANS if n * other <= system.gpus_per_node]
    found = {}
    for span in dict.fromkeys([*inside, strategy]):
        try:
            found[span] = total(in_layer(predict(system, span, model)))
        except ValueError:
            continue  # sizes that cannot be shared by so many ranks
    return found


def _linears_table(predictions: Sequence[Prediction], num_layers: int) -> list[str]:
    """Every pass of every linear, then the sums of a layer, and of all layers with the output layer."""
    headings = (
        "linear",
        "pass",
        "M, N, K of a rank",
        "GEMM",
        "NCCL",
        "bound",
        *METHODS,
        "exposed",
        "auto takes",
        "gain",
    )
    layer = in_layer(predictions)
    output = [p for p in predictions if p.linear == OUTPUT]
    sums = [("layer", d, [p for p in layer if p.direction == d]) for d in (FORWARD, BACKWARD)]
    sums += [("layer", "both", layer), ("model", "both", [*layer * num_layers, *output])]
    rows = [_row(p) for p in predictions] + [_sum_row(name, what, total(some)) for name, what, some in sums]
    return aligned([headings, *rows])


def _row(p: Prediction) -> tuple[str, ...]:
    methods = [_ms(p.by_method[name].us) if name in p.by_method else "-" for name in METHODS]
    ours, without = p.by_method[p.chosen].us, p.by_method[COLLECTIVE].us
    times = [*map(_ms, (p.gemm_us, p.nccl_us, p.bound_us)), *methods, _ms(max(0.0, ours - p.gemm_us))]
    return (
        p.linear,
        p.direction,
        f"{p.m}, {p.n}, {p.k}",
        *times,
        p.chosen if p.nccl_us else "-",
        f"{without / ours:.2f}",
    )


def _sum_row(name: str, what: str, s: Sum) -> tuple[str, ...]:
    none = ["-"] * (len(METHODS) - 1)
    times = (_ms(s.gemm_us), _ms(s.nccl_us), "-", *none, _ms(s.without_us), _ms(s.exposed_us))
    return name, what, "", *times, f"{_ms(s.ours_us)} ms", f"{s.gain:.2f}"


def _spans_table(spans: dict[Strategy, Sum]) -> list[str]:
    """What each span pays: the layer, and the GPU time that it takes on all of its ranks together."""
    headings = ("tp", "cp", "nodes", "GEMMs", "NCCL alone", COLLECTIVE, "auto", "exposed", "gain", "GPU-ms of a layer")
    rows = [
        (
            str(span.tp), str(span.cp), str(span.nodes),
            *map(_ms, (s.gemm_us, s.nccl_us, s.without_us, s.ours_us, s.exposed_us)), f"{s.gain:.2f}", _ms(span.ranks *
            s.ours_us),
        )
        for span, s in spans.items()
    ]  # fmt: skip
    return aligned([headings, *rows])


def _not_measured(system: System, strategy: Strategy) -> list[str]:
    """What the figures of this plan do not rest on."""
    found = [
        "Not measured: attention, norms and optimizer; ranks that start at different times; NCCL with NVLink multicast"
    ]
    if not system.is_measured:
        found.append(f"- {system.name}: in proportion to the H200 by figures of its data sheet")
    if strategy.ranks not in (1, 2, 4):
        found.append("- links and NCCL with more than 4 ranks")
    if strategy.nodes > 1:
        found.append(
            "- networks between nodes: 14 us and 0.34 ms of host time a transfer, and the NICs of usual servers, are assumed"
        )
    return found


def _document(
    system: System, strategy: Strategy, model: Model, predictions: Sequence[Prediction], spans: dict[Strategy, Sum]
) -> dict[str, Any]:  # fmt: skip
    """All of it as JSON: inputs, passes, sums, spans; times in microseconds."""
    layer, output = in_layer(predictions), [p for p in predictions if p.linear == OUTPUT]
    return {
        "system": asdict(system), "strategy": asdict(strategy), "model": asdict(model), "unit": "us",
        "passes": [asdict(p) for p in predictions], "layer": asdict(total(layer)), "output": asdict(total(output)),
        "model_sum": asdict(total([*layer * model.num_layers, *output])),
        "spans": [{"tp": span.tp, "cp": span.cp, "nodes": span.nodes, **asdict(s)} for span, s in spans.items()],
    }  # fmt: skip


def _ms(us: float) -> str:
    return cell(us / 1e3)
