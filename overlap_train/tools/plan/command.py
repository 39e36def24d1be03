"""`overlap-train plan`: tables and JSON of a plan, or a check of its estimates against records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ...flags import Parser, add_options, from_args, option, positive_int
from ...select.cost import reach_of
from ...select.system import SYSTEMS, System
from ..measure.models import MODELS, TINY, Model
from ..measure.results import aligned, cell
from . import check
from .prediction import COLLECTIVE, METHODS, OUTPUT, Prediction, Strategy, Sum, in_layer, predict, total

_DEFAULT = "h200"  # which was measured
_PLANNED = {name: model for name, model in MODELS.items() if name != TINY}
_ABOUT = "Says what overlap brings on a machine that need not be here, by an estimate. Nothing is run on a GPU."
_GAIN = (
    "gain: of these linears over collective, which is NCCL and cuBLAS without overlap. A whole step gains less: attention,\n"
    "norms and optimizer take as long as before."
)
_SPANS = (1, 2, 4, 8)  # ranks of one node


@dataclass(frozen=True)
class Asked:
    """What `plan` is told."""

    system: str = option(
        "", f"one of {', '.join(SYSTEMS)}; without it {_DEFAULT}, or the machine of each record", metavar="NAME"
    )
    model: str = option("llama3-8b", f"one of {', '.join(_PLANNED)}, or a JSON file", metavar="NAME|FILE")
    tp: int | None = option(
        None, "tensor-parallel size; without it 4, with --cp 1, with --nodes all GPUs of the nodes", parse=positive_int
    )
    cp: int = option(1, "ranks that share the sequence (Ulysses)", parse=positive_int)
    nodes: int = option(1, "nodes that one group spans", parse=positive_int)
    seq: int = option(8192, "sequence length", parse=positive_int, metavar="TOKENS")
    micro_batch: int = option(1, "sequences in one forward call", parse=positive_int)
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
    if asked.system and asked.system not in SYSTEMS:
        raise ValueError(f"--system {asked.system}: it must be one of {', '.join(SYSTEMS)}")
    if asked.check:
        compared = [one for folder in asked.check for one in check.compare(Path(folder), SYSTEMS.get(asked.system))]
        print(*check.report(compared), sep="\n")
        return int(check.mean_error(compared) > check.MEAN)
    _plan(asked, SYSTEMS[asked.system or _DEFAULT], _read_model(asked.model))
    return 0


def _read_model(word: str) -> Model:
    """A model by its name, or from a JSON file, where "based_on" names the one whose fields its keys change."""
    if word in _PLANNED:
        return _PLANNED[word]
    if not word.endswith(".json"):
        raise ValueError(f"--model {word}: it must be one of {', '.join(_PLANNED)}, or a .json file")
    try:
        document = json.loads(Path(word).read_text())
        base = document.pop("based_on", None)
        return Model(**document) if base is None else replace(_PLANNED[base], **document)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as failure:
        raise ValueError(
            f"--model {word}: {type(failure).__name__}: {failure}; it must be a JSON object with the keys "
            f"{', '.join(Model.__dataclass_fields__)}, or based_on (one of {', '.join(_PLANNED)}) and those that differ"
        ) from failure


def _plan(asked: Asked, system: System, model: Model) -> None:
    filled = asked.nodes * system.gpus_per_node  # by one copy of the model; of one node, four GPUs
    usual = 1 if asked.cp > 1 else 4 if reach_of(asked.nodes).has_rules else filled
    s = Strategy(asked.tp or usual, asked.seq, asked.micro_batch, asked.nodes, asked.cp)
    predictions = predict(system, s, model)
    layer, output = in_layer(predictions), [p for p in predictions if p.linear == OUTPUT]
    whole, spans = [*layer * model.num_layers, *output], _spans(system, s, model)
    print(
        f"{Path(asked.model).stem} on {s.ranks} x {system.name} (tp {s.tp}, cp {s.cp}, nodes {s.nodes}), {s.rows} tokens, bf16. "
        "Estimated, not measured; times in ms.", "",
        *_linears_table(predictions, whole), "", _GAIN, "",
        "Other numbers of ranks, one layer forward and backward:", *_spans_table(spans), "",
        *_not_measured(system, s),
        sep="\n",
    )  # fmt: skip
    if asked.json:
        document = {
            "system": asdict(system), "strategy": asdict(s), "model": asdict(model), "unit": "us",
            "passes": [asdict(p) for p in predictions], "layer": asdict(total(layer)), "output": asdict(total(output)),
            "model_sum": asdict(total(whole)),
            "spans": [{"tp": span.tp, "cp": span.cp, "nodes": span.nodes, **asdict(of)} for span, of in spans.items()],
        }  # fmt: skip
        try:
            Path(asked.json).write_text(json.dumps(document, indent=1) + "\n")
        except OSError as error:
            raise ValueError(f"--json {asked.json} cannot be written ({error.strerror}); name another file") from error


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


def _linears_table(predictions: Sequence[Prediction], whole: Sequence[Prediction]) -> list[str]:
    """Every pass of every linear, then the sums of a layer, and of all layers with the output layer."""
    columns = (
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
    sums = [("layer", d, [p for p in layer if p.direction == d]) for d in ("forward", "backward")]
    sums += [("layer", "both", layer), ("model", "both", list(whole))]
    return aligned(
        [columns, *map(_row, predictions), *(_sum_row(name, what, total(some)) for name, what, some in sums)]
    )


def _row(p: Prediction) -> tuple[str, ...]:
    methods = [_ms(p.by_method[name].us) if name in p.by_method else "-" for name in METHODS]
    ours, without, bound = p.by_method[p.chosen].us, p.by_method[COLLECTIVE].us, max(p.gemm_us, p.nccl_us)
    times = (*map(_ms, (p.gemm_us, p.nccl_us, bound)), *methods, _ms(max(0.0, ours - p.gemm_us)))
    chosen = p.chosen if p.nccl_us else "-"
    return p.linear, p.direction, f"{p.m}, {p.n}, {p.k}", *times, chosen, f"{without / ours:.2f}"


def _sum_row(name: str, what: str, s: Sum) -> tuple[str, ...]:
    none = ["-"] * (len(METHODS) - 1)
    times = (_ms(s.gemm_us), _ms(s.nccl_us), "-", *none, _ms(s.without_us), _ms(s.exposed_us))
    return name, what, "", *times, f"{_ms(s.ours_us)} ms", f"{s.gain:.2f}"


def _spans_table(spans: dict[Strategy, Sum]) -> list[str]:
    """What each span pays: the layer, and the GPU time that it takes on all of its ranks together."""
    columns = ("tp", "cp", "nodes", "GEMMs", "NCCL alone", COLLECTIVE, "auto", "exposed", "gain", "GPU-ms of a layer")
    rows = []
    for span, s in spans.items():
        times = map(_ms, (s.gemm_us, s.nccl_us, s.without_us, s.ours_us, s.exposed_us))
        rows.append((*map(str, (span.tp, span.cp, span.nodes)), *times, f"{s.gain:.2f}", _ms(span.ranks * s.ours_us)))
    return aligned([columns, *rows])


def _not_measured(system: System, strategy: Strategy) -> list[str]:
    """What the figures of this plan do not rest on."""
    found = [
        "Not measured: attention, norms and optimizer; ranks that start at different times; NCCL with NVLink multicast"
    ]
    if not system.is_measured:
        found.append(f"- {system.name}: in proportion to the H200 by figures of its data sheet")
    if strategy.ranks not in (1, 2, 4):
        found.append("- links and NCCL with more than 4 ranks")
    if not reach_of(strategy.nodes).has_rules:
        found.append(
            "- networks between nodes: 14 us and 0.34 ms of host time a transfer, and the NICs of usual servers, are assumed"
        )
    return found


def _ms(us: float) -> str:
    return cell(us / 1e3)
