"""The methods: in which ways an operator's pass can run, as far as the choice, the tuner and the checks must know.

What runs under each name: the engines in operators/. When to take which: docs/choosing.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """What the choice, the tuner and the checks must know of a method.

    pushes: the copy engine sends its blocks; pushes of skewed ranks collide.
    cuts: it cuts blocks into chunks; sending them whole is a variant.
    splits: its reduction may run in a second kernel, after what the caller does meanwhile.
    kernels: it runs kernels of ours, which CPUs have in Triton's interpreter only.
    multiplies: in such kernels, and not by the library.
    crosses: it serves groups that span nodes.
    few_rows: it serves short gathers and scatters of tensor parallelism only (planning/low_latency.py).
    """

    pushes: bool = False
    cuts: bool = False
    splits: bool = False
    kernels: bool = False
    multiplies: bool = False
    crosses: bool = False
    few_rows: bool = False


TRAITS = {
    "fused": Traits(pushes=True, cuts=True, splits=True, kernels=True, multiplies=True, crosses=True),
    "direct": Traits(kernels=True, multiplies=True),
    "low_latency": Traits(kernels=True, few_rows=True),
    "chunked": Traits(pushes=True, crosses=True),
    "collective": Traits(crosses=True),
}
