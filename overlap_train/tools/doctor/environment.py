"""Environment variables that decide whether overlap works, and how fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .report import FAIL, WARN, Finding, ok

# The doctor never uses NVLink multicast, and sets these in its own process before CUDA starts, whatever they were: where
# multicast is broken, merely setting it up can take the host's GPUs down. No operator of ours needs it.
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def _on(value: str | None) -> bool:
    return value is not None and value.lower() not in ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Rule:
    """A rule for one environment variable. wrong: of the variable's value, None where it is not set. fix: "" is "unset" and the
    variable's name."""

    variable: str
    status: str
    expected: str
    fix: str = ""
    wrong: Callable[[str | None], bool] = _on


_HANGS = "unset: the host would wait for a fused kernel before it enqueues the pushes that the peers' kernels wait for"
RULES = (
    Rule(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        WARN,
        "1: Megatron-Core refuses sequence parallelism without it before Blackwell",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1 (overlap_train works with and without)",
        lambda value: value != "1",
    ),
    Rule("CUDA_LAUNCH_BLOCKING", FAIL, _HANGS),
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", FAIL, _HANGS),
    Rule("TRITON_INTERPRET", FAIL, "unset on GPUs: kernels would be interpreted on the CPU"),
    Rule("NCCL_P2P_DISABLE", WARN, "unset: NCCL would not use NVLink"),
    Rule("NCCL_P2P_LEVEL", WARN, "unset or NVL", wrong=lambda value: value in ("LOC", "0")),
    Rule(
        "NVSHMEM_DISABLE_P2P",
        FAIL,
        "unset: the provider nvshmem pushes over NVLink",
        "unset NVSHMEM_DISABLE_P2P, or use --overlap-train-provider torch",
    ),
    Rule(
        "NVSHMEM_DISABLE_CUDA_VMM",
        WARN,
        "unset: without it the heap cannot grow beyond NVSHMEM_SYMMETRIC_SIZE",
        "unset NVSHMEM_DISABLE_CUDA_VMM, or set NVSHMEM_SYMMETRIC_SIZE to what --overlap-train-symmetric-mib allows",
    ),
)


def check_environment(on_gpu: bool, variables: Mapping[str, str]) -> list[Finding]:
    """One finding for each variable that is set or wrong; on CPU ranks the variables of GPUs do not matter."""
    if not on_gpu:
        return [ok("environment", "CPU ranks: variables of CUDA, NCCL and NVSHMEM do not matter")]
    found = [_judge(rule, variables.get(rule.variable)) for rule in RULES]
    return [finding for finding in found if finding is not None] or [ok("environment", "nothing set that hurts")]


def _judge(rule: Rule, value: str | None) -> Finding | None:
    name, measured = f"environment {rule.variable}", "not set" if value is None else value
    if rule.wrong(value):
        return Finding(name, rule.status, measured, rule.expected, rule.fix or f"unset {rule.variable}")
    return None if value is None else ok(name, measured)
