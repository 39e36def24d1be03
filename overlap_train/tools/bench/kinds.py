"""The benchmarks: what each is told, which files it writes, and how it measures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ... import OverlapConfig
from ...config import METHODS
from ...flags import NETWORKS, PROVIDERS, option, positive_float, positive_int
from ...select.method import Method
from ..measure.cases import EXCHANGES, OPS, PASSES
from ..measure.models import MODELS, TINY
from ..measure.runs import Session, Settings, nodes_of, refuse_kernels_on_cpus, refuse_methods_of_one_node
from ..measure.shapes import LAYERS, PUBLISHED, TABLES_1_2, WEIGHTS, cases, exchange_cases, layer_cases
from . import attention, layers, operators, output


@dataclass(frozen=True)
class File:
    """A pair of files NAME.json and NAME.md, and what measures their rows: all shapes that were asked for, collectively."""

    name: str
    columns: output.Columns
    measure: Callable[[Session], None]


@dataclass(frozen=True)
class Bench(ABC):
    """What all benchmarks are told."""

    out: str = option("", "write DIR/operators.json or layers.json, and .md; without it, only print", metavar="DIR")
    methods: tuple[str, ...] = option(
        (),
        f"of {','.join(METHODS)}; default fused,direct (inside a node),chunked,collective; on the CPU chunked,collective",
        choices=METHODS,
        metavar="METHOD,...",
    )
    provider: str = option("auto", "what provides symmetric memory", choices=PROVIDERS)
    tuning_dir: str = option(
        OverlapConfig().tuning_dir, "where auto finds the winners of overlap-train tune", metavar="DIR"
    )
    quick: bool = option(False, "fewer and shorter rounds")
    rounds: int | None = option(
        None, "rounds in which all take turns; default 5, with --quick 3", parse=positive_int, metavar="N"
    )
    burst_ms: float | None = option(
        None,
        "length of a turn, in milliseconds of matrix products; default 4. Turns of 500 are as long as those of training, in "
        "which we suppose that a call that takes more power than others has a lower clock",
        parse=positive_float,
        metavar="MS",
    )
    tiny: bool = option(False, "one tiny shape in fp32, to try the code on CPU processes")
    connections: int | None = option(
        None, "CUDA_DEVICE_MAX_CONNECTIONS; default: left as it is", parse=positive_int, metavar="N"
    )
    node_ranks = 0  # no option here: nodes as they are found

    @abstractmethod
    def files(self) -> list[File]:
        """The benchmark's files, in the order in which they are measured."""

    def settings(self, device: torch.device) -> Settings:
        """What the measurements themselves need. Raises ValueError for a method that cannot run on the device."""
        fits = [method for method in ("fused", "direct") if not self.node_ranks or Method(method).crosses]
        methods = self.methods or (*(fits if device.type == "cuda" else ()), "chunked", "collective")
        refuse_kernels_on_cpus(self.methods, device)
        dtype = torch.float32 if self.tiny else torch.bfloat16
        # symmetric_mib: enough for three slots of 1 GiB, the largest shape with M = 32768
        config = OverlapConfig(
            provider=self.provider, symmetric_mib=8192, timeout_s=30.0, main_grad="off", node_ranks=self.node_ranks,
            tuning_dir=self.tuning_dir,
        )  # fmt: skip
        return Settings(methods, dtype, self.quick, config, self.rounds, self.burst_ms)


@dataclass(frozen=True)
class OfPasses(Bench):
    """What all benchmarks of single passes are told."""

    passes: tuple[str, ...] = option(PASSES, f"of {','.join(PASSES)}", choices=PASSES, metavar="PASS,...")


@dataclass(frozen=True)
class Operators(OfPasses):
    """`bench operators`"""

    shapes: tuple[str, ...] = option(
        TABLES_1_2,
        "MODEL: a product of its MLP; MODEL-qkv, MODEL-proj: of its attention; all",
        choices=(*WEIGHTS, "all"),
        metavar="MODEL,...",
    )
    ops: tuple[str, ...] = option(OPS, f"of {','.join(OPS)}", choices=OPS, metavar="OP,...")
    rows: tuple[int, ...] = option(
        (), "rows of all ranks together; default 8192", parse=positive_int, metavar="M", spaced=True
    )

    def files(self) -> list[File]:
        return [File("operators", output.OPERATOR_COLUMNS, self._measure)]

    def _measure(self, session: Session) -> None:
        models, m = ((TINY,), 16) if self.tiny else (self.shapes, 8192)
        operators.run(cases(models, self.ops, self.passes, self.rows or (m,), session.world.size), session)


@dataclass(frozen=True)
class Layers(Bench):
    """`bench layers`"""

    layers: tuple[str, ...] = option(
        (),
        "MODEL-mlp or MODEL-attn; default: both of llama3-8b and llama3-70b, and qwen3-32b-mlp",
        choices=tuple(LAYERS),
        metavar="LAYER,...",
    )
    seq: tuple[int, ...] = option(
        (), "sequence lengths; default 8192, and 4096 for llama3-8b-mlp", parse=positive_int, metavar="S", spaced=True
    )
    tuned: str = option(
        "", "time auto once more, as tuned_ms, by the winners of overlap-train tune in DIR", metavar="DIR"
    )
    connections: int | None = option(
        1, "CUDA_DEVICE_MAX_CONNECTIONS; Megatron-Core needs 1", parse=positive_int, metavar="N"
    )

    def files(self) -> list[File]:
        return [File("layers", output.LAYER_COLUMNS, self._measure)]

    def _measure(self, session: Session) -> None:
        names, sequences = ([f"{TINY}-mlp"], [16]) if self.tiny else (self.layers, self.seq)
        layers.run(layer_cases(names, sequences, session.world.size), session, self.tuned)


@dataclass(frozen=True)
class Ulysses(OfPasses):
    """`bench ulysses`"""

    what: tuple[str, ...] = option(
        ("operators", "blocks"),
        "projections alone, whole attention blocks",
        choices=("operators", "blocks"),
        metavar="WHAT,...",
    )
    models: tuple[str, ...] = option(
        ("table6", "llama3-8b", "llama3-70b"),
        "models, and table6 for the shapes of Ditron's Table 6",
        choices=("table6", *PUBLISHED),
        metavar="MODEL,...",
    )
    seq: tuple[int, ...] = option((8192, 32768, 131072), "tokens in all", parse=positive_int, metavar="S", spaced=True)

    def files(self) -> list[File]:
        found = {
            "operators": File("operators", output.EXCHANGE_COLUMNS, self._operators),
            "blocks": File("layers", output.BLOCK_COLUMNS, self._blocks),
        }
        return [found[what] for what in self.what]

    @property
    def _shapes(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return ((TINY,), (16,)) if self.tiny else (self.models, self.seq)

    def _operators(self, session: Session) -> None:
        models, tokens = self._shapes
        operators.run(exchange_cases(models, tokens, self.passes, session.world.size), session)

    def _blocks(self, session: Session) -> None:
        models, tokens = self._shapes
        chosen = [(model, MODELS[model]) for model in models if model != "table6"]
        attention.run(chosen, tokens, session)


@dataclass(frozen=True)
class Hierarchical(OfPasses):
    """`bench hierarchical`"""

    ops: tuple[str, ...] = option(
        (*OPS, *EXCHANGES), f"of {','.join((*OPS, *EXCHANGES))}", choices=(*OPS, *EXCHANGES), metavar="OP,..."
    )
    ratios: tuple[float, ...] = option(
        operators.RATIOS,
        "length of the products, in units of what the network takes",
        parse=positive_float,
        metavar="R,...",
    )
    node_ranks: int = option(1, "ranks of each node; all nodes may be this machine", parse=positive_int, metavar="L")
    network: str = option("auto", "what carries data between nodes of GPUs", choices=NETWORKS)
    network_sms: tuple[int, ...] = option(
        (),
        "time our methods with these numbers of SMs for NCCL between nodes, too, besides the number found",
        parse=positive_int,
        metavar="SMS,...",
    )

    def files(self) -> list[File]:
        return [File("operators", output.HIERARCHICAL_COLUMNS, self._measure)]

    def settings(self, device: torch.device) -> Settings:
        settings = super().settings(device)
        return replace(settings, config=replace(settings.config, network=self.network))

    def _measure(self, session: Session) -> None:
        refuse_methods_of_one_node(self.methods, nodes_of(session))
        shapes = operators.Shapes(self.ops, self.passes, self.ratios, self.node_ranks, self.tiny)
        operators.run(operators.hierarchical_cases(session, shapes), session, self.network_sms)


KINDS: dict[str, type[Bench]] = {
    "operators": Operators,
    "layers": Layers,
    "ulysses": Ulysses,
    "hierarchical": Hierarchical,
}
