"""Integer arithmetic of Triton's interpreter in one step: numpy's operation, and a type that is known already.

Triton asks of each operation what its operands are, casts and spreads both, and makes their types anew: 15 us where numpy takes
0.5. Here are the cases that kernels are full of: int32 and int64, offsets of pointers, comparisons. For all others `shortened`
says so, and Triton's own code runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter

NOT_HERE = object()  # the answer where Triton's own code has to run
Shortened = Callable[..., Any]  # of (tensor, operand); NOT_HERE for an operand that it does not know

_SIGNED = {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}
_BITS = 32  # of a number in a kernel's text that is an int32, to every operation
_types: dict[tuple[str, tuple[int, ...] | None], tuple[Any, Any, Any]] = {}  # (type, elements, shape) of tensors
_sizes: dict[str, int] = {}  # bytes of what a pointer points to
_scalars = {"int1": core.int1, "int32": core.int32, "int64": core.int64}
_builder = interpreter.interpreter_builder


def shortened(name: str) -> Shortened | None:
    """The method `name` of tensors in one step; None for a method that always takes Triton's own."""
    return _METHODS.get(name)


def _tensor(data: np.ndarray, element: core.dtype, scalar: core.dtype, is_block: bool) -> core.tensor:
    """As Triton makes it. scalar: what its values are; element: what its handle says, the operands' type for comparisons."""
    key = scalar.name, data.shape if is_block else None
    known = _types.get(key)
    if known is None:
        known = _types[key] = _type_of(scalar, key[1])
    tensor = object.__new__(core.tensor)
    tensor.handle = interpreter.TensorHandle(data, element)
    tensor.type, tensor.numel, tensor.shape = known
    tensor.dtype = scalar
    return tensor


def _type_of(scalar: core.dtype, shape: tuple[int, ...] | None) -> tuple[Any, Any, Any]:
    sizes = core.tuple([core.constexpr(size) for size in shape or ()])
    return core.block_type(scalar, list(shape)) if shape else scalar, core.constexpr(math.prod(shape or ())), sizes


def _operand(left: core.tensor, right: Any) -> tuple[Any, core.dtype, bool] | None:
    """(numpy's operand, the common type, whether one of both is a block) of two integers; None for anything else."""
    name, is_block = left.dtype.name, left.type.__class__ is core.block_type
    if name not in _SIGNED:
        return None
    if right.__class__ is core.tensor:
        other = right.dtype.name
        if other not in _SIGNED:
            return None
        common = left.dtype if other == name or name == "int64" else right.dtype
        return right.handle.data, common, is_block or right.type.__class__ is core.block_type
    number = _number(right)
    return None if number is None else (number, left.dtype, is_block)


def _number(value: Any) -> int | None:
    """A number of the kernel's text that fits into int32; None for anything else."""
    if value.__class__ is core.constexpr:
        value = value.value
    return value if value.__class__ is int and -(1 << _BITS - 1) <= value < 1 << _BITS - 1 else None


def _arithmetic(operation: Callable[..., np.ndarray], is_turned: bool = False) -> Shortened:
    """is_turned: the method is the one of the right operand, as in 2 - tensor."""

    def method(tensor: core.tensor, right: Any) -> Any:
        known = _operand(tensor, right)
        if known is None or _builder.options.debug:  # then Triton looks for overflow
            return NOT_HERE
        operand, common, is_block = known
        left, right = (operand, tensor.handle.data) if is_turned else (tensor.handle.data, operand)
        return _tensor(operation(left, right), common, common, is_block)

    return method


def _comparison(operation: Callable[..., np.ndarray]) -> Shortened:
    """Of integers, or of a truth value and a number: arrived == 0."""

    def method(tensor: core.tensor, right: Any) -> Any:
        if tensor.dtype.name == "int1" and (number := _number(right)) is not None:
            is_block = tensor.type.__class__ is core.block_type
            return _tensor(operation(tensor.handle.data, number), core.int32, core.int1, is_block)
        known = _operand(tensor, right)
        if known is None:
            return NOT_HERE
        operand, common, is_block = known
        return _tensor(operation(tensor.handle.data, operand), common, core.int1, is_block)

    return method


def _bitwise(operation: Callable[..., np.ndarray]) -> Shortened:
    """Of two tensors of one integer type, truth values included."""

    def method(tensor: core.tensor, right: Any) -> Any:
        if (
            right.__class__ is not core.tensor
            or tensor.dtype.name != right.dtype.name
            or right.dtype.name not in _scalars
        ):
            return NOT_HERE
        is_block = tensor.type.__class__ is core.block_type or right.type.__class__ is core.block_type
        return _tensor(operation(tensor.handle.data, right.handle.data), tensor.dtype, tensor.dtype, is_block)

    return method


def _sum(is_turned: bool) -> Shortened:
    """Of integers, or of a pointer and an offset."""
    of_integers = _arithmetic(np.add, is_turned)

    def method(tensor: core.tensor, right: Any) -> Any:
        if tensor.dtype.__class__ is core.pointer_type:
            return _moved(tensor, right)
        if not is_turned and right.__class__ is core.tensor and right.dtype.__class__ is core.pointer_type:
            return _moved(right, tensor)
        return of_integers(tensor, right)

    return method


def _moved(pointer: core.tensor, offset: Any) -> Any:
    """pointer + offset."""
    size, is_block = _size(pointer), pointer.type.__class__ is core.block_type
    if offset.__class__ is core.tensor:
        if offset.dtype.name not in _SIGNED:
            return NOT_HERE
        is_block = is_block or offset.type.__class__ is core.block_type
        moved = pointer.handle.data + offset.handle.data.astype(np.uint64) * np.uint64(size)
    else:
        number = _number(offset)
        if number is None:
            return NOT_HERE
        moved = pointer.handle.data + np.uint64(number * size % (1 << 64))
    return _tensor(moved, pointer.handle.dtype, pointer.dtype, is_block)


def _size(pointer: core.tensor) -> int:
    name = pointer.dtype.name
    known = _sizes.get(name)
    if known is None:
        known = _sizes[name] = max(1, pointer.handle.get_element_ty().primitive_bitwidth // 8)
    return known


def _quotient(left: np.ndarray, right: Any) -> np.ndarray:
    """Rounded towards zero, as Triton's interpreter does it."""
    return (left - np.fmod(left, right)) // right


def _to(tensor: core.tensor, dtype: Any) -> Any:
    """An integer as another one. Triton, too, gives back a tensor that has the type already."""
    if dtype.__class__ is not core.dtype:
        return NOT_HERE
    if tensor.dtype.name == dtype.name:
        return tensor
    if tensor.dtype.name not in _SIGNED or dtype.name not in _SIGNED:
        return NOT_HERE
    data = tensor.handle.data.astype(_SIGNED[dtype.name])
    return _tensor(data, dtype, dtype, tensor.type.__class__ is core.block_type)


def _with_axes(tensor: core.tensor, places: Any) -> Any:
    """A block with `None` among its axes: [:, None]."""
    values = places.values if places.__class__ is core.tuple else places
    if tensor.type.__class__ is not core.block_type or values.__class__ not in (list, tuple):
        return NOT_HERE
    if not all(value is None or (value.__class__ is slice and value == slice(None)) for value in values):
        return NOT_HERE
    return _tensor(tensor.handle.data[tuple(values)], tensor.handle.dtype, tensor.dtype, True)


_METHODS: dict[str, Shortened] = {
    "__add__": _sum(False),
    "__radd__": _sum(True),
    "__sub__": _arithmetic(np.subtract),
    "__rsub__": _arithmetic(np.subtract, True),
    "__mul__": _arithmetic(np.multiply),
    "__rmul__": _arithmetic(np.multiply, True),
    "__floordiv__": _arithmetic(_quotient),
    "__mod__": _arithmetic(np.fmod),
    "__rshift__": _arithmetic(np.right_shift),
    "__lshift__": _arithmetic(np.left_shift),
    "__lt__": _comparison(np.less),
    "__le__": _comparison(np.less_equal),
    "__gt__": _comparison(np.greater),
    "__ge__": _comparison(np.greater_equal),
    "__eq__": _comparison(np.equal),
    "__ne__": _comparison(np.not_equal),
    "__and__": _bitwise(np.bitwise_and),
    "__or__": _bitwise(np.bitwise_or),
    "to": _to,
    "__getitem__": _with_axes,
}
