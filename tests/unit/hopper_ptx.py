"""Compiles kernels for sm_90 without a GPU. Runs in a process of its own (see `compiling` in conftest.py)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NamedTuple
from unittest import mock

from packaging.version import Version

WORDS = (
    "counter_ptr", "sent_ptr", "complete_ptr", "left_ptr", "memory_at_ptr", "outgoing_at_ptr", "signals_ptr", "epoch_ptr",
    "abort_ptr", "record_ptr", "here_ptr", "order_ptr", "words_ptr", "words_at_ptr",
)  # fmt: skip


# of the kernels between received rows and attention, and of those that make fp8
NUMBERS = ("amax", "inverse", "largest", "row_scales", "column_scales", "scales", "cos", "sin", "sums")
OTHERS = {f"{name}_ptr": "*fp32" for name in NUMBERS}
OTHERS |= {"rows_ptr": "*i64", "eps": "fp32"}


def leave_the_interpreter() -> None:
    """Kernels are either interpreted or compiled, as this variable says when Triton is imported.

    What is compiled here lies beside Triton's own cache: programs that run kernels must not find one without a binary.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    from triton import knobs

    knobs.cache.dir = f"{knobs.cache.dir}-ptx"


@contextmanager
def _without_assembler() -> Iterator[None]:
    """Inside, kernels are compiled to PTX and no further: ptxas takes a fifth of a large kernel's time."""
    from triton import knobs

    def stop(*of_compilation: Any) -> tuple[str, str]:
        if of_compilation:  # backend, stages, ...; newer versions also ask without any what goes into the cache's key
            of_compilation[1]["cubin"] = lambda ptx, metadata: b""
        return "to PTX", "to PTX"

    with knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = stop
        yield


def _compiled(kernel: Any, constants: dict[str, Any], types: dict[str, str], aligned: Iterable[str]) -> Any:
    """What Triton's compiler returns of a Gluon kernel, without a binary. types: of arguments; others are i32. aligned: arguments
    that are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from overlap_train.ops.launch import LAUNCH

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    # in one order: it is in the hash
    values = {(i,): constants[name] for i, name in enumerate(names) if name in constants}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(kernel, signature, values, attributes)
    with _without_assembler():
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=LAUNCH)


def compiled(*how: Any, **switches: Any) -> tuple[str, int]:
    """(PTX, bytes of shared memory) of what compiled_kernel() returns."""
    binary = compiled_kernel(*how, **switches)
    return binary.asm["ptx"], binary.metadata.shared


def compiled_kernel(
    kernel_name: str, b_is_nk: bool, formats: tuple[str, str] = ("bf16", "bf16"), bias: bool = False, numbers: bool = False,
    divisible: bool = True, **switches: int,
) -> Any:  # fmt: skip
    """A kernel for 4 ranks and 2 chunks; formats: of a and b; numbers: rows of experts have one; divisible: features are
    multiples of 16; switches: its constexprs."""
    from overlap_train.ops.launch import (
        BLOCK_K,
        BLOCK_M,
        BLOCK_N,
        BUFFERS_DIRECT,
        LAUNCH,
        PART_M,
        STAGES,
        STAGES_DIRECT,
        STEP,
    )
    from overlap_train.schedule.kinds import Kind
    from overlap_train.schedule.order import units_in_run
    from overlap_train.select.tiles import HOPPER_TILE

    module = __import__(f"overlap_train.kernels.{kernel_name}", fromlist=["kernel"])
    kernel = getattr(module, f"{kernel_name}_kernel")
    constants: dict[str, Any] = dict(
        WORLD=4, CHUNKS=2, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=HOPPER_TILE.group_m,
        STAGES=STAGES, B_IS_NK=b_is_nk, SCALING=0, num_warps=LAUNCH["num_warps"],
    ) | switches  # fmt: skip
    if constants["SCALING"] != 3:  # of blocks
        unused = "gathered_scale" if constants["SCALING"] else "scale"
        constants |= dict.fromkeys(name for name in kernel.arg_names if unused in name)
    depth, half_n = constants["BLOCK_K"], constants["BLOCK_N"] // 2
    constants = {"LOCAL": constants["WORLD"]} | constants | ({} if bias else {"bias_ptr": None})
    constants |= {} if numbers else {"numbers_ptr": None}
    if "pairs_ptr" in kernel.arg_names:  # of experts
        constants = {"STEP": STEP // 2} | constants
        constants |= {} if constants["SCALING"] else {"b_half_desc": None}
    elif "own_desc" in kernel.arg_names:
        constants = {"DIRECT": False, "PIECE": 16384, "STEP": STEP // 2} | constants
    else:
        direct = {"STAGES": STAGES_DIRECT, "BUFFERS": BUFFERS_DIRECT} if switches["DIRECT"] else {"BUFFERS": 1}
        constants = {"REDUCE": True, "EXCHANGE": False, "SHARES": False} | constants | direct
        kind = Kind.GEMM_A2A if constants["EXCHANGE"] else Kind.GEMM_RS
        told = (constants[name] for name in ("WORLD", "CHUNKS", "DIRECT", "REDUCE"))
        constants["RUN"] = units_in_run(kind, *told)
    panel, out = _descriptor(PART_M, depth, dtype=formats[0]), _descriptor(1, PART_M, half_n)
    b, b_half = (_descriptor(*((n, depth) if b_is_nk else (depth, n)), dtype=formats[1]) for n in (2 * half_n, half_n))
    types = dict.fromkeys(("own_desc", "gathered_desc", "a_desc", "rows_desc"), panel)
    if "b_at_ptr" in kernel.arg_names:
        b = _descriptor(1, *((2 * half_n, depth) if b_is_nk else (depth, 2 * half_n)), dtype=formats[1])
    types |= {"b_desc": b, "b_half_desc": b_half}
    types["received_desc"] = panel if "own_desc" in kernel.arg_names else _descriptor(PART_M, half_n)
    types |= dict.fromkeys(("y_desc", *(f"to{step}_desc" for step in range(1, 8))), out)
    types |= dict.fromkeys((*WORDS, "tokens_ptr", "places_ptr"), "*i64") | {"limit": "i64", "tag": "i64"}
    types |= dict.fromkeys(("a_scale_ptr", "b_scale_ptr", "gathered_scale_ptr", "numbers_ptr"), "*fp32")
    types |= dict.fromkeys(("like_ptr", "y_ptr", "bias_ptr"), "*bf16") | {"own_ptr": f"*{formats[0]}"}
    types["x_ptr"] = "*u8" if constants["SCALING"] else "*bf16"
    types |= dict.fromkeys(("b_at_ptr", "pairs_ptr", "pieces_ptr", "peers_ptr", "segments_ptr"), "*i32")
    whole = ("n", "k", "pitch") if divisible else ()  # m_shard is not specialised: rows are any number
    aligned = [
        name
        for name, param in zip(kernel.arg_names, kernel.params, strict=True)
        if name not in constants
        and (name.endswith("_ptr") or name in whole)
        and not param.do_not_specialize_on_alignment
    ]
    return _compiled(kernel, constants, types, aligned)


def compiled_wgrad(adds: bool, dtype: str, divisible: bool) -> Any:
    """The kernel of weight gradients of experts. divisible: features are multiples of 16."""
    from overlap_train.kernels.hopper_grouped_wgrad import hopper_grouped_wgrad_kernel as kernel
    from overlap_train.ops.launch import BLOCK_K, BLOCK_M, BLOCK_N, HALF_N, LAUNCH, PART_M, STAGES

    constants: dict[str, Any] = dict(
        ADDS=adds, BLOCK_N=BLOCK_M, BLOCK_K=BLOCK_N, ROWS=BLOCK_K, GROUP_N=8, STAGES=STAGES, num_warps=LAUNCH["num_warps"]
    ) | ({"dw_desc": None} if adds else {})  # fmt: skip
    dy, x = (_descriptor(1, 1, BLOCK_K, cols, dtype=dtype) for cols in (PART_M, BLOCK_N))
    types = dict(
        dy_desc=dy, x_desc=x, dw_desc=_descriptor(1, PART_M, HALF_N, dtype=dtype), words_ptr="*i64", ends_ptr="*i32"
    )
    return _compiled(kernel, constants, types, ("words_ptr", "ends_ptr", *(("n", "k") if divisible else ())))


def _descriptor(*block: int, dtype: str = "bf16") -> str:
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.dtype(dtype))
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


def compiled_portable(
    module_name: str, kernel_name: str, capability: int = 90, bias: bool = False, data: str = "*bf16",
    rounded_to: str = "*fp8e4nv", **constants: Any,
) -> str:  # fmt: skip
    """PTX of a plain Triton kernel for `data`. capability: of the GPU, 80 for an A100. constants: constexprs; num_warps, 4
    without it; and divisible: the names of arguments that are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(__import__(f"overlap_train.kernels.{module_name}", fromlist=["kernel"]), kernel_name)
    names, warps, divisible = kernel.arg_names, constants.pop("num_warps", 4), constants.pop("divisible", ())
    if "words_at_ptr" in names:  # the low-latency protocol, which takes units of 4 or 2 bytes
        data = "*i32" if constants["PER_WORD"] == 1 else "*i16"
    if "DTYPE" in constants:
        constants["DTYPE"] = getattr(triton.language, constants["DTYPE"])
    pointers = {name: "*i64" if name in (*WORDS, "memory_at_ptr") else data for name in names if name.endswith("_ptr")}
    if "bias_ptr" in names:
        pointers["bias_ptr"] = "*bf16"
        constants |= {} if bias else {"bias_ptr": None}
    types = pointers | {"limit": "i64", "tag": "i64"} | OTHERS | dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(("by_rows_ptr", "by_columns_ptr"), rounded_to)
    values = {(names.index(name),): value for name, value in constants.items()}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = ASTSource(kernel, {name: types.get(name, "i32") for name in names}, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps}).asm["ptx"]


def compiled_conversion(kernel_name: str, planted: bool = False, **how: Any) -> str:
    """compiled_portable() of a kernel that makes fp8. planted: rows and columns have one scale."""
    import triton

    from overlap_train.kernels import quantize

    @triton.jit
    def together(scale):  # type: ignore[no-untyped-def]
        return scale

    kernel = getattr(quantize, kernel_name)
    kernel.hash = None  # of its source and of what it calls, under which Triton's cache has it
    with mock.patch.object(quantize, "apart", together if planted else quantize.apart):
        ptx = compiled_portable("quantize", kernel_name, **how)
    kernel.hash = None
    return ptx


def may_spill() -> int:
    """Bytes a thread. With Triton 3.8 warps spill what they keep from before they part, and what they need where a wait takes
    long."""
    return 40 if Version(version("triton")) >= Version("3.8") else 0


class Resources(NamedTuple):
    """What the assembler says of a kernel. spilled: bytes a thread that it stores in local memory."""

    registers: int
    spilled: int
    serialized: bool


def resources(ptx: str) -> Resources:
    """What the assembler needs for a kernel."""
    import subprocess
    import tempfile

    from triton import knobs

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [knobs.nvidia.ptxas.path, "-arch=sm_90a", "-v", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers, spilled = (re.search(rf"(\d+) {what}", said) for what in ("registers", "bytes spill stores"))
    assert registers and spilled, said
    return Resources(int(registers[1]), int(spilled[1]), "serialized" in said)
