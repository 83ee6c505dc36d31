"""Integer arithmetic. NumPy wraps around as the hardware does; what differs (division, wide products) is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvcupy.backends.ptx.assemble import Unsupported, Value
from kvcupy.backends.ptx.parse import Instruction
from kvcupy.backends.ptx.types import Array, dtype_of, width_of

__all__ = ["BUILD"]

_Binary = Callable[[Array, Array], Array]


def divide(x: Array, y: Array) -> Array:
    """Towards zero. Division by zero gives all ones, as the hardware does."""
    zero = y == 0
    safe = np.where(zero, np.ones_like(y), y)
    quotient = x // safe
    if x.dtype.kind == "i":
        inexact = (quotient * safe != x) & ((x < 0) != (safe < 0))
        quotient = quotient + inexact
    return np.where(zero, ~np.zeros_like(x), quotient)


def remainder(x: Array, y: Array) -> Array:
    zero = y == 0
    return np.where(zero, x, x - divide(x, np.where(zero, np.ones_like(y), y)) * y)


def multiply_high(x: Array, y: Array) -> Any:
    """The upper half of the product."""
    bits = x.dtype.itemsize * 8
    if bits < 64:
        wide = np.dtype(f"{x.dtype.kind}{x.dtype.itemsize * 2}")
        return ((x.astype(wide) * y.astype(wide)) >> wide.type(bits)).astype(x.dtype)
    unsigned = [value.astype(np.uint64) for value in (x, y)]
    (x0, x1), (y0, y1) = ((value & np.uint64(0xFFFFFFFF), value >> np.uint64(32)) for value in unsigned)
    middle = x1 * y0 + (x0 * y0 >> np.uint64(32))
    carry = (middle & np.uint64(0xFFFFFFFF)) + x0 * y1
    high = x1 * y1 + (middle >> np.uint64(32)) + (carry >> np.uint64(32))
    if x.dtype.kind == "i":
        high = high - np.where(x < 0, unsigned[1], 0) - np.where(y < 0, unsigned[0], 0)
    return high.astype(x.dtype)


def _saturating(function: _Binary) -> _Binary:
    """For 32-bit sums and differences: clamped, not wrapped."""

    def compute(x: Array, y: Array) -> Array:
        limits = np.iinfo(x.dtype)
        return np.clip(function(x.astype(np.int64), y.astype(np.int64)), limits.min, limits.max).astype(x.dtype)

    return compute


def halves_marked(values: Sequence[Array], marks: Sequence[Array | None]) -> Array | None:
    """For packed types: each 16-bit half is undefined if that half of any source is."""
    result: Array | None = None
    for mark in marks:
        if mark is not None:
            halves = np.where(mark.view(np.uint16) != 0, np.uint16(0xFFFF), np.uint16(0)).view(np.uint32)
            result = halves if result is None else result | halves
    return result


def packed(function: Callable[..., Array], half: np.dtype[Any]) -> Callable[..., Array]:
    """The function on both 16-bit halves of 32-bit registers."""

    def compute(*values: Array) -> Array:
        halves = [np.ascontiguousarray(value).view(half).reshape(-1, 2) for value in values]
        result = np.ascontiguousarray(function(*halves))
        return result.view(np.uint32).reshape(-1)

    return compute


_BINARY: dict[str, _Binary] = {
    "add": np.add,
    "sub": np.subtract,
    "div": divide,
    "rem": remainder,
    "min": np.minimum,
    "max": np.maximum,
}


def binary(ins: Instruction) -> Value:
    kind = ins.parts[-1]
    function = _BINARY[ins.parts[0]]
    d, x, y = ins.operands
    if ins.has("cc"):
        raise Unsupported
    if ins.has("sat"):
        function = _saturating(function)
    if kind.endswith("x2"):
        half = dtype_of(kind[:-2])
        return Value([(d, kind)], [(x, kind), (y, kind)], packed(function, half), halves_marked)
    return Value([(d, kind)], [(x, kind), (y, kind)], function)


def _product(ins: Instruction) -> tuple[str, Callable[[Array, Array], Array]]:
    """The type of the product, and the function."""
    kind = ins.parts[-1]
    if ins.has("wide"):
        wide = f"{kind[0]}{width_of(kind) * 2}"
        dtype = dtype_of(wide)
        return wide, lambda x, y: x.astype(dtype) * y.astype(dtype)
    return kind, multiply_high if ins.has("hi") else np.multiply


def multiply(ins: Instruction) -> Value:
    kind = ins.parts[-1]
    wide, function = _product(ins)
    d, x, y = ins.operands
    return Value([(d, wide)], [(x, kind), (y, kind)], function)


def multiply_add(ins: Instruction) -> Value:
    kind = ins.parts[-1]
    if ins.has("cc", "sat"):
        raise Unsupported
    wide, function = _product(ins)
    d, x, y, z = ins.operands
    return Value([(d, wide)], [(x, kind), (y, kind), (z, wide)], lambda x, y, z: function(x, y) + z)


def _popcount(x: Array) -> Array:
    return np.bitwise_count(x)


def _leading_zeros(x: Array) -> Array:
    bits = x.dtype.itemsize * 8
    for shift in (1, 2, 4, 8, 16, 32):
        if shift < bits:
            x = x | (x >> x.dtype.type(shift))
    return bits - np.bitwise_count(x).astype(np.uint32)


def _reversed_bits(x: Array) -> Array:
    bits = np.unpackbits(np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(x.dtype).reshape(-1)


def _first_one(x: Array) -> Array:
    """Position of the highest bit that differs from the sign, or all ones."""
    x = np.where(x < 0, ~x, x).astype(f"u{x.itemsize}")
    found = x.dtype.itemsize * 8 - 1 - _leading_zeros(x).astype(np.int64)
    return found.astype(np.uint32)


_UNARY: dict[str, tuple[Callable[[Array], Array], bool]] = {
    "neg": (np.negative, False),
    "abs": (np.abs, False),
    "popc": (_popcount, True),
    "clz": (_leading_zeros, True),
    "bfind": (_first_one, True),
    "brev": (_reversed_bits, False),
}


def unary(ins: Instruction) -> Value:
    kind = ins.parts[-1]
    function, counts = _UNARY[ins.parts[0]]
    d, x = ins.operands
    if ins.has("shiftamt", "sat"):
        raise Unsupported
    if kind.endswith("x2"):
        return Value([(d, kind)], [(x, kind)], packed(function, dtype_of(kind[:-2])), halves_marked)
    return Value([(d, "u32" if counts else kind)], [(x, kind)], function)


def dot(ins: Instruction) -> Value:
    """dp4a: four products of bytes added to a 32-bit sum; dp2a: two of the four bytes of b with 16-bit a."""
    first, second = ins.parts[-2:]
    d, a, b, c = ins.operands
    result = "s32" if "s" in first[0] + second[0] else "u32"

    def bytes_of(x: Array, kind: str, dtype: str) -> Array:
        return np.ascontiguousarray(x).view(f"{'i' if kind[0] == 's' else 'u'}{dtype}").reshape(len(x), -1)

    def dp4a(x: Array, y: Array, z: Array) -> Any:
        products = bytes_of(x, first, "1").astype(np.int32) * bytes_of(y, second, "1").astype(np.int32)
        return products.sum(axis=1, dtype=np.int64).astype(z.dtype) + z

    def dp2a(x: Array, y: Array, z: Array) -> Any:
        chosen = bytes_of(y, second, "1")[:, 2:] if ins.has("hi") else bytes_of(y, second, "1")[:, :2]
        products = bytes_of(x, first, "2").astype(np.int64) * chosen.astype(np.int64)
        return products.sum(axis=1).astype(z.dtype) + z

    function = dp4a if ins.parts[0] == "dp4a" else dp2a
    return Value([(d, result)], [(a, "b32"), (b, "b32"), (c, result)], function)


BUILD: dict[str, Callable[[Instruction], Value]] = {
    **dict.fromkeys(_BINARY, binary),
    **dict.fromkeys(_UNARY, unary),
    "mul": multiply,
    "mad": multiply_add,
    "dp4a": dot,
    "dp2a": dot,
}
