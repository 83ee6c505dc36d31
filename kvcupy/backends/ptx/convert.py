"""cvt: between integers and floats, with every rounding mode, saturation and packing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvcupy.backends.ptx.assemble import Unsupported, Value, any_marked
from kvcupy.backends.ptx.bitwise import same_bits
from kvcupy.backends.ptx.floating import compute_extreme
from kvcupy.backends.ptx.parse import Instruction
from kvcupy.backends.ptx.rounding import flush, narrow, round_to_integer
from kvcupy.backends.ptx.types import BFLOAT16, Array, DType, dtype_of, width_of

__all__ = ["BUILD"]

_Convert = Callable[[Array], Array]


def _is_float(kind: str) -> bool:
    return kind[0] == "f" or kind.startswith("bf")


def _to_integer(x: Array, dtype: DType) -> Array:
    """An integral float64 to an integer: clamped to its range, NaN to 0."""
    limits = np.iinfo(dtype)
    low, high = float(limits.min), float(limits.max)  # the 64-bit maximum rounds up to a power of two
    above, below = x >= high, x <= low
    inside = np.where(above | below | np.isnan(x), 0.0, x).astype(dtype)
    return np.where(above, limits.max, np.where(below, limits.min, inside)).astype(dtype)


def _integer_to_integer(to: str, saturate: bool) -> _Convert:
    dtype = dtype_of(to)
    if not saturate:
        return lambda x: x.astype(dtype)
    limits = np.iinfo(dtype)

    def clamp(x: Array) -> Array:
        own = np.iinfo(x.dtype)
        low, high = max(limits.min, own.min), min(limits.max, own.max)
        return np.clip(x, x.dtype.type(low), x.dtype.type(high)).astype(dtype)

    return clamp


def _integer_to_float(to: str, source: str, mode: str) -> _Convert:
    dtype = dtype_of(to)
    if width_of(source) == 64:
        if mode != "rn" or dtype.itemsize < 4:
            raise Unsupported
        return lambda x: x.astype(dtype)
    return lambda x: narrow(x.astype(np.float64), dtype, mode)


def _float_to_float(ins: Instruction, to: str, source: str) -> _Convert:
    dtype = dtype_of(to)
    integral = ins.one_of("rni", "rzi", "rmi", "rpi")
    mode = ins.one_of("rn", "rz", "rm", "rp") or "rn"

    def convert(x: Array) -> Array:
        if ins.has("ftz") and source == "f32":
            x = flush(x)
        if integral:
            return round_to_integer(x.astype(np.float64), integral).astype(dtype)
        if dtype.itemsize >= x.dtype.itemsize and dtype != BFLOAT16:
            return x.astype(dtype)
        if dtype == BFLOAT16 and x.dtype == np.float32 and mode == "rn":
            return x.astype(dtype)
        if dtype == np.float16 and mode == "rn":
            return x.astype(dtype)
        return narrow(x.astype(np.float64), dtype, mode)

    clamps: list[_Convert] = []
    if ins.has("relu"):
        clamps.append(lambda x: compute_extreme("max", dtype)(x, np.zeros(1, dtype)))
    if ins.has("sat"):
        clamps.append(lambda x: np.where(x > 0, np.minimum(x, dtype.type(1)), dtype.type(0)))
    if ins.has("satfinite"):
        largest = (
            narrow(np.array([np.inf]), dtype, "rn") if dtype.itemsize > 4 else narrow(np.array([1e300]), dtype, "rz")
        )
        clamps.append(lambda x: np.where(np.isinf(x), np.copysign(largest, x), x))
    if not clamps:
        return convert

    def clamped(x: Array) -> Array:
        x = convert(x)
        for clamp in clamps:
            x = clamp(x)
        return x

    return clamped


def convert(ins: Instruction) -> Value:
    if ins.has("pack"):
        return _pack(ins)
    to, source = ins.parts[-2:]
    if to.endswith("x2"):
        return _pack_floats(ins, to, source)
    d, x = ins.operands
    if _is_float(to) and _is_float(source):
        return Value([(d, to)], [(x, source)], _float_to_float(ins, to, source))
    if _is_float(to):
        function = _integer_to_float(to, source, ins.one_of("rn", "rz", "rm", "rp") or "rn")
        return Value([(d, to)], [(x, source)], function)
    if _is_float(source):
        mode, dtype = ins.one_of("rni", "rzi", "rmi", "rpi") or "rzi", dtype_of(to)

        def to_integer(x: Array) -> Array:
            return _to_integer(round_to_integer(x.astype(np.float64), mode), dtype)

        return Value([(d, to)], [(x, source)], to_integer)
    function = _integer_to_integer(to, ins.has("sat"))
    return Value([(d, to)], [(x, source)], function, None if ins.has("sat") else same_bits(function, 1))


def _pack_floats(ins: Instruction, to: str, source: str) -> Value:
    """Two floats into the halves of a register, the first into the upper one."""
    d, high, low = ins.operands
    function = _float_to_float(ins, to[:-2], source)

    def pack(high: Array, low: Array) -> Any:
        upper, lower = (function(value).view(np.uint16).astype(np.uint32) for value in (high, low))
        return (upper << np.uint32(16)) | lower

    def marks(values: Sequence[Array], marks: Sequence[Array | None]) -> Any:
        halves = [np.zeros(1, np.uint32) if mark is None else (mark != 0) * np.uint32(0xFFFF) for mark in marks]
        return (halves[0] << np.uint32(16)) | halves[1]

    return Value([(d, "b32")], [(high, source), (low, source)], pack, marks)


def _pack(ins: Instruction) -> Value:
    """cvt.pack.sat: two integers, clamped, into the low end of a register, and what was there moved up."""
    to, source = ins.parts[3:5]
    d, a, b, *rest = ins.operands
    bits, convert_one = width_of(to), _integer_to_integer(to, True)
    unsigned = np.dtype(f"u{bits // 8}")

    def pack(a: Array, b: Array, *c: Array) -> Any:
        upper, lower = (convert_one(value).view(unsigned).astype(np.uint32) for value in (a, b))
        result = (upper << np.uint32(bits)) | lower
        return result | (c[0] << np.uint32(2 * bits)) if c else result

    sources = [(a, source), (b, source), *[(c, "b32") for c in rest]]
    return Value([(d, "b32")], sources, pack, any_marked)


BUILD: dict[str, Callable[[Instruction], Value]] = {"cvt": convert}
