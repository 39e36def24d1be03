"""`overlap-train plan`: tables, JSON, trace and picture of a plan, or a check of the planner against records."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from textwrap import wrap

from ...flags import Parser, add_options, from_args, option, positive_int
from ...planning.machines import SYSTEMS, System
from ..measure.models import Model
from . import check, picture, tables, trace
from .estimates import BY_LIBRARY, METHODS
from .fits import hints
from .inputs import PLANNED_MODELS, STRATEGIES, Strategy, read_model, read_strategy, read_system
from .prediction import Prediction, count_tiles, in_layer, predict, total
from .records import machine_of
from .tables import MOST_TILES, SpanSum

WIDTH = 120  # of what is printed
DEFAULT = "h200"  # which the planner was fitted to
GAIN = (
    "gain: of these linears over collective, which is NCCL and cuBLAS without our overlap. A whole step gains less: attention, "
    "norms and optimizer take as long as before."
)
SPANS = (1, 2, 4, 8)  # of tensor parallelism
ABOUT = "Says what overlap brings on a machine that need not be here, by simulating it. Nothing is run on a GPU."


@dataclass(frozen=True)
class Asked:
    """What `plan` is told. tp, cp, nodes, seq, micro_batch: in place of those of the strategy."""

    system: str = option(
        "",
        f"one of {', '.join(SYSTEMS)}, or a JSON file; without it {DEFAULT}, and with --check the machine of each record",
        metavar="NAME|FILE",
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
        None,
        "nodes that one group spans; without --tp and --cp it takes all their GPUs",
        parse=positive_int,
        metavar="N",
    )
    seq: int | None = option(None, "sequence length", parse=positive_int, metavar="TOKENS")
    micro_batch: int | None = option(None, "sequences in one forward call", parse=positive_int, metavar="N")
    json: str = option("", "write inputs and results to FILE", metavar="FILE")
    trace: str = option("", "write a Chrome trace to FILE", metavar="FILE")
    plot: str = option(
        "", "draw a timeline, or with --check planned against measured times (matplotlib)", metavar="FILE"
    )
    check: tuple[str, ...] = option(
        (),
        "instead, compare what is planned with the records of overlap-train bench in these folders",
        parse=str,
        metavar="FOLDER",
        spaced=True,
    )


def main(arguments: list[str]) -> int:
    """Run the command. Exit status: 0; with --check 1 where the mean error is above 5 %.

    Raises:
        ValueError: wrong arguments or files, or what cannot be planned.
    """
    parser = Parser("overlap-train plan", description=ABOUT)
    add_options(parser, Asked)
    asked = from_args(Asked(), parser.parse_args(arguments))
    return _check(asked) if asked.check else _plan(asked, read_system(asked.system or DEFAULT))


def _plan(asked: Asked, system: System) -> int:
    for name in ("json", "trace", "plot"):
        folder = Path(getattr(asked, name) or ".").parent
        if not folder.is_dir():
            raise ValueError(
                f"--{name} {getattr(asked, name)}: there is no folder {folder}; make it, or name another file"
            )
    model = read_model(asked.model)
    strategy = _strategy(asked, system)
    with _seldom_collected():
        predictions = predict(system, strategy, model)
        spans = spans_of(system, strategy, model, predictions)
    print(*_lines(asked, system, strategy, model, predictions, spans), sep="\n")
    if asked.json:
        document = tables.document(system, strategy, model, predictions, spans)
        Path(asked.json).write_text(json.dumps(document, indent=1) + "\n")
    if asked.trace:
        trace.write_trace(Path(asked.trace), predictions)
    if asked.plot:
        print(picture.draw_timeline(predictions, system, strategy, Path(asked.plot)))
    return 0


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Bracket in which Python looks for unreachable objects a hundred times more seldom. Timelines are many small objects that
    stay: on 1,024 nodes of 8 it spent a third of the time looking at them."""
    first, *others = gc.get_threshold()
    gc.set_threshold(100 * first, *others)
    try:
        yield
    finally:
        gc.set_threshold(first, *others)


def _strategy(asked: Asked, system: System) -> Strategy:
    given = {name: getattr(asked, name) for name in ("tp", "cp", "nodes", "seq", "micro_batch")}
    named = replace(read_strategy(asked.strategy), **{name: value for name, value in given.items() if value})
    if asked.tp:
        return named
    if asked.cp and asked.cp > 1:
        return replace(named, tp=1)
    fills = asked.nodes and asked.nodes > 1 and named.cp == 1 and asked.strategy in STRATEGIES
    return replace(named, tp=named.nodes * system.gpus_per_node) if fills else named


def spans_of(system: System, strategy: Strategy, model: Model, here: Sequence[Prediction]) -> dict[Strategy, SpanSum]:
    """What a layer takes in all spans of tensor parallelism, of Ulysses, or of both, that this model and machine allow: inside a
    node, then across nodes with as many ranks in each as here."""
    found: dict[Strategy, SpanSum] = {}
    for span in _spans(strategy):
        coarse = strategy.nodes > 1 == span.nodes and count_tiles(span, model) > MOST_TILES
        try:
            predictions = here if span == strategy else predict(system, span, model, BY_LIBRARY if coarse else METHODS)
        except ValueError:
            continue  # sizes that cannot be shared by so many ranks
        found[span] = SpanSum(total(in_layer(predictions)), coarse)
    return found


def _spans(strategy: Strategy) -> list[Strategy]:
    local = strategy.local
    doubled = [1 << power for power in range(1, strategy.nodes.bit_length()) if 1 << power < strategy.nodes]
    across = [*doubled, strategy.nodes] if strategy.nodes > 1 else []
    sizes = [*((ranks, 1) for ranks in SPANS), *((local * nodes, nodes) for nodes in across)]
    if strategy.is_grid:
        return [span for ranks, nodes in sizes for span in _divided(strategy, ranks, nodes)]
    axis = "tp" if strategy.cp == 1 else "cp"
    return [replace(strategy, **{axis: ranks}, nodes=nodes) for ranks, nodes in sizes]


def _divided(strategy: Strategy, ranks: int, nodes: int) -> list[Strategy]:
    """So many ranks divided between tensor parallelism and Ulysses, most for the former first; this strategy's tp among them."""
    tensor = sorted({tp for tp in (*SPANS, strategy.tp) if ranks % tp == 0}, reverse=True)
    return [replace(strategy, tp=tp, cp=ranks // tp, nodes=nodes) for tp in tensor]


def _lines(
    asked: Asked, system: System, strategy: Strategy, model: Model, predictions: Sequence[Prediction],
    spans: Mapping[Strategy, SpanSum],
) -> list[str]:  # fmt: skip
    tokens = f"{strategy.rows} tokens"
    machine = f"{strategy.ranks} x {system.name}{tables.divided_by(strategy)}"
    machine += f" on {strategy.nodes} nodes" if strategy.nodes > 1 else ""
    below = [line for note in tables.notes(system, strategy, predictions) for line in wrap(note, WIDTH)]
    below = ["", *below] if below else []
    bullets = (
        wrap(f"- {text}", WIDTH, subsequent_indent="  ") for text in tables.not_measured(system, strategy, spans)
    )
    notes = (wrap(f"Note: {hint}", WIDTH) for hint in hints(system, strategy, model))
    title = f"{Path(asked.model).stem} on {machine}, {tokens}, bf16. Planned, not measured; times in ms."
    return [
        *wrap(title, WIDTH), *chain.from_iterable(notes), "", *tables.linears_table(predictions, model.num_layers),
        "", *wrap(GAIN, WIDTH), *below,
        "", f"Spans of {tables.axis_of(strategy)}, one layer forward and backward:", *tables.spans_table(spans, strategy),
        "", "Not measured:", *chain.from_iterable(bullets),
    ]  # fmt: skip


def _check(asked: Asked) -> int:
    folders = [Path(folder) for folder in asked.check]
    systems = {one: read_system(asked.system or machine_of(one, SYSTEMS) or DEFAULT) for one in folders}
    operators = [one for folder, system in systems.items() for one in check.compare(folder, system)]
    layers = [one for folder, system in systems.items() for one in check.compare_layers(folder, system)]
    error = check.mean_error([one for one in operators if one.is_method] or layers)
    print(*check.report(operators, layers), sep="\n")
    if asked.plot:
        print(picture.draw_check(operators or layers, Path(asked.plot)))
    return 1 if error > check.MEAN else 0
