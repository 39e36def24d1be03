"""`overlap-train plan`: tables and JSON of a plan, or a check of its estimates against records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ...flags import Parser, add_options, from_args, option
from ...select.cost import reach_of
from ...select.system import SYSTEMS, System
from ..measure.models import MODELS, TINY, Model
from ..measure.results import aligned, cell
from . import check
from .prediction import METHODS, OUTPUT, Prediction, Strategy, in_layer, predict, total

_DEFAULT = "h200"  # which was measured
_PLANNED = {name: model for name, model in MODELS.items() if name != TINY}
_ABOUT = "Says what overlap brings on a machine that need not be here, by an estimate. Nothing is run on a GPU."
_GAIN = (
    "gain: of these linears over collective, which is NCCL and cuBLAS without overlap. A whole step gains less: attention,\n"
    "norms and optimizer take as long as before."
)
_SPANS = (1, 2, 4, 8)  # ranks of one node
_SUMS = ("GEMM", "NCCL", *METHODS, "auto", "exposed", "auto takes", "gain")


@dataclass(frozen=True)
class Asked(Strategy):
    """What `plan` is told."""

    system: str = option(
        "", f"one of {', '.join(SYSTEMS)}; without it {_DEFAULT}, or the machine of each record", metavar="NAME"
    )
    model: str = option("llama3-8b", f"one of {', '.join(_PLANNED)}, or a JSON file", metavar="NAME|FILE")
    json: str = option("", "write inputs and results to FILE", metavar="FILE")
    check: tuple[str, ...] = option(
        (), "instead, compare estimates with the records of overlap-train bench in these folders",
        parse=str, metavar="FOLDER", spaced=True,
    )  # fmt: skip


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
    try:
        document = json.loads(Path(word).read_text())
        base = document.pop("based_on", None)
        return Model(**document) if base is None else replace(_PLANNED[base], **document)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as failure:
        raise ValueError(
            f"--model {word}: {type(failure).__name__}: {failure}; it must be one of {', '.join(_PLANNED)}, or a file with a "
            f"JSON object: {', '.join(Model.__dataclass_fields__)}, or based_on (one of these names) and the keys that differ"
        ) from failure


def _plan(asked: Asked, system: System, model: Model) -> None:
    filled = asked.nodes * system.gpus_per_node  # by one copy of the model; of one node, four GPUs
    usual = 1 if asked.cp > 1 else 4 if reach_of(asked.nodes).has_rules else filled
    s = replace(asked, tp=asked.tp or usual)
    predictions = predict(system, s, model)
    layer = in_layer(predictions)
    whole = [*layer * model.num_layers, *(p for p in predictions if p.linear == OUTPUT)]
    sums = [("layer", d, "", [p for p in layer if p.direction == d]) for d in ("forward", "backward")]
    sums += [("layer", "both", "", layer), ("model", "both", "", whole)]
    passes = [(p.linear, p.direction, f"{p.m}, {p.n}, {p.k}", [p]) for p in predictions]
    spans = _spans(system, s, model)
    print(
        f"{Path(asked.model).stem} on {s.ranks} x {system.name} (tp {s.tp}, cp {s.cp}, nodes {s.nodes}), {s.rows} tokens, bf16. "
        "Estimated, not measured; times in ms.", "",
        *_table(("linear", "pass", "M, N, K of a rank"), [*passes, *sums]), "", _GAIN, "",
        "Other numbers of ranks, one layer forward and backward:",
        *_table(("tp", "cp", "nodes"), [(str(o.tp), str(o.cp), str(o.nodes), of) for o, of in spans.items()]),
        sep="\n",
    )  # fmt: skip
    if asked.json:
        document = {
            "system": asdict(system), "strategy": asdict(s), "model": asdict(model), "unit": "us",
            "passes": [asdict(p) for p in predictions], "layer": asdict(total(layer)), "model_sum": asdict(total(whole)),
            "spans": [{"tp": o.tp, "cp": o.cp, "nodes": o.nodes, **asdict(total(of))} for o, of in spans.items()],
        }  # fmt: skip
        try:
            Path(asked.json).write_text(json.dumps(document, indent=1) + "\n")
        except OSError as error:
            raise ValueError(f"--json {asked.json} cannot be written ({error.strerror}); name another file") from error


def _spans(system: System, s: Strategy, model: Model) -> dict[Strategy, list[Prediction]]:
    """A layer by other numbers of ranks, of Ulysses where this strategy has no tensor parallelism, that the model allows: inside
    a node, then across these nodes with as many ranks in each as here."""
    axis = "cp" if s.tp == 1 and s.cp > 1 else "tp"
    inside = [replace(s, **{axis: n}, nodes=1) for n in _SPANS]  # type: ignore[arg-type]
    found = {}
    for span in dict.fromkeys([*inside, s]):
        try:
            found[span] = in_layer(predict(system, span, model))
        except ValueError:
            continue  # more ranks than a node has, or sizes that cannot be shared by so many
    return found


def _table(names: Sequence[str], rows: Sequence[tuple[str, str, str, list[Prediction]]]) -> list[str]:
    """A row of sums for some predictions each."""
    cells = [(*names, *_SUMS)]
    for *heads, some in rows:
        s = total(some)
        by_method = [s.by_method.get(name) for name in METHODS]
        times = [None if us is None else us / 1e3 for us in (s.gemm_us, s.nccl_us, *by_method, s.ours_us, s.exposed_us)]
        chosen = some[0].chosen if len(some) == 1 and s.nccl_us else "-"
        cells.append((*heads, *map(cell, times), chosen, f"{s.gain:.2f}"))
    return aligned(cells)
