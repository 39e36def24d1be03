"""OverlapConfig: what is overlapped, how, and within which limits. The one source of flags, documentation and checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, replace
from types import UnionType
from typing import Any

SLOTS = ("qkv", "proj", "fc1", "fc2", "output")  # of linears; those of memory are group/slots.py's
METHODS = ("auto", "fused", "direct", "low_latency", "chunked", "collective")
_LEAST_CALLS = 2 * (len(METHODS) - 1)
MOST_CTAS = 32  # of one of NCCL's communicators; a sum between nodes may be given no more either


Rule = tuple[str, Callable[[Any], bool]]  # what an error says of a wrong value, and which values are right


def _setting(default: Any, help: str, choices: tuple[str, ...] | None = None, rule: Rule | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "rule": rule})


def _is_number(value: Any, kinds: type | UnionType = int) -> bool:
    """A bool is an int to Python, and no number here."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def _whole(text: str, least: int, most: float = math.inf, zero: bool = False) -> Rule:
    """A whole number from least to most, or 0."""
    return text, lambda value: _is_number(value) and (least <= value <= most or (zero and value == 0))


_MIB = _whole("must be a positive number of MiB, and a whole one", 1)
_SECONDS: Rule = (
    "must be a positive and finite number",
    lambda value: _is_number(value, int | float) and 0 < value < math.inf,
)
_SWITCH: Rule = ("must be True or False", lambda value: isinstance(value, bool))
_FACTOR: Rule = ("must be a number from 1 on", lambda value: _is_number(value, int | float) and 1 <= value < math.inf)
_FOLDER: Rule = ("must name a folder, which need not exist", lambda value: isinstance(value, str) and bool(value))
_NODE = _whole("must be a number of ranks, or 0 to find the nodes", 0)
_SMS = _whole(f"must be a number from 1 to {MOST_CTAS}, or 0 for the default", 0, MOST_CTAS)
_CALLS = _whole(
    f"must be at least {_LEAST_CALLS}, so that each method runs twice and its first call, which may compile, need not count, "
    "or 0 for none",
    _LEAST_CALLS,
    zero=True,
)


@dataclass(frozen=True)
class OverlapConfig:
    """Settings of overlapped linears. Every field is also a flag: `slots` is `--overlap-train-slots`. docs/flags.md explains all.

    Raises:
        ValueError: a field has a value outside its rule; the message names field, value, rule and flag.
    """

    slots: tuple[str, ...] = _setting(SLOTS, "Megatron linears to overlap, comma separated", SLOTS)
    method: str = _setting(
        "auto",
        "fused: one persistent kernel that waits per tile while copy engines move the data; direct: the same, but the kernel "
        "itself stores at the peers; low_latency: for few rows, a library GEMM and one kernel that sends and receives; "
        "chunked: library GEMMs on shards; collective: NCCL or gloo, no overlap; auto: chosen per shape",
        METHODS,
    )
    gathered_input: str = _setting(
        "regather",
        "what backward does about the gathered input: regather it under the dgrad GEMM, or keep it from forward "
        "(costs M x K elements a linear)",
        ("regather", "keep"),
    )
    main_grad: str = _setting(
        "accumulate",
        "accumulate: add the weight gradient into weight.main_grad where the weight has one; off: return it",
        ("accumulate", "off"),
    )
    fp8: str = _setting(
        "off",
        "multiply in fp8 and gather one byte an element, with one scale for each tensor: inputs and weights in e4m3, gradients "
        "in e5m2 (tensorwise) or e4m3, too (tensorwise_e4m3); blockwise: all in e4m3, with one scale for each 128 elements along "
        "the contraction, of weights for each 128 x 128. Not the output layer",
        ("off", "tensorwise", "tensorwise_e4m3", "blockwise"),
    )
    provider: str = _setting(
        "auto",
        "symmetric memory: nvshmem (GPUs), torch (GPUs of one node), host (CPU processes); auto: host on CPUs, nvshmem "
        "where it is installed, else torch",
        ("auto", "nvshmem", "torch", "host"),
    )
    symmetric_mib: int = _setting(
        2048,
        "most symmetric memory a rank may hold, in MiB; while it grows, the rank holds the old and the new one",
        rule=_MIB,
    )
    exchange_mib: int = _setting(
        512,
        "most symmetric memory of a rank in one group for Ulysses' all-to-alls, in MiB; longer sequences pass in parts",
        rule=_MIB,
    )
    timeout_s: float = _setting(
        600.0,
        "longest wait for a peer before OverlapTimeoutError, in seconds (while a library connects ranks, at least 120); after "
        "10 s, or a tenth of it, a warning names the late rank",
        rule=_SECONDS,
    )
    node_ranks: int = _setting(
        0,
        "ranks per node, where a group spans several nodes; 0: nodes are found, as the ranks of one operating system",
        rule=_NODE,
    )
    network: str = _setting(
        "auto",
        "what carries data between nodes, of GPUs only: nccl, or nvshmem, which needs provider nvshmem for the whole group and "
        "takes no SMs; auto: nccl",
        ("auto", "nccl", "nvshmem"),
    )
    network_sms: int = _setting(
        0,
        "SMs that NCCL may hold to send between nodes, of GPUs only; products that run meanwhile leave them alone. 0: 8",
        rule=_SMS,
    )
    reduce_sms: int = _setting(
        0,
        "SMs that the sum of a node's partial products may hold between nodes, of GPUs only; products that run meanwhile leave "
        "them alone. 0: 7",
        rule=_SMS,
    )
    experts: bool = _setting(
        False,
        "hide the exchange of experts' rows behind their grouped products, too: expert parallelism inside one node",
        rule=_SWITCH,
    )
    experts_room: float = _setting(
        2.0,
        "rows that a slot of experts holds, as a multiple of what each rank sends to each if the router spreads them evenly; a "
        "call with more is a collective of all ranks",
        rule=_FACTOR,
    )
    tuning_dir: str = _setting(
        "~/.cache/overlap_train",
        "folder of the measurements of overlap-train tune, which method=auto uses; rank 0 of a group reads it for all its ranks",
        rule=_FOLDER,
    )
    tune_steps: int = _setting(
        0,
        "let training measure: in the first so many calls of a linear whose sizes were never tuned (at least 10), method=auto "
        "tries all methods in turn; then ranks agree on the fastest, and keep it in tuning_dir. 0: off",
        rule=_CALLS,
    )
    on_unsupported: str = _setting(
        "error",
        "what to do where overlap cannot act (TP 1, other recipes of fp8, CUDA graphs of single layers): error, or fallback "
        "to Megatron's code",
        ("error", "fallback"),
    )

    @property
    def exchange_limit_mib(self) -> int:
        """What all slots of an exchange may take together: never all of symmetric_mib, of which signals take some KiB."""
        return min(self.exchange_mib, max(1, self.symmetric_mib - 1))

    @property
    def agreed(self) -> tuple[object, ...]:
        """The values of all settings but those that are each rank's own."""
        return tuple(
            [value for name, value in vars(self).items() if name not in ("slots", "main_grad", "on_unsupported")]
        )

    def by(self, method: str) -> OverlapConfig:
        """These settings with another method and without autotune runs (tune_steps=0): a named method leaves nothing to try."""
        return replace(self, method=method, tune_steps=0)

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            error = _error_of(setting, value)
            if error is not None:
                raise ValueError(f"{setting.name}={value!r}{error} ({flag_name(setting.name)})")
        if self.tune_steps and self.method != "auto":
            raise ValueError(
                f"tune_steps={self.tune_steps} with method={self.method!r}: only auto tries methods; leave one of the two out "
                f"({flag_name('tune_steps')}, {flag_name('method')})"
            )
        if self.network_sms and self.network == "nvshmem":
            raise ValueError(
                f"network_sms={self.network_sms} with network='nvshmem', which takes no SMs: leave one of the two out "
                f"({flag_name('network_sms')}, {flag_name('network')})"
            )


def check_type(config: OverlapConfig | None) -> None:
    """Raise ValueError for a config of another kind, such as a dict."""
    if not isinstance(config, OverlapConfig | None):
        raise ValueError(
            f"config={config!r} must be an OverlapConfig, such as OverlapConfig(method='chunked'), or None"
        )


def flag_name(field_name: str) -> str:
    """`symmetric_mib` -> `--overlap-train-symmetric-mib`."""
    return "--overlap-train-" + field_name.replace("_", "-")


def _error_of(setting: Field[Any], value: Any) -> str | None:
    """What is wrong with a value, as an error goes on after it."""
    rule, choices = setting.metadata["rule"], setting.metadata["choices"]
    if choices is None:
        text, allows = rule
        return None if allows(value) else f" {text}"
    several, names = isinstance(setting.default, tuple), ", ".join(choices)
    if isinstance(value, tuple) is not several:
        return f" must be {'a tuple' if several else 'one'} of {names}"
    wrong = [item for item in (value if several else (value,)) if item not in choices]
    if wrong:
        return f": {wrong[0]!r} is not one of {names}"
    return None if value else f": it is empty; choose from {names}"
