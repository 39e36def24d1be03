"""The interpreter's short arithmetic against Triton's own: values, types, and what each handle says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from triton.language import core
from triton.runtime import interpreter

from tests import faster_interpreter
from tests.interpreter_arithmetic import NOT_HERE, shortened

pytestmark = pytest.mark.skipif(not faster_interpreter.is_installed(), reason="a Triton that it does not know")

ARITHMETIC = ["__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__", "__mod__"]
COMPARISONS = ["__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"]
SHIFTS, BITWISE = ["__rshift__", "__lshift__"], ["__and__", "__or__"]
SHAPES = [(None, None), (None, (4,)), ((4, 1), (1, 2)), ((2, 4), None), ((2, 4), (4,))]
NUMPY = {core.int1: np.bool_, core.int32: np.int32, core.int64: np.int64, core.float32: np.float32}
POINTER = core.pointer_type(core.float32)


def value(dtype: core.dtype, shape: tuple[int, ...] | None, seed: int) -> core.tensor:
    """A scalar where shape is None. Small numbers of either sign, none of them 0."""
    numbers = np.random.default_rng(seed).integers(1, 9, shape or (1,)) * (-1) ** seed
    data = numbers.astype(np.uint64) * 64 if dtype is POINTER else numbers.astype(NUMPY[dtype])
    return core.tensor(interpreter.TensorHandle(data, dtype), core.block_type(dtype, list(shape)) if shape else dtype)


def told(result: core.tensor) -> tuple[Any, ...]:
    """All that a kernel, or the interpreter, can see of it."""
    data = result.handle.data
    sizes = [size.value for size in result.shape]
    return (
        data.tolist(), data.shape, data.dtype, str(result.type), str(result.dtype), str(result.handle.dtype),
        result.numel.value, sizes, result.handle.attr,
    )  # fmt: skip


def is_as_tritons(name: str, left: core.tensor, right: Any) -> None:
    short = shortened(name)(left, right)
    assert short is not NOT_HERE, "Triton's own code would run"
    plain = getattr(core.tensor, name)(left, right, _semantic=interpreter.interpreter_semantic)
    assert told(short) == told(plain)


@pytest.mark.parametrize("name", ARITHMETIC + COMPARISONS)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("seeds", [(2, 3), (1, 1)])
def test_integers(name: str, shapes: tuple[Any, Any], seeds: tuple[int, int]) -> None:
    for left in (core.int32, core.int64):
        for right in (core.int32, core.int64):
            is_as_tritons(name, value(left, shapes[0], seeds[0]), value(right, shapes[1], seeds[1]))
        for number in (3, -3, core.constexpr(5), 2**31 - 1 if name in COMPARISONS else 7):
            is_as_tritons(name, value(left, shapes[0], seeds[0]), number)


@pytest.mark.parametrize("name", SHIFTS)
def test_shifts(name: str) -> None:
    for dtype in (core.int32, core.int64):
        for number in (3, core.constexpr(5), value(dtype, None, 2)):
            is_as_tritons(name, value(dtype, (4,), 1), number)


@pytest.mark.parametrize("name", BITWISE)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("dtype", [core.int1, core.int32, core.int64])
def test_bitwise(name: str, shapes: tuple[Any, Any], dtype: core.dtype) -> None:
    is_as_tritons(name, value(dtype, shapes[0], 1), value(dtype, shapes[1], 2))


@pytest.mark.parametrize("shapes", SHAPES)
def test_pointers(shapes: tuple[Any, Any]) -> None:
    pointer = value(POINTER, shapes[0], 2)
    for offset in (value(core.int32, shapes[1], 1), value(core.int64, shapes[1], 1), 5, -5, core.constexpr(2)):
        is_as_tritons("__add__", pointer, offset)
    is_as_tritons("__add__", value(core.int64, shapes[1], 1), pointer)


@pytest.mark.parametrize("name", ["__eq__", "__ne__"])
def test_truth_values_and_numbers(name: str) -> None:
    for number in (0, 1):
        is_as_tritons(name, value(core.int1, None, 2), number)
        is_as_tritons(name, value(core.int1, (4,), 2), number)


def test_casts_and_axes() -> None:
    for dtype in (core.int32, core.int64):
        for target in (core.int32, core.int64):
            is_as_tritons("to", value(dtype, (4,), 1), target)
            is_as_tritons("to", value(dtype, None, 1), target)
        for places in ((slice(None), None), (None, slice(None)), [None, slice(None), None]):
            is_as_tritons("__getitem__", value(dtype, (4,), 1), core.tuple(places))
    same = value(core.float32, (4,), 2)
    assert shortened("to")(same, core.float32) is same, "as Triton gives it back"


@pytest.mark.parametrize("name", ["__add__", "__sub__", "__mul__"])
def test_where_triton_looks_for_overflow_it_still_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(interpreter.interpreter_builder.options, debug=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    large = value(core.int32, (4,), 2)
    large.handle.data[:] = 2**30 + 1
    other = -(2**30) - 2 if name == "__sub__" else 2**30 + 1
    assert shortened(name)(large, other) is NOT_HERE
    with pytest.raises(AssertionError, match="overflow detected"):
        getattr(core.tensor, name)(large, other, _semantic=interpreter.interpreter_semantic)


@pytest.mark.parametrize("operand", [2.5, 2**31, True, value(core.float32, None, 2)])
def test_what_is_not_known_is_left_to_triton(operand: object) -> None:
    assert shortened("__add__")(value(core.int32, (4,), 2), operand) is NOT_HERE
    assert shortened("__neg__") is None
