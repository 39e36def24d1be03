"""What a plan is made for: a system, a strategy and a model, each by name, the latter two also from a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...select.system import SYSTEMS, System
from ..measure.cases import check_divisible
from ..measure.models import MODELS, TINY, Model

Kind = TypeVar("Kind", "Strategy", Model)
OUTPUT = "output"
EXCHANGED = ("qkv", "proj")  # the linears beside Ulysses' all-to-alls
_VOCAB_MULTIPLE = 128  # Megatron-Core pads the vocabulary to a multiple of this times the ranks


@dataclass(frozen=True)
class Strategy:
    """How a model is spread, and what goes through it at once. cp: ranks that share the sequence, as Ulysses does. nodes: that
    the ranks of one copy of the model are on, as many on each; tensor-parallel ranks follow each other."""

    tp: int = 4
    seq: int = 8192
    micro_batch: int = 1
    nodes: int = 1
    cp: int = 1

    @property
    def rows(self) -> int:
        """M of all linears."""
        return self.seq * self.micro_batch

    @property
    def ranks(self) -> int:
        """GPUs of one copy of the model."""
        return self.tp * self.cp

    @property
    def local(self) -> int:
        """Ranks of one node."""
        return self.ranks // self.nodes

    @property
    def tp_nodes(self) -> int:
        """Nodes that a tensor-parallel group spans."""
        return max(1, self.tp // self.local)

    @property
    def cp_nodes(self) -> int:
        """Nodes that a group of Ulysses spans."""
        return self.nodes if self.tp_nodes == 1 else self.cp


@dataclass(frozen=True)
class Linear:
    """A linear of the model: its whole weight [n, k]. is_column: sharded along n, gathers its input; else along k, scatters."""

    name: str
    n: int
    k: int
    is_column: bool


STRATEGIES = {f"tp{tp}": Strategy(tp) for tp in (1, 2, 4, 8)} | {f"cp{cp}": Strategy(1, cp=cp) for cp in (2, 4, 8)}
PLANNED_MODELS = {name: model for name, model in MODELS.items() if name != TINY}


def linears_of(model: Model, tp: int) -> list[Linear]:
    """The linears of one layer, then the output layer if the vocabulary is known."""
    found = [Linear(name, *model.linears[name], name in ("qkv", "fc1")) for name in ("qkv", "proj", "fc1", "fc2")]
    if model.vocab_size:
        step = _VOCAB_MULTIPLE * tp
        found.append(Linear(OUTPUT, -(-model.vocab_size // step) * step, model.hidden_size, True))
    return found


def read_system(word: str) -> System:
    """Raises ValueError for an unknown name."""
    if word not in SYSTEMS:
        raise ValueError(f"--system {word}: it must be one of {', '.join(SYSTEMS)}")
    return SYSTEMS[word]


def read_strategy(word: str) -> Strategy:
    return _read(word, "strategy", Strategy, STRATEGIES)


def read_model(word: str) -> Model:
    return _read(word, "model", Model, PLANNED_MODELS)


def _read(word: str, what: str, kind: type[Kind], named: Mapping[str, Kind]) -> Kind:
    """What a flag's word stands for: a name, or a JSON file where "based_on" names what its keys change. Raises ValueError."""
    if word in named:
        return named[word]
    path = Path(word)
    if path.suffix != ".json":
        raise ValueError(f"--{what} {word}: it must be one of {', '.join(named)}, or a .json file")
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        base = document.pop("based_on", None)
        return kind(**({} if base is None else asdict(named[base])) | document)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as failure:
        fields = ", ".join(kind.__dataclass_fields__)
        raise ValueError(
            f"--{what} {path}: {type(failure).__name__}: {failure}; it must be a JSON object with the keys {fields}, or based_on "
            f"(one of {', '.join(named)}) and those that differ"
        ) from failure


def check(system: System, strategy: Strategy, model: Model) -> None:
    """Raises ValueError for what cannot be planned: ranks that do not fill the nodes, or sizes that so many cannot share."""
    ranks, nodes = strategy.ranks, strategy.nodes
    asked = f"{ranks} ranks on {nodes} nodes"
    if ranks % nodes or strategy.local > system.gpus_per_node:
        raise ValueError(
            f"{asked}: each node must have as many, and at most {system.gpus_per_node}; set --nodes, or --tp and --cp"
        )
    if strategy.local % strategy.tp and strategy.tp % strategy.local:
        raise ValueError(f"{asked}: --tp must be a divisor or a multiple of the {strategy.local} ranks of a node")
    check_divisible("seq times micro_batch", strategy.rows, ranks)
    for linear in linears_of(model, strategy.tp):
        sharing = strategy.cp if linear.name in EXCHANGED and strategy.tp == 1 else strategy.tp
        check_divisible(f"{linear.name}: features", linear.n if linear.is_column else linear.k, sharing)
