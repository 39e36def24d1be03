"""`overlap-train plan`: the table and JSON of a plan, or a check of its estimates against records."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ...flags import Parser, add_options, from_args, option
from ...select.cost import reach_of
from ...select.system import SYSTEMS
from ..measure.models import MODELS, TINY
from ..measure.results import aligned, cell
from . import check
from .prediction import METHODS, OUTPUT, Prediction, Strategy, predict, total

_DEFAULT = "h200"  # which was measured
_PLANNED = tuple(name for name in MODELS if name != TINY)
_ABOUT = "Says what overlap brings on a machine that need not be here, by an estimate. Nothing is run on a GPU."
_GAIN = (
    "gain: of these linears over collective, which is NCCL and cuBLAS without overlap. A whole step gains less: attention,\n"
    "norms and optimizer take as long as before."
)
_HEADINGS = ("linear", "pass", "M, N, K of a rank", "GEMM", "NCCL", *METHODS, "auto", "exposed", "auto takes", "gain")


@dataclass(frozen=True)
class Asked(Strategy):
    """What `plan` is told."""

    system: str = option(
        "", f"one of {', '.join(SYSTEMS)}; without it {_DEFAULT}, or the machine of each record", metavar="NAME"
    )
    model: str = option("llama3-8b", f"one of {', '.join(_PLANNED)}", choices=_PLANNED, metavar="NAME")
    json: str = option("", "write inputs and results to FILE, in microseconds", metavar="FILE")
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
    system, model = SYSTEMS[asked.system or _DEFAULT], MODELS[asked.model]
    filled = asked.nodes * system.gpus_per_node  # by one copy of the model; of one node, four GPUs
    usual = 1 if asked.cp > 1 else 4 if reach_of(asked.nodes).has_rules else filled
    s = replace(asked, tp=asked.tp or usual)
    predictions = predict(system, s, model)
    layer = [p for p in predictions if p.linear != OUTPUT]
    whole = [*layer * model.num_layers, *(p for p in predictions if p.linear == OUTPUT)]
    sums = [total("layer", d, [p for p in layer if p.direction == d]) for d in ("forward", "backward")]
    sums += [total("layer", "both", layer), total("model", "both", whole)]
    print(
        f"{asked.model} on {s.ranks} x {system.name} (tp {s.tp}, cp {s.cp}, nodes {s.nodes}), {s.rows} tokens, bf16. "
        "Estimated, not measured; times in ms.", "",
        *aligned([_HEADINGS, *map(_row, [*predictions, *sums])]), "", _GAIN, sep="\n",
    )  # fmt: skip
    if asked.json:
        document = {"system": asdict(system), "asked": asdict(s), "passes": [asdict(p) for p in [*predictions, *sums]]}
        try:
            Path(asked.json).write_text(json.dumps(document, indent=1) + "\n")
        except OSError as error:
            raise ValueError(f"--json {asked.json} cannot be written ({error.strerror}); name another file") from error
    return 0


def _row(p: Prediction) -> tuple[str, ...]:
    by_method = [p.by_method[name].us if name in p.by_method else None for name in METHODS]
    times = (p.gemm_us, p.nccl_us, *by_method, p.ours.us, p.exposed_us)
    in_ms = (cell(None if us is None else us / 1e3) for us in times)
    return p.linear, p.direction, ", ".join(map(str, p.sizes)), *in_ms, p.chosen if p.nccl_us else "-", f"{p.gain:.2f}"
