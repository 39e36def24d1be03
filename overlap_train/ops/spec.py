"""The operators, one row each; what may be wrong with a call's arguments.

A check that fails is reported as text instead of raised: the ranks of a group exchange the texts, and all of them raise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..schedule.kinds import Kind

PLAIN = (torch.Tensor, torch.nn.Parameter)
PLAIN_OR_NONE = (*PLAIN, type(None))
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # x, w, bias
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def autocast_error(name: str, x: torch.Tensor) -> str | None:
    """What is wrong where autocast gives products another dtype than x's, or None. Libraries follow autocast and our kernels do
    not: the method would decide the dtype."""
    dtype = other_autocast(x)
    if dtype is None:
        return None
    return (
        f"{name}: autocast to {dtype} is on, the input has {x.dtype}, and operators multiply in the dtype of their input; cast "
        f"input and weight, or call inside torch.autocast({x.device.type!r}, enabled=False)"
    )


def other_autocast(x: torch.Tensor) -> torch.dtype | None:
    """Another dtype than x's that autocast gives to products, or None. Off everywhere, as mostly, it costs 0.1 microseconds."""
    if not torch._C._is_any_autocast_enabled():
        return None
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return None if dtype == x.dtype else dtype


def refuse_non_tensors(name: str, tensors: Mapping[str, object]) -> None:
    """Raise ValueError for what is no tensor at all, None included, on this rank alone: it has no shape to speak of to others."""
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ValueError(tensor_error(name, tensors))


def tensor_error(name: str, tensors: Mapping[str, object]) -> str | None:
    """What is wrong with operands that are no plain tensors, or None. tensors: by name."""
    if torch._C._are_functorch_transforms_active():
        return f"{name}: inside a transform of torch.func; operators have no rules for these: use torch.autograd"
    for what, tensor in tensors.items():
        kind: Any = type(tensor)
        if not isinstance(tensor, torch.Tensor):
            return f"{name}: {what} is a {kind.__name__}; it must be a torch.Tensor"
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            way = "pass a tensor with memory of its own"
            if hasattr(tensor, "to_local"):
                way = f"shard it over the group's ranks as the operator says, or pass its shard, {what}.to_local()"
            return f"{name}: {what} is a {kind.__name__}, and operators send what lies in memory; {way}"
    return None


def shapes_of(x: torch.Tensor, w: torch.Tensor) -> str:
    return f"input {list(x.shape)}, weight {list(w.shape)}, {str(x.dtype).removeprefix('torch.')}"


def no_fp8_on(device: torch.device, fp8: str) -> str | None:
    """Why a GPU does not multiply in fp8, None: it does. fp8: as in OverlapConfig."""
    capability = torch.cuda.get_device_capability(device)
    cuda = tuple(map(int, (torch.version.cuda or "0.0").split(".")))
    if fp8 == "blockwise" and (capability[0] != 9 or cuda < (12, 9)):
        return f"cuBLASLt takes scales of blocks on Hopper, from CUDA 12.9 on; here is {torch.version.cuda}"
    return "tensor cores multiply fp8 from Ada on" if capability < (8, 9) else None


def misfit_in_fp8(fp8: str, rows: int, sides: tuple[int, ...], world_size: int, w_name: str = "a weight") -> str | None:
    """Which size the three passes do not take in fp8, in words; None: they take so many rows of all ranks, and a weight with
    these two sides. fp8: as in OverlapConfig. Tensor cores want multiples of 16, blocks are of 128."""
    least = 128 if fp8 == "blockwise" else 16
    ranks = world_size if fp8 == "blockwise" else 1
    if rows % (least * ranks):
        return f"{rows} rows of all ranks: not a multiple of {f'{ranks} x ' if ranks > 1 else ''}{least}"
    return f"{w_name} {sides}: not a multiple of {least}" if any(side % least for side in sides) else None


@dataclass(frozen=True)
class OperatorSpec:
    """One operator.

    fprop: the kind of the forward pass; Kind.dgrad is that of the input gradient. x_name, w_name: in its signature; "": an
    exchange alone, which multiplies nothing. replicated: every rank has all rows. So nothing is gathered before a product, and
    what the scattering pass adds is gathered again: it all-reduces.
    """

    name: str
    fprop: Kind
    x_name: str = ""
    w_name: str = ""
    replicated: bool = False

    @property
    def multiplies(self) -> bool:
        return bool(self.w_name)

    @property
    def sends_input(self) -> bool:
        """Whether forward sends the input, which the weight gradient then needs from the peers."""
        return self.fprop.receives

    def error(
        self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, world_size: int, name: str, takes_fp8: bool = False,
    ) -> str | None:  # fmt: skip
        """What is wrong with the arguments of a call, or None. name: of the linear. takes_fp8: also a weight that is in fp8 with
        its scale."""
        if not self.multiplies:  # who makes x has looked at it, and the product at w
            return None
        x_name, w_name = self.x_name, self.w_name
        if x.dim() < 2 or w.dim() != 2:
            shapes = f"{x_name} has shape {tuple(x.shape)} and {w_name} {tuple(w.shape)}"
            return f"{name}: {shapes}; they need at least 2, and exactly 2 dimensions"
        of_input = world_size if self.fprop.sums_blocks else 1  # x has this part of the features of w's input
        if x.shape[-1] * of_input != w.shape[1]:
            ranks = "" if of_input == 1 else f" from {of_input} ranks together"
            return (
                f"{name}: {x_name} has {x.shape[-1]} features (last dimension of {tuple(x.shape)}), {w_name} "
                f"{tuple(w.shape)} expects {w.shape[1]}{ranks}; they must be equal"
            )
        if x.numel() == 0 or w.numel() == 0:
            return f"{name}: {x_name} {tuple(x.shape)} or {w_name} {tuple(w.shape)} is empty; dimensions must be at least 1"
        if x.dtype not in DTYPES:
            return f"{name}: {x_name} has dtype {x.dtype}; supported are {', '.join(map(str, DTYPES))}"
        has_scale = takes_fp8 and getattr(getattr(w, "fp8_copies", None), "inverse", None) is not None
        dtype_of_w = torch.float8_e4m3fn if has_scale else x.dtype
        for its, other, dtype in ((w_name, w, dtype_of_w), ("bias", x if bias is None else bias, x.dtype)):
            if other.dtype != dtype:
                return f"{name}: {its} has dtype {other.dtype}, {x_name} {x.dtype}; they must be the same: cast one of them"
            if other.device != x.device:
                return f"{name}: {its} is on {other.device}, {x_name} on {x.device}; move one of them"
        if bias is not None and bias.shape != w.shape[:1]:
            return f"{name}: bias has shape {tuple(bias.shape)}; it must be [{w.shape[0]}], one per row of {w_name}"
        if self.fprop.splits_columns and w.shape[0] % world_size:
            return (
                f"{name}: w has shape {tuple(w.shape)}; its {w.shape[0]} output features must be divisible by the group's "
                f"{world_size} ranks, since each rank gets that part of them; use another size or group"
            )
        if self._has_all_rows and not self.replicated and x.shape[0] % world_size:
            return (
                f"{name}: {x_name} has shape {tuple(x.shape)}; its first dimension must be divisible by the group's "
                f"{world_size} ranks, since each rank keeps that part of the output; pad the sequence to a multiple of "
                f"{world_size}"
            )
        return None

    def fp8_error(
        self, x: torch.Tensor, w: torch.Tensor, world_size: int, nodes: int, name: str, fp8: str
    ) -> str | None:
        """What is wrong with a call in fp8 whose arguments are right else, or None. name: of the linear. fp8: which."""
        off = "use fp8='off' (leave out --overlap-train-fp8, or take --overlap-train-on-unsupported fallback)"
        if self.replicated or self.fprop.exchanges or not self.multiplies:
            return f"{name}: {self.name} has no form in fp8; {off}"
        if nodes > 1:
            return (
                f"{name}: fp8 in a group of {nodes} nodes: operands with one byte an element stay inside a node; {off}"
            )
        if x.is_cuda and (where := no_fp8_on(x.device, fp8)) is not None:
            return f"{name}: fp8={fp8!r} on {torch.cuda.get_device_name(x.device)}: {where}; {off}"
        if x.is_cuda and x.dtype == torch.float32:
            return f"{name}: fp8 with {self.x_name} in float32: cuBLASLt gives bfloat16 or float16; cast it, or {off}"
        misfit = misfit_in_fp8(fp8, self.global_rows(x, world_size), tuple(w.shape), world_size, self.w_name)
        return None if misfit is None else f"{name}: fp8 with {misfit}; pad it, or {off}"

    @property
    def _has_all_rows(self) -> bool:
        """Whether x has the rows of all ranks."""
        return self.replicated or not (self.fprop.gathers or self.fprop.splits_columns)

    def global_rows(self, x: torch.Tensor, world_size: int) -> int:
        """M: the rows of all ranks; of an all-reduce with those that fill them up to a multiple of the ranks."""
        rows = x.shape[:-1].numel()
        return rows + self.replicated * (-rows % world_size) if self._has_all_rows else rows * world_size

    def slot_bytes(self, x: torch.Tensor, w: torch.Tensor, world_size: int) -> int:
        """Bytes of a slot: of what forward receives or, if it sends its output, of what backward receives, which is as large."""
        features = (x.shape[-1:] if self.sends_input else w.shape[:1]).numel()
        whole = self.global_rows(x, world_size) * features * x.element_size()
        return whole // world_size if self.fprop.splits_columns else whole


ALL_GATHER_LINEAR = OperatorSpec("all_gather_linear", Kind.AG_GEMM, "x_shard_m", "w_shard_n")
LINEAR_REDUCE_SCATTER = OperatorSpec("linear_reduce_scatter", Kind.GEMM_RS, "x_shard_k", "w_shard_k")
LINEAR_DGRAD_ALL_REDUCE = OperatorSpec("linear_dgrad_all_reduce", Kind.AG_GEMM, "x", "w_shard_n", replicated=True)
LINEAR_ALL_REDUCE = OperatorSpec("linear_all_reduce", Kind.GEMM_RS, "x_shard_k", "w_shard_k", replicated=True)
LINEAR_ALL_TO_ALL = OperatorSpec("linear_all_to_all", Kind.GEMM_A2A, "x_shard_m", "w")
ALL_TO_ALL_LINEAR = OperatorSpec("all_to_all_linear", Kind.A2A_GEMM, "x_shard_k", "w")
EXPERT_ROUTING = OperatorSpec("expert_routing", Kind.AG_GEMM)  # counts alone
DISPATCH_LINEAR = OperatorSpec("dispatch_linear", Kind.DISPATCH_GEMM, "x", "w")  # of experts: ops/experts.py
LINEAR_COMBINE = OperatorSpec("linear_combine", Kind.GEMM_COMBINE, "a", "w")
# Beside a product of another group (ulysses/two_groups.py). x: what one rank sends, the columns of all ranks side by side.
ALL_TO_ALL = OperatorSpec("all_to_all", Kind.A2A_GEMM)


def local_operands(
    spec: OperatorSpec, group: dist.ProcessGroup, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x, w and bias of a tensor-parallel linear, with this rank's part of each DTensor that lies over the group's ranks as the
    operator means. Others stay as they are, and `tensor_error` refuses them."""
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

    ranks = dist.get_process_group_ranks(group)
    of_x = Replicate() if spec.replicated else Shard(0)
    meant = (
        (of_x, Shard(0), Shard(0)) if spec.sends_input else (Shard(getattr(x, "ndim", 1) - 1), Shard(1), Replicate())
    )

    def local(tensor: Any, placement: Placement) -> Any:
        if (
            not isinstance(tensor, DTensor)
            or tensor.device_mesh.mesh.tolist() != ranks
            or tensor.placements != (placement,)
        ):
            return tensor
        # Of a bias that all ranks have each knows the gradient of its own rows, or of all.
        is_partial = placement.is_replicate() and not spec.replicated
        shard = tensor.to_local(grad_placements=[Partial()] if is_partial else None)
        return shard.wait() if hasattr(shard, "wait") else shard  # on its way, after redistribute(async_op=True)

    return local(x, meant[0]), local(w, meant[1]), local(bias, meant[2])
