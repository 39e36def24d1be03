"""Environment variables that decide whether overlap works, and how fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .place import Place
from .report import FAIL, WARN, Finding

# The doctor never uses NVLink multicast, and sets these in its own process before CUDA starts, whatever they were: where
# multicast is broken, merely setting it up can take the host's GPUs down. No operator of ours needs it.
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@dataclass(frozen=True)
class Rule:
    """wrong: of the variable's value, None where it is not set."""

    variable: str
    wrong: Callable[[str | None], bool]
    status: str
    expected: str
    fix: str


def _on(value: str | None) -> bool:
    return value is not None and value.lower() not in ("", "0", "false", "no", "off")


_HANGS = "unset: the host would wait for a fused kernel before it enqueues the pushes that the peers' kernels wait for"
RULES = (
    Rule(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda value: value != "1",
        WARN,
        "1: Megatron-Core refuses sequence parallelism without it before Blackwell",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1 (overlap_train works with and without)",
    ),
    Rule("CUDA_LAUNCH_BLOCKING", _on, FAIL, _HANGS, "unset CUDA_LAUNCH_BLOCKING"),
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", _on, FAIL, _HANGS, "unset PYTORCH_NO_CUDA_MEMORY_CACHING"),
    Rule(
        "TRITON_INTERPRET",
        _on,
        FAIL,
        "unset on GPUs: kernels would be interpreted on the CPU",
        "unset TRITON_INTERPRET",
    ),
    Rule("NCCL_P2P_DISABLE", _on, WARN, "unset: NCCL would not use NVLink", "unset NCCL_P2P_DISABLE"),
    Rule("NCCL_P2P_LEVEL", lambda value: value in ("LOC", "0"), WARN, "unset or NVL", "unset NCCL_P2P_LEVEL"),
    Rule(
        "NVSHMEM_DISABLE_P2P",
        _on,
        FAIL,
        "unset: the provider nvshmem pushes over NVLink",
        "unset NVSHMEM_DISABLE_P2P, or use --overlap-train-provider torch",
    ),
    Rule(
        "NVSHMEM_DISABLE_CUDA_VMM",
        _on,
        WARN,
        "unset: without it the heap cannot grow beyond NVSHMEM_SYMMETRIC_SIZE",
        "unset NVSHMEM_DISABLE_CUDA_VMM, or set NVSHMEM_SYMMETRIC_SIZE to what --overlap-train-symmetric-mib allows",
    ),
)


def check_environment(place: Place, variables: Mapping[str, str]) -> list[Finding]:
    """One finding for each variable that is set or wrong; on CPU ranks the variables of GPUs do not matter."""
    if place.device.type != "cuda":
        return [place.ok("environment", "CPU ranks: variables of CUDA, NCCL and NVSHMEM do not matter")]
    found = [_judge(place, rule, variables.get(rule.variable)) for rule in RULES]
    lines = [finding for finding in found if finding is not None]
    return lines or [place.ok("environment", "nothing set that hurts")]


def _judge(place: Place, rule: Rule, value: str | None) -> Finding | None:
    name, measured = f"environment {rule.variable}", "not set" if value is None else value
    if rule.wrong(value):
        return (place.fail if rule.status == FAIL else place.warn)(name, measured, rule.expected, rule.fix)
    return None if value is None else place.ok(name, measured)
