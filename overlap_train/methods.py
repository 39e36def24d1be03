"""The methods: in which ways an operator's pass can run, as far as the choice, the tuner and the checks must know.

What runs under each name: GATHERS and SCATTERS in operators/. When to take which: docs/choosing.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """pushes: the copy engine sends its blocks, so that those of ranks that are out of step collide.
    cuts: it cuts blocks into chunks, so that sending them whole is another way to run.
    defers: its reduction may be left to a kernel behind what the caller does meanwhile.
    kernels: it multiplies in kernels of ours, which CPUs run in Triton's interpreter only.
    """

    pushes: bool = False
    cuts: bool = False
    defers: bool = False
    kernels: bool = False


TRAITS = {
    "fused": Traits(pushes=True, cuts=True, defers=True, kernels=True),
    "direct": Traits(kernels=True),
    "chunked": Traits(pushes=True),
    "collective": Traits(),
}
