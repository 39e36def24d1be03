"""The methods: in which ways an operator's pass can run, as far as the choice, the tuner and the checks must know.

What runs under each name: the engines in operators/. When to take which: docs/choosing.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """pushes: the copy engine sends its blocks; pushes of skewed ranks collide.
    cuts: it cuts blocks into chunks; sending them whole is a variant.
    splits: its reduction may run in a second kernel, after what the caller does meanwhile.
    kernels: it multiplies in kernels of ours, which CPUs run in Triton's interpreter only.
    """

    pushes: bool = False
    cuts: bool = False
    splits: bool = False
    kernels: bool = False


TRAITS = {
    "fused": Traits(pushes=True, cuts=True, splits=True, kernels=True),
    "direct": Traits(kernels=True),
    "chunked": Traits(pushes=True),
    "collective": Traits(),
}
