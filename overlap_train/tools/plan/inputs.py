"""What a plan is made for: a system, a strategy and a model, each by name or from a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from ...planning.machines import SYSTEMS, System
from ...ulysses.layout import AttentionHeads
from ..measure.models import MODELS, TINY, Model

Kind = TypeVar("Kind", System, "Strategy", Model)
OUTPUT = "output"
EXCHANGED = ("qkv", "proj")  # the linears beside Ulysses' all-to-alls
VOCAB_MULTIPLE = 128  # Megatron-Core pads the vocabulary to a multiple of this times the ranks


@dataclass(frozen=True)
class Strategy:
    """How a model is spread, and what goes through it at once. cp: ranks that share the sequence, as Ulysses does.
    nodes: that a group spans."""

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
    def is_grid(self) -> bool:
        """Whether both divide it: an attention's projections communicate in two groups."""
        return self.tp > 1 and self.cp > 1

    @property
    def local(self) -> int:
        """Ranks of one node."""
        return self.ranks // self.nodes

    @property
    def tp_nodes(self) -> int:
        """Nodes that a tensor-parallel group spans. Its ranks follow each other."""
        return max(1, self.tp // self.local)

    @property
    def cp_nodes(self) -> int:
        """Nodes that a group of Ulysses spans."""
        return self.nodes if self.tp_nodes == 1 else self.cp

    @property
    def overlap_nodes(self) -> int:
        """Nodes that the group spans in which linears overlap."""
        return self.tp_nodes if self.tp > 1 else self.cp_nodes

    @property
    def overlap_local(self) -> int:
        """Ranks of that group in one node."""
        return (self.tp if self.tp > 1 else self.cp) // self.overlap_nodes


STRATEGIES = {f"tp{tp}": Strategy(tp) for tp in (1, 2, 4, 8)} | {f"cp{cp}": Strategy(1, cp=cp) for cp in (2, 4, 8)}
PLANNED_MODELS = {name: model for name, model in MODELS.items() if name != TINY}


@dataclass(frozen=True)
class Linear:
    """A linear of the model: its whole weight [n, k]. is_column: sharded along n, gathers its input; else along k, scatters."""

    name: str
    n: int
    k: int
    is_column: bool


def read_system(word: str) -> System:
    return _read(word, "system", System, SYSTEMS)


def read_strategy(word: str) -> Strategy:
    return _read(word, "strategy", Strategy, STRATEGIES)


def read_model(word: str) -> Model:
    return _read(word, "model", Model, PLANNED_MODELS)


def linears_of(model: Model, tp: int) -> list[Linear]:
    """The linears of one layer, then the output layer if the vocabulary is known."""
    found = [Linear(name, *model.linears[name], name in ("qkv", "fc1")) for name in ("qkv", "proj", "fc1", "fc2")]
    if model.vocab_size:
        step = VOCAB_MULTIPLE * tp
        found.append(Linear(OUTPUT, -(-model.vocab_size // step) * step, model.hidden_size, True))
    return found


def heads_of(model: Model, tp: int) -> AttentionHeads:
    """The heads of a tensor-parallel rank."""
    return AttentionHeads(model.num_attention_heads // tp, model.num_query_groups // tp, model.head_width)


def _read(word: str, what: str, kind: type[Kind], named: Mapping[str, Kind]) -> Kind:
    """What a flag's word stands for: a name, or a JSON file where "based_on" names what its keys change. Raises ValueError."""
    if word in named:
        return named[word]
    path = Path(word)
    if path.suffix != ".json":
        raise ValueError(f"--{what} {word}: it must be one of {', '.join(named)}, or a .json file")
    document = _object(path)
    base = document.pop("based_on", None)
    if base is not None and base not in named:
        raise ValueError(f"{path}: based_on is {base!r}; it must be one of {', '.join(named)}")
    values = {} if base is None else asdict(named[base])
    for name, value in document.items():
        values[name] = _value(path, what, kind, name, value)
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in values]
    if missing:
        raise ValueError(f"{path}: {', '.join(missing)} missing in the {what}; add them, or based_on with a name")
    return kind(**values)


def _object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as failure:
        raise ValueError(f"{path} cannot be read ({failure}); it must be a JSON file that can be opened") from failure
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds a {type(document).__name__}; it must hold one JSON object")
    return document


def _value(path: Path, what: str, kind: type[Any], name: str, value: Any) -> Any:
    """The value of a key as its field has it: text, true or false, numbers above 0 (0 where that is the default), lists."""
    known = {f.name: f for f in fields(kind)}
    if name not in known:
        raise ValueError(f"{path}: unknown key {name!r} in the {what}; known are {', '.join(known)}, based_on")
    wanted = str(known[name].type)
    if wanted == "str":
        right = isinstance(value, str)
    elif wanted == "bool":
        right = isinstance(value, bool)
    elif wanted.startswith("tuple"):
        right, value = isinstance(value, list | tuple), tuple(value) if isinstance(value, list | tuple) else value
    else:
        number = isinstance(value, int) or (wanted == "float" and isinstance(value, float))
        least_is_0 = known[name].default == 0
        right = number and not isinstance(value, bool) and (value > 0 or (least_is_0 and value == 0))
    if not right:
        rule = (
            f"a {wanted}"
            if wanted in ("str", "bool")
            else "a list"
            if wanted.startswith("tuple")
            else f"{wanted} above 0"
        )
        raise ValueError(f"{path}: {name} is {value!r}; it must be {rule}")
    return value
