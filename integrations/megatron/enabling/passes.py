"""What the passes of a parallel linear do, in words: columns of the table."""

from __future__ import annotations

from typing import Any

from overlap_train.integrations.megatron.linears.conditions import divides_weights, standing_exchange_reason
from overlap_train.integrations.megatron.linears.in_model import groups_of, is_row
from overlap_train.integrations.megatron.linears.ulysses import exchanges


def passes(linear: Any) -> tuple[str, str, str]:
    """What fprop, dgrad and wgrad do."""
    if in_two_groups(linear):
        return _passes_in_two_groups(linear)
    if exchanges(linear) and not divides_weights(linear):
        return _exchanging_passes(linear)
    if is_row(linear):
        return "GEMM + RS", "AG(dy) + GEMM", "GEMM with the gathered dy"
    kept = linear.overlap.config.gathered_input == "keep"
    return "AG(x) + GEMM", "GEMM + RS", "GEMM with x kept" if kept else "AG(x) under dgrad, then GEMM"


def _exchanging_passes(linear: Any) -> tuple[str, str, str]:
    """The passes of a linear that exchanges. CP: context-parallel ranks of the last call."""
    over = "".join(f" (CP {group.size()})" for group in groups_of(linear)[-1:])
    if not is_row(linear):
        return f"GEMM + A2A{over}", f"A2A(dy) + GEMM{over}", "GEMM with the received dy"
    kept = linear.overlap.config.gathered_input == "keep"
    return f"A2A(x) + GEMM{over}", f"GEMM + A2A{over}", "GEMM with x kept" if kept else "A2A(x) under dgrad, then GEMM"


def _passes_in_two_groups(linear: Any) -> tuple[str, str, str]:
    """The passes of a linear that communicates over both groups. TP: tensor-parallel ranks."""
    *ulysses, tensor = groups_of(linear)  # none before the first call
    tp, cp = f"(TP {tensor.size()})", "".join(f" (CP {group.size()})" for group in ulysses[-1:])
    kept = linear.overlap.config.gathered_input == "keep"
    if is_row(linear):
        again = "GEMM with x kept" if kept else "A2A(x) under dgrad, then GEMM"
        return f"A2A(x){cp}, GEMM + RS {tp}", f"AG(dy) + GEMM {tp}, A2A{cp}", again
    again = "GEMM with x kept" if kept else "AG(x) under dgrad, then GEMM"
    return f"AG(x) + GEMM {tp}, A2A{cp}", f"A2A(dy){cp}, GEMM + RS {tp}", again


def exchanges_now(linear: Any) -> bool:
    """Whether a product of the linear hides its exchange, as far as settings tell; over TP, whether it did in the last call."""
    if not exchanges(linear) or linear.overlap.apart is not None:
        return False
    return standing_exchange_reason(linear, linear.weight) is None


def in_two_groups(linear: Any) -> bool:
    """Whether a linear gathers or scatters over TP, and its products hide an exchange over context-parallel ranks."""
    return exchanges_now(linear) and divides_weights(linear)
