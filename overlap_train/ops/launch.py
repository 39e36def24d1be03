"""Launches of the persistent kernels: warp-specialised Gluon on Hopper, plain Triton elsewhere, interpreted on CPUs.

The kernels for Hopper need TMA: bf16 or fp16, rows that start on 16 bytes, a GPU of compute capability 9 (select/tiles.py). The
plain ones serve other GPUs, fp32, sizes that TMA refuses, and Triton's interpreter.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..gpu.launch import Launch
from ..group.domain import OverlapDomain
from ..group.slots import Call
from ..kernels.signal_words import OWN_TILE
from ..schedule.order import units_in_run
from ..select.tiles import HOPPER, HOPPER_TILE
from .blocks import tails
from .product import BlockMatrix, Fp8Matrix, Right

if TYPE_CHECKING:
    from .plan import EnginePlan

BLOCK_M, BLOCK_N, BLOCK_K = HOPPER_TILE.block_m, HOPPER_TILE.block_n, HOPPER_TILE.block_k
PANEL_BYTES = 2 * BLOCK_K  # of a row in a panel: 64 numbers of two bytes, 128 of one
# A strip, which each of two multiplying groups has of a tile, and half a tile's columns: it stores one such quarter at a time.
PART_M, HALF_N = BLOCK_M // HOPPER_TILE.parts, BLOCK_N // 2
# Tiles that are stored at a peer leave at NVLink's pace: a buffer for each quarter of one, and a stage less, hide that.
STAGES, STAGES_DIRECT, BUFFERS_DIRECT = HOPPER_TILE.num_stages, 3, 2
# What a CTA that sends rows has in flight, in bytes. More takes from the product and sends no faster (benchmarks/notes.md).
STEP = 2048
# Two groups of 4 multiplying warps and up to 4 others, which load and store, share 65,536 registers: 168 a thread, until each
# group takes its own (hopper_scaled.registers). Triton counts the first group only.
LAUNCH = {"num_warps": HOPPER_TILE.num_warps, "maxnreg": 168}
MOST_DIRECT_PEERS = 7  # peers for which the Hopper kernel of GEMM + RS has a tensor descriptor
# A poll in Triton's interpreter takes about 0.1 ms, and the interpreter has no clock: its time-out is a number of polls.
_INTERPRETER_POLLS_PER_SECOND = 10_000

Replaced = tuple[tuple[str, ...], ...]  # names of arguments, see gpu/launch.py


def protocol_arguments(domain: OverlapDomain, call: Call, direct: bool) -> dict[str, Any]:
    """What tells a kernel of one call the protocol: rank, signals, epoch, counters, time limit, tag. direct: the kernel stores at
    the peers itself, and advances the epoch."""
    counters = call.slot.direct_counters if direct else call.slot.counters
    a_second = 1e9 if domain.on_gpu else _INTERPRETER_POLLS_PER_SECOND  # as kernels count: nanoseconds, or polls
    return dict(
        rank=domain.rank, signals_ptr=call.slot.signals, epoch_ptr=call.slot.epoch, outgoing_at_ptr=call.slot.outgoing_at,
        counter_ptr=counters.claimed, complete_ptr=counters.complete, left_ptr=counters.left,
        abort_ptr=domain.fault.abort, record_ptr=domain.fault.record, tag=call.tag.word,
        limit=int(domain.config.timeout_s * a_second),
    )  # fmt: skip


def _protocol_constants(domain: OverlapDomain, call: Call) -> dict[str, Any]:
    return dict(WORLD=domain.world_size, LOCAL=domain.topology.local, CHUNKS=call.chunks)


def grid_size(programs: int, device: torch.device, sm_margin: int, each: int = 1) -> tuple[int]:
    """So many CTAs per SM but those that are spared, or one per program if there are fewer, and at least one. One in the
    interpreter, which runs them in turn."""
    if device.type != "cuda":
        return (1,)
    return (max(1, min(programs, each * (multiprocessors(device) - sm_margin))),)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU; 132 on H100 and H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def receive_and_multiply(
    domain: OverlapDomain, call: Call, plan: EnginePlan, own: torch.Tensor, b: Right, y: torch.Tensor,
    bias: torch.Tensor | None = None, leaves: bool = False,
) -> None:  # fmt: skip
    """Launch the kernel that fills y with the product of what arrives:

        AG + GEMM    own [M/W, K]        y [M, N] = own and the peers' shards @ b_kn [K, N] + bias [N]
        A2A + GEMM   own [W, M/W, K/W]   y [M/W, N] = own and the peers' blocks, side by side, @ b_kn [K, N]

    By `direct` it also stores own at the peers. Else Hopper's reads its own block alone, and blocks may lie apart. leaves: it
    multiplies the chunks that are counted so far; the next launch goes on from there (kernels/arrivals.py).
    """
    own = readable(plan, own)
    b_kn, scaling = unscaled(own, b)
    own_at, bias_at = own.data_ptr(), 0
    if bias is not None:
        bias = readable(plan, bias)
        bias_at = bias.data_ptr()
    block = own[domain.rank] if plan.kind.sums_blocks else own
    addresses = (own_at if block is own else block.data_ptr(), own_at, b_kn.data_ptr(), y.data_ptr(), bias_at)
    # The call's launches are of one shape of blocks: with b's shape it gives those of own and y. A plan has a bias or none.
    is_aligned = None if plan.kernels == HOPPER else aligned(*addresses)  # Hopper's take aligned operands only
    key = (plan, leaves, b_kn.shape, b_kn.stride(), is_aligned)
    told = (domain, call, plan, own, block, b_kn, y, bias, leaves, scaling)
    values = (*addresses, call.tag.word)
    call.launches.run(key, values + scaling.addresses if scaling.inverses else values, _gather_launch, *told)


def readable(plan: EnginePlan, own: torch.Tensor) -> torch.Tensor:
    """`own`, or a copy where TMA could not read it: it wants its start aligned. A bias as well, else registers spill."""
    if plan.kernels != HOPPER or own.data_ptr() % 16 == 0:
        return own
    return own.clone(memory_format=torch.contiguous_format)


def multiply_and_send(
    domain: OverlapDomain, call: Call, plan: EnginePlan, a_mk: torch.Tensor, b: Right, staging: torch.Tensor | None,
    y: torch.Tensor, bias: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Launch the kernel that multiplies and fills `staging` [W, *y.shape], what the peers get, or, where that is None, the peers'
    slots; and y:

        GEMM + RS    y [M/W, N] from a_mk [M, K] @ b_kn [K, N], what the peers send and bias [N]; with
                     `EnginePlan.reduces_later` the own partial
        GEMM + A2A   y [M/W, N/W], the own block of a_mk [M/W, K] @ b_kn [K, N]
    """
    (b_kn, scaling), a_at, (pitch, step) = unscaled(a_mk, b), a_mk.data_ptr(), a_mk.stride()
    if plan.kernels == HOPPER and (a_at % 16 or step != 1 or pitch <= 0 or pitch * a_mk.itemsize % 16):
        # TMA could not read it: an expanded gradient, a slice that starts between 16-byte words
        a_mk = a_mk.clone(memory_format=torch.contiguous_format)
        a_at, (pitch, step) = a_mk.data_ptr(), a_mk.stride()
    y_at, bias_at = y.data_ptr(), 0
    if bias is not None:
        bias = readable(plan, bias)
        bias_at = bias.data_ptr()
    addresses = (a_at, b_kn.data_ptr(), y_at if staging is None else staging.data_ptr(), y_at, bias_at)
    is_aligned = None if plan.kernels == HOPPER else aligned(*addresses)
    key = (plan, pitch, step, b_kn.shape, b_kn.stride(), is_aligned)  # a's shape follows, as above
    told = (domain, call, plan, a_mk, b_kn, staging, y, bias, scaling)
    values = (*addresses, call.tag.word)
    call.launches.run(key, values + scaling.addresses if scaling.inverses else values, _scatter_launch, *told)


def multiply_and_push(
    domain: OverlapDomain, call: Call, plan: EnginePlan, a_mk: torch.Tensor, b: Right, staging: torch.Tensor, y: torch.Tensor,
    bias: torch.Tensor | None = None, gather: Call | None = None,
) -> None:  # fmt: skip
    """multiply_and_send into `staging`, whose chunks the copy engine pushes as soon as their tiles are counted. gather: the call
    by which it sends those of y on as well (`EnginePlan.shares`)."""
    count = tiles_of_chunk(plan, y)
    pushes = [(staging, call.routes(plan.transfers, tiles=count))]
    call.next_epoch()
    if gather is not None:
        gather.next_epoch()
        pushes.append((y, gather.routes_of_sums(call, OWN_TILE * count)))
    domain.engine.launch(lambda: multiply_and_send(domain, call, plan, a_mk, b, staging, y, bias), *pushes)


class Scaling(NamedTuple):
    """What a kernel of Hopper is told of operands in fp8. inverses: by what its product is multiplied, fp32 [1] of each operand,
    or of its blocks as a BlockMatrix has them, in packed rows their tails; none of other operands. fast: see Fp8Matrix."""

    inverses: tuple[torch.Tensor, ...] = ()
    fast: bool = False
    of_blocks: bool = False

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(inverse.data_ptr() for inverse in self.inverses)

    @property
    def constants(self) -> dict[str, Any]:
        from ..kernels.hopper_scaled import BLOCKS, PRECISE, TENSORS

        scaling = BLOCKS if self.of_blocks else TENSORS if self.fast else PRECISE
        return {"SCALING": scaling.value} if self.inverses else {}

    @property
    def replaced(self) -> Replaced:
        return (("a_scale_ptr",), ("b_scale_ptr",)) if self.inverses else ()

    @property
    def arguments(self) -> dict[str, Any]:
        return {name: one for (name,), one in zip(self.replaced, self.inverses, strict=True)}


UNSCALED = Scaling()


def unscaled(a: torch.Tensor, b: Right) -> tuple[torch.Tensor, Scaling]:
    """The numbers of a right operand [K, N], and what their product with a is scaled by."""
    if isinstance(b, Fp8Matrix):
        return b.b_nk.t(), Scaling((b.a_inverse, b.b_inverse), b.fast)
    if isinstance(b, BlockMatrix):
        a_inverse = tails(a, b.shape[0]) if b.a_inverse is None else b.a_inverse
        return b.b_nk.t(), Scaling((a_inverse, b.b_inverse), of_blocks=True)
    return b, UNSCALED


def tiles_of_chunk(plan: EnginePlan, y: torch.Tensor) -> int:
    """What a kernel has counted when it has stored a chunk of a block shaped as y."""
    rows, cols = y.shape
    return plan.tile.counted(rows // plan.chunks, cols)


def aligned(*addresses: int) -> tuple[bool, ...]:
    """What Triton compiles a kernel for: which pointers are on 16 bytes."""
    return tuple(address % 16 == 0 for address in addresses)


def bias_argument(bias: torch.Tensor | None) -> tuple[str, ...]:
    """Of Launch.replaced: without a bias (None, a constant) kernels have no such parameter, and are compiled as if there were
    none."""
    return () if bias is None else ("bias_ptr",)


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, as was decided when they were first imported."""
    from triton.runtime.interpreter import InterpretedFunction

    from ..kernels.all_gather_gemm import all_gather_gemm_kernel

    return isinstance(all_gather_gemm_kernel, InterpretedFunction)


def _gather_launch(
    domain: OverlapDomain, call: Call, plan: EnginePlan, own: torch.Tensor, block: torch.Tensor, b_kn: torch.Tensor,
    y: torch.Tensor, bias: torch.Tensor | None, leaves: bool, scaling: Scaling,
) -> Launch:  # fmt: skip
    """The Launch of receive_and_multiply. Values replaced at each launch: own block, own, b, y, bias, tag, scales. block: own
    [M/W, K] in AG + GEMM, this rank's block of own [W, M/W, K/W] in A2A + GEMM."""
    (m_shard, pitch), n, sends = own.shape[-2:], b_kn.shape[1], plan.method == "direct"
    exchange, gathered = plan.kind.sums_blocks, call.blocks.flatten(0, 1)
    k = pitch if exchange else b_kn.shape[0]  # packed rows are longer
    blocks = 1 if exchange else domain.world_size  # of rows of y
    received = "received" if exchange else "gathered"
    arguments: dict[str, Any] = dict(own_ptr=own, m_shard=m_shard, n=n, k=k) | ({} if exchange else {"bias_ptr": bias})
    if plan.kernels == HOPPER:
        arguments |= dict(
            own_desc=_panel(block[:, :k]), b_desc=_operand(b_kn, BLOCK_N), b_half_desc=_operand(b_kn, HALF_N),
            y_desc=stored(y, blocks * call.chunks),
        ) | {f"{received}_desc": _panel(gathered[:, :k])} | ({} if exchange else {"pitch": pitch})  # fmt: skip
        arguments |= {"gathered_scale_ptr": tails(gathered, k)} if scaling.of_blocks else {}
        constants = _hopper_constants(b_kn, STAGES) | {"STEP": STEP // own.itemsize}
        # Tiles may be cut into halves, and half as many still reach every SM. What sends rows does it from every SM.
        halves = 2 * HOPPER_TILE.count(m_shard // call.chunks, n, blocks * call.chunks)
        programs = multiprocessors(domain.device) if sends else halves
        replaced: Replaced = (("own_desc",), ("own_ptr",), ("b_desc", "b_half_desc"), ("y_desc",))
    else:
        arguments |= dict(b_ptr=b_kn, y_ptr=y, stride_bk=b_kn.stride(0), stride_bn=b_kn.stride(1))
        arguments[f"{received}_ptr"] = call.blocks
        constants, programs = _portable_constants(plan, domain), plan.tile.count(m_shard, n) * blocks
        replaced = ((), ("own_ptr",), ("b_ptr",), ("y_ptr",))  # it finds the own block from own
    arguments |= dict(
        sent_ptr=call.slot.direct_counters.sent, memory_at_ptr=call.slot.memory_at, leaves=int(leaves),
        here_ptr=call.slot.counters.here,
    )  # fmt: skip
    # PIECE: elements that are claimed and counted at once, of a chunk of fewer than 2^31 (4 GiB in bf16): 32 KB, which take a CTA
    # a few microseconds; two or more of a chunk in the tests.
    constants |= dict(DIRECT=sends, PIECE=(1 << 15) // own.itemsize if domain.on_gpu else 64)
    constants |= _protocol_constants(domain, call) | scaling.constants
    grid = grid_size(programs, domain.device, plan.sm_margin)
    arguments |= protocol_arguments(domain, call, sends) | scaling.arguments
    replaced += (bias_argument(bias), ("tag",), *scaling.replaced)
    return Launch(_kernel(plan), grid, arguments, constants, replaced)


def _scatter_launch(
    domain: OverlapDomain, call: Call, plan: EnginePlan, a_mk: torch.Tensor, b_kn: torch.Tensor,
    staging: torch.Tensor | None, y: torch.Tensor, bias: torch.Tensor | None, scaling: Scaling,
) -> Launch:  # fmt: skip
    """The Launch of multiply_and_send. Values replaced at each launch: a, b, staging (on Hopper unused where the kernel stores at
    the peers, else y then), y, bias, tag, scales."""
    m_shard, n = y.shape
    direct, exchange = staging is None, plan.kind.splits_columns
    adds = not exchange and not plan.reduces_later
    bias = bias if adds else None  # else who adds the partials adds it
    arguments: dict[str, Any] = dict(m_shard=m_shard, n=n, k=a_mk.shape[1], bias_ptr=bias)
    if plan.kernels == HOPPER:
        arguments |= dict(
            a_desc=_panel(a_mk), b_desc=_operand(b_kn, BLOCK_N), b_half_desc=_operand(b_kn, HALF_N),
            y_desc=stored(y, call.chunks), received_desc=descriptor(call.blocks.flatten(0, 1), PART_M, HALF_N),
        )  # fmt: skip
        arguments |= _places(domain, call, staging, arguments["y_desc"])
        run = units_in_run(plan.kind, domain.world_size, call.chunks, direct, adds)
        constants = _hopper_constants(b_kn, STAGES_DIRECT if direct else STAGES)
        constants |= {"RUN": run, "BUFFERS": BUFFERS_DIRECT if direct else 1}
        count = HOPPER_TILE.count(m_shard, n)
        written = () if direct else ("to1_desc",)
        replaced: Replaced = (("a_desc",), ("b_desc", "b_half_desc"), written, ("y_desc",))
    else:
        arguments |= dict(
            a_ptr=a_mk, b_ptr=b_kn, staging_ptr=y if staging is None else staging, received_ptr=call.blocks, y_ptr=y,
            stride_am=a_mk.stride(0), stride_ak=a_mk.stride(1), stride_bk=b_kn.stride(0), stride_bn=b_kn.stride(1),
            memory_at_ptr=call.slot.memory_at,
        )  # fmt: skip
        constants, count = _portable_constants(plan, domain), plan.tile.count(m_shard, n)
        replaced = (("a_ptr",), ("b_ptr",), ("staging_ptr",), ("y_ptr",))
    constants |= dict(DIRECT=direct, REDUCE=adds, EXCHANGE=exchange, SHARES=plan.shares)
    constants |= _protocol_constants(domain, call) | scaling.constants
    grid = grid_size(count * domain.world_size, domain.device, plan.sm_margin)
    arguments |= protocol_arguments(domain, call, direct) | scaling.arguments
    replaced += (bias_argument(bias), ("tag",), *scaling.replaced)
    return Launch(_kernel(plan), grid, arguments, constants, replaced)


def _kernel(plan: EnginePlan) -> Any:
    """The kernel of a plan. It imports Triton."""
    gathers = "all_to_all_gemm" if plan.kind.sums_blocks else "all_gather_gemm"
    name = "hopper_" * (plan.kernels == HOPPER) + (gathers if plan.kind.receives else "gemm_reduce_scatter")
    return getattr(import_module(f"...kernels.{name}", __name__), f"{name}_kernel")


def _places(domain: OverlapDomain, call: Call, staging: torch.Tensor | None, unused: Any) -> dict[str, Any]:
    """The descriptors of where the kernel stores the peers' blocks: in `staging`, or at each peer."""
    if staging is not None:
        places = [stored(staging.flatten(0, 1), domain.world_size * call.chunks)]
    else:
        places = [stored(call.remote_block(peer), call.chunks) for peer in call.peers] or [unused]
    places += places[:1] * (MOST_DIRECT_PEERS - len(places))  # every parameter wants a value
    return {f"to{step}_desc": place for step, place in enumerate(places, start=1)}


def _hopper_constants(b_kn: torch.Tensor, stages: int) -> dict[str, Any]:
    tile = dict(BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=PANEL_BYTES // b_kn.itemsize, GROUP_M=HOPPER_TILE.group_m)
    return dict(STAGES=stages, B_IS_NK=b_kn.stride(0) == 1, **tile, **LAUNCH)


def _portable_constants(plan: EnginePlan, domain: OverlapDomain) -> dict[str, Any]:
    tile = plan.tile
    return dict(
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m, num_warps=tile.num_warps,
        num_stages=tile.num_stages, PRECISION="ieee", TIMED=domain.on_gpu,
    )  # fmt: skip


def _panel(a_mk: torch.Tensor) -> Any:
    """The descriptor of a matrix [M, K] in panels, each of a strip's rows."""
    return descriptor(a_mk, PART_M, PANEL_BYTES // a_mk.itemsize)


def _operand(b_kn: torch.Tensor, cols: int) -> Any:
    """The descriptor of b_kn [K, N] as it lies in memory, [N, K] or [K, N], in panels of `cols` columns."""
    depth = PANEL_BYTES // b_kn.itemsize
    return descriptor(b_kn.t(), cols, depth) if b_kn.stride(0) == 1 else descriptor(b_kn, depth, cols)


def stored(matrix: torch.Tensor, chunks: int) -> Any:
    """The descriptor of a matrix [*, N] of `chunks` chunks of rows that is stored: TMA leaves out what lies beyond a chunk."""
    return descriptor(matrix.unflatten(0, (chunks, -1)), 1, PART_M, HALF_N)


def descriptor(tensor: torch.Tensor, *block: int) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, list(block), shared_layout(block, tensor.dtype))


@functools.cache
def shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float8e4nv, float16

    kinds = {torch.bfloat16: bfloat16, torch.float16: float16}  # a layout knows how many bits a number has
    return NVMMASharedLayout.get_default_for(list(block), kinds.get(dtype, float8e4nv))
