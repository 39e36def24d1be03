"""Makes Triton's interpreter several times as fast: it works out shapes, types and their names anew for every value.

Results are the same, but for tl.maximum, which takes the number beside a NaN, as a GPU does. Nothing else is changed in versions
of Triton whose inside has not been looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests import interpreter_arithmetic

_KNOWN_VERSIONS = ("3.6.",)


def install() -> None:
    """For this process, from now on."""
    interpreter.InterpreterBuilder.create_maxnumf = _maximum
    if not triton.__version__.startswith(_KNOWN_VERSIONS) or is_installed():
        return
    core.tensor.__init__ = _init_tensor
    core.block_type.__init__ = _init_block_type
    core.tuple.__init__, core.tuple.__getattr__ = _init_tuple, _type_of_tuple_or_field
    core._unwrap_if_constexpr = _unwrapped
    interpreter._get_np_dtype = _np_dtype
    interpreter.TensorHandle.__init__ = _init_handle
    interpreter.InterpreterBuilder.binary_op = _binary_op
    interpreter._patch_lang, interpreter._patch_attr = _patch_lang, _patch_attr
    TritonSemantic.to_tensor = _to_tensor
    TritonSemantic.binary_op_type_checking_impl = _checked
    TritonSemantic.broadcast_impl_value = _broadcast


def is_installed() -> bool:
    """In this process."""
    return core.tensor.__init__ is _init_tensor


def _maximum(self: Any, lhs: Any, rhs: Any) -> interpreter.TensorHandle:
    return self.binary_op(lhs, rhs, np.fmax)


_shapes: dict[tuple[int, ...], tuple[core.constexpr, core.tuple]] = {}  # (elements, shape) of tensors
_block_types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
_np_dtypes: dict[str, Any] = {}
_plain_block_type, _plain_field = core.block_type.__init__, core.tuple.__getattr__
_plain_unwrap, _plain_np_dtype = core._unwrap_if_constexpr, interpreter._get_np_dtype
_plain_binary_op = interpreter.InterpreterBuilder.binary_op
_plain_patch_lang, _plain_to_tensor = interpreter._patch_lang, TritonSemantic.to_tensor
_plain_checked, _plain_broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
_LANGUAGE = SimpleNamespace(__globals__={"tl": triton.language, "core": core})
_ALREADY = SimpleNamespace(restore=lambda: None)
_CHECKING = core.builtin(_plain_unwrap).__code__  # of every function that Triton has marked as its own
_INTEGERS = {"int32": (-(2**31), 2**31, np.int32), "int64": (-(2**63), 2**63, np.int64)}  # lowest, behind the highest


def _init_tensor(self: core.tensor, handle: object, type: core.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    shape = tuple(type.shape) if type.is_block() else ()
    known = _shapes.get(shape)
    if known is None:
        known = core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])
        _shapes[shape] = known
    self.numel, self.shape = known


def _init_block_type(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
    key = element_ty.name, tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
    known = _block_types.get(key)
    if known is None:
        _plain_block_type(self, element_ty, shape)
        _block_types[key] = dict(vars(self))
    else:
        vars(self).update(known)
        self.element_ty = element_ty


def _init_tuple(self: core.tuple, args: Any, type: Any = None) -> None:
    """The type of its values is worked out when somebody asks for it, which is rare."""
    self.values = [*args]
    if type is not None:
        self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)


def _type_of_tuple_or_field(self: core.tuple, name: str) -> Any:
    if name != "type":
        return _plain_field(self, name)
    self.type = core._type_for_tuple_values(self.values)
    return self.type


def _unwrapped(value: Any) -> Any:
    kind = value.__class__
    if kind is core.constexpr:
        return value.value
    return _plain_unwrap(value) if kind is list or kind is tuple or kind is core.tuple else value


def _np_dtype(dtype: core.dtype) -> Any:
    element = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
    name = "pointer" if isinstance(element, core.pointer_type) else element.name
    known = _np_dtypes.get(name)
    if known is None:
        known = _np_dtypes[name] = _plain_np_dtype(element)
    return known


def _init_handle(
    self: interpreter.TensorHandle, data: Any, dtype: core.dtype, attr: dict[str, Any] | None = None
) -> None:
    """Without a check of the size of dtypes, which Triton itself has chosen."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def _binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> interpreter.TensorHandle:
    output = op(lhs.data, rhs.data)
    if output.itemsize > lhs.data.itemsize:  # numpy has taken a wider type
        return _plain_binary_op(self, lhs, rhs, op)
    return interpreter.TensorHandle(output, lhs.dtype.scalar)


def _patch_lang(fn: Any) -> Any:
    """Once for a kernel. Triton does it again for each function that the kernel calls: two thirds of the time of many kernels."""
    if "__index__" in vars(core.tensor):  # what nothing but the interpreter gives it
        return _ALREADY
    return _plain_patch_lang(_LANGUAGE)


def _to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
    """Every assignment of a kernel goes through here."""
    return x if x.__class__ is core.tensor else _plain_to_tensor(self, x, check_type)


def _patch_attr(obj: object, name: str, member: Any, builder: object, scope: Any) -> None:
    """`member` without its own check that it was given a `_semantic`, which it is given here."""
    semantic = TritonSemantic(builder)
    plain = member.__wrapped__ if getattr(member, "__code__", None) is _CHECKING else member

    def with_semantic(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return plain(*args, **kwargs)

    short = interpreter_arithmetic.shortened(name) if obj is core.tensor else None
    scope.set_attr(obj, name, with_semantic if short is None else _shortened(short, with_semantic))


def _shortened(short: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def method(tensor: core.tensor, *args: Any, **kwargs: Any) -> Any:
        result = short(tensor, args[0]) if len(args) == 1 and not kwargs else interpreter_arithmetic.NOT_HERE
        return plain(tensor, *args, **kwargs) if result is interpreter_arithmetic.NOT_HERE else result

    return method


def _checked(self: Any, lhs: Any, rhs: Any, *rules: bool, **named: bool) -> tuple[Any, Any]:
    """Operands of one type and shape, in short for two integers of one type, or one and a number that fits."""
    known = _INTEGERS.get(lhs.dtype.name) if lhs.__class__ is core.tensor else None
    if known is not None and rhs.__class__ is core.tensor and rhs.dtype.name == lhs.dtype.name:
        return self.broadcast_impl_value(lhs, rhs)
    if known is not None and rhs.__class__ is int and known[0] <= rhs < known[1]:
        number = interpreter.TensorHandle(np.array([rhs], dtype=known[2]), lhs.dtype)
        return self.broadcast_impl_value(lhs, core.tensor(number, lhs.dtype))
    return _plain_checked(self, lhs, rhs, *rules, **named)


def _broadcast(self: Any, lhs: core.tensor, rhs: core.tensor) -> tuple[Any, Any]:
    left, right = lhs.type, rhs.type
    if left.__class__ is core.block_type and right.__class__ is core.block_type:
        alike = left.shape.values == right.shape.values
    else:
        alike = not left.is_block() and not right.is_block()
    return (lhs, rhs) if alike else _plain_broadcast(self, lhs, rhs)
