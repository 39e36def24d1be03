"""Proof that a compiled kernel still waits and signals, before it runs for the first time.

Compilers are known to drop polls and to move stores past the count that signals them, which shows as a wrong result once in a
thousand steps. Triton compiles on the user's machine, in whatever version is there: its PTX is checked there.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any

import torch

_ALIGNMENT = 16  # of addresses and numbers, as Triton looks at them


def kinds(arguments: Mapping[str, Any], constants: Mapping[str, Any]) -> Hashable:
    """The kinds of a launch's arguments, its constexprs and launch options. If these are equal, launches run the same binary.

    Triton works this out at every launch and warm-up, in 0.24 ms for 30 arguments. Ours are at least as fine as Triton's: if they
    are finer, Triton is asked more often than it need be."""
    return tuple((name, _kind(value)) for name, value in arguments.items()), tuple(constants.items())


def _kind(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % _ALIGNMENT == 0
    if type(value) is int:  # 1 becomes a constexpr; more than 31 and 63 bits take wider integers
        bits = value.bit_length()
        return int, value == 1, value % _ALIGNMENT == 0, bits > 31, bits > 63, value < 0
    if hasattr(value, "block_shape"):  # a tensor descriptor
        layout, padding = getattr(value, "layout", None), getattr(value, "padding", None)
        return type(value), value.base.dtype, tuple(value.block_shape), layout, padding
    return type(value), value


# Modifiers come in another order in other versions of Triton, so each is looked for by itself.
ACQUIRE = r"\b(?:ld|atom)\.(?=\S*acquire)(?=\S*\bsys\b)\S+"
COUNT = r"\b(?:atom|red)\.(?=\S*\b(?:release|acq_rel)\b)(?=\S*\bsys\b)(?=\S*\badd\b)\S+"
SIGNAL = r"\batom\.(?=\S*\brelease\b)(?=\S*\bsys\b)(?=\S*\bexch\b)\S+"
FENCE = r"fence\.proxy\.async\.global"
TMA_LOAD = r"cp\.async\.bulk\.tensor\.2d\.shared"
TMA_STORED = r"cp\.async\.bulk\.wait_group\s+0"
BARRIER = r"\bbar(?:rier)?\.\S*sync"
STORE = r"\bst\.global"
# Right before the count, with one barrier between, or several with nothing between them (Triton 3.9): kernels that also store
# their result have other stores before.
BARRIERS = rf"(?:{BARRIER}[^\n]*\n(?:\s*(?:\.loc|\$L__tmp)[^\n]*\n)*\s*)+"
STORED_AND_COUNTED = rf"{STORE}(?:(?!{STORE}|{BARRIER}).)*{BARRIERS}(?:(?!{BARRIER}).)*{COUNT}"
# Not the exchange by which a wait that fails sets its record: that comes right behind stores.
STORED_AND_TOLD = rf"{STORED_AND_COUNTED}(?:(?!{STORE}).)*{SIGNAL}"
# Of words that carry their own flag: whole, and not from a cache. Two polls: of the call's signal and of the words.
WORD_STORED = r"\bst\.relaxed\.sys\.global\.b64"
WORD_POLLED = r"\bld\.(?:volatile|relaxed\.sys)\.global\.b64"
FLAGGED = ((SIGNAL, WORD_POLLED, WORD_POLLED), (WORD_STORED, WORD_POLLED))
POLLS = (ACQUIRE, ACQUIRE)  # one before the loop, one inside

_Proofs = tuple[tuple[str, ...], ...]  # each: found one after the other
PROOFS: dict[str, _Proofs] = {
    "wait_kernel": (POLLS,),
    "wait_and_keep_kernel": (POLLS,),
    "take_blocks_kernel": (POLLS,),
    "barrier_kernel": ((SIGNAL, *POLLS),),
    "next_epoch_kernel": (),  # copies and kernels that come after it in the stream see what it has stored
    "all_gather_gemm_kernel": (POLLS,),
    "all_to_all_gemm_kernel": (POLLS,),
    "gemm_reduce_scatter_kernel": ((STORE, BARRIER, COUNT),),
    "hopper_all_to_all_gemm_kernel": ((ACQUIRE, FENCE, TMA_LOAD), POLLS),
    "hopper_all_gather_gemm_kernel": ((ACQUIRE, FENCE, TMA_LOAD), POLLS),  # its loop may lie out of line
    # an upper strip alone, and a lower one or both of a tile
    "hopper_gemm_reduce_scatter_kernel": ((TMA_STORED, BARRIER, COUNT) * 2,),
    # its waits, which only the first tiles of a chunk need, may lie out of line
    "hopper_dispatch_gemm_kernel": (POLLS, (FENCE, TMA_LOAD), (STORED_AND_COUNTED, SIGNAL)),
    "hopper_gemm_combine_kernel": ((STORED_AND_COUNTED, SIGNAL),),
    "low_latency_gather_kernel": FLAGGED,
    "low_latency_scatter_kernel": FLAGGED,
    "low_latency_all_reduce_kernel": FLAGGED,
    "all_reduce_kernel": (POLLS, (STORED_AND_TOLD,)),
    "two_shot_all_reduce_kernel": (POLLS * 2, (STORED_AND_TOLD,) * 2),
    "reduce_partials_kernel": (),  # runs after a wait kernel
    "add_blocks_kernel": (),  # so do these
    "sum_of_tokens_kernel": (),
    "count_arrivals_kernel": ((ACQUIRE,),),
    "amax_kernel": (),  # these touch nothing that is shared
    "expert_tables_kernel": (),
    "quantize_kernel": (),
    "quantize_pieces_kernel": (),
    "quantize_squares_kernel": (),
    "pack_rows_kernel": (),
    "unpack_rows_kernel": (),
    "transpose_kernel": (),
    "hopper_grouped_wgrad_kernel": (),
}
# And where a switch of the kernel is on: DIRECT, it stores at the peers and signals them; REDUCE, its last tiles wait for theirs.
PROOFS_WHERE: dict[str, dict[str, _Proofs]] = {
    "DIRECT": {
        "all_gather_gemm_kernel": ((STORED_AND_COUNTED, SIGNAL),),
        "hopper_all_gather_gemm_kernel": ((STORED_AND_COUNTED, SIGNAL),),
        "all_to_all_gemm_kernel": ((STORED_AND_COUNTED, SIGNAL),),
        "hopper_all_to_all_gemm_kernel": ((STORED_AND_COUNTED, SIGNAL),),
        "gemm_reduce_scatter_kernel": ((STORE, BARRIER, COUNT, SIGNAL),),
        "hopper_gemm_reduce_scatter_kernel": ((TMA_STORED, BARRIER, COUNT, SIGNAL) * 2,),
    },
    "REDUCE": {
        "gemm_reduce_scatter_kernel": (POLLS,),
        "hopper_gemm_reduce_scatter_kernel": ((ACQUIRE, FENCE, TMA_LOAD), POLLS),
    },
}
# It walks its peers in a loop, which compilers leave out where there is none.
WAITS_IN_A_LOOP = (
    "hopper_all_to_all_gemm_kernel",
    "all_reduce_kernel",
    "two_shot_all_reduce_kernel",
    *(name for name, proofs in PROOFS.items() if proofs == FLAGGED),
)


def missing(ptx: str, name: str, constants: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The first proof that the PTX of kernel `name`, compiled with these constants, lacks, or None."""
    alone = constants.get("WORLD") == 1  # nobody to wait for, nothing to send: compilers leave it out
    assert name in PROOFS, f"{name}: say in PROOFS what its PTX must show"
    on = [proofs.get(name, ()) for switch, proofs in PROOFS_WHERE.items() if constants.get(switch) and not alone]
    proofs = sum(on, () if alone and name in WAITS_IN_A_LOOP else PROOFS[name])
    return next((proof for proof in proofs if not _in_order(ptx, proof)), None)


def _in_order(ptx: str, proof: tuple[str, ...]) -> bool:
    """Whether matches of the patterns lie one after the other. One search a pattern: a single expression for all of them takes
    seconds to fail on 300 KB, and 5 to 14 ms to succeed."""
    place = 0
    for pattern in proof:
        found = re.compile(pattern, flags=re.DOTALL).search(ptx, place)
        if found is None:
            return False
        place = found.end()
    return True


class Verifier:
    """Checks what each kind of launch runs, once."""

    def __init__(self) -> None:
        # Kernels, which so keep their ids, and binaries, by a kernel's id and the kinds of arguments.
        self._known: dict[Hashable, tuple[Any, Any]] = {}

    def verify(self, kernel: Any, grid: tuple[int], arguments: dict[str, Any], constants: dict[str, Any]) -> Any:
        """Compile `kernel` for these arguments, without launching it, and look for its waits and signals: RuntimeError, if one is
        not there, or not in its place. Returns the binary."""
        # By its id: the hash of a kernel is Triton's key, which would be worked out too early (compiling.py: settle_key).
        key = id(kernel), kinds(arguments, constants)
        if key not in self._known:
            from .compiling import compiled  # imports Triton

            binary = compiled(kernel, grid, arguments, constants)
            name = binary.metadata.name
            lacking = missing(binary.asm["ptx"], name, constants)
            if lacking is not None:
                import triton

                raise RuntimeError(
                    f"{name}: as Triton {triton.__version__} has compiled it, its PTX lacks, in this order: "
                    f"{'; '.join(lacking)}. It would not wait or signal as it must. Use Triton 3.6, which was tested, or leave "
                    f"--overlap-train out"
                )
            self._known[key] = kernel, binary
        return self._known[key][1]
