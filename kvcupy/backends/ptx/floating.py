"""Float arithmetic: f32 and f64 as NumPy does them, f16 and bf16 (also packed) through float64, each rounded once.

The approximate functions (ex2, lg2, rcp, rsqrt, ...) are computed in float64 and rounded, which is within the error
bounds that PTX gives; a GPU may differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvcupy.backends.ptx.assemble import Unsupported, Value
from kvcupy.backends.ptx.integer import halves_marked, packed
from kvcupy.backends.ptx.parse import Instruction
from kvcupy.backends.ptx.rounding import flush, fused_double, narrow, odd_sum, sum_for_float32
from kvcupy.backends.ptx.types import Array, DType, dtype_of

__all__ = ["BUILD", "compute_add", "compute_extreme"]

_Function = Callable[..., Array]


def _mode(ins: Instruction) -> str:
    return ins.one_of("rn", "rz", "rm", "rp") or "rn"


def _finish(ins: Instruction, function: _Function, dtype: DType) -> _Function:
    """The modifiers that change sources or result: .ftz, .sat, .relu."""
    if ins.has("ftz") and dtype == np.float32:
        plain = function

        def function(*values: Array) -> Array:
            return flush(plain(*(flush(value) for value in values)))

    unclamped = function
    if ins.has("sat"):
        # NaN becomes 0, and so does -0
        return lambda *values: np.clip(np.nan_to_num(unclamped(*values), nan=0.0), 0, 1).astype(dtype)
    if ins.has("relu"):
        return lambda *values: compute_extreme("max", dtype)(unclamped(*values), np.zeros(1, dtype))
    return function


def _value(ins: Instruction, function: _Function, kind: str) -> Value:
    """function works on arrays of the element type, packed or not."""
    d, *sources = ins.operands
    marks = None
    if kind.endswith("x2"):
        function = packed(_finish(ins, function, dtype_of(kind[:-2])), dtype_of(kind[:-2]))
        marks = halves_marked
    else:
        function = _finish(ins, function, dtype_of(kind))
    return Value([(d, kind)], [(source, kind) for source in sources], function, marks)


def _element(kind: str) -> DType:
    return dtype_of(kind.removesuffix("x2"))


def compute_add(dtype: DType, mode: str = "rn", subtract: bool = False) -> _Function:
    """x + y, or x - y."""

    def add(x: Array, y: Array) -> Array:
        if mode == "rn" and dtype.itemsize >= 4:
            return x - y if subtract else x + y
        wide = y.astype(np.float64)
        return narrow(odd_sum(x.astype(np.float64), -wide if subtract else wide), dtype, mode)

    return add


def _add(ins: Instruction) -> Value:
    kind = ins.parts[-1]
    mode = _mode(ins)
    if kind == "f64" and mode != "rn":
        raise Unsupported
    return _value(ins, compute_add(_element(kind), mode, ins.parts[0] == "sub"), kind)


def _multiply(ins: Instruction) -> Value:
    kind = ins.parts[-1]
    dtype, mode = _element(kind), _mode(ins)
    if kind == "f64" and mode != "rn":
        raise Unsupported

    def multiply(x: Array, y: Array) -> Array:
        if mode == "rn" and dtype.itemsize >= 4:
            return x * y
        return narrow(x.astype(np.float64) * y, dtype, mode)  # exact in float64

    return _value(ins, multiply, kind)


def _fused(ins: Instruction) -> Value:
    kind = ins.parts[-1]
    dtype, mode = _element(kind), _mode(ins)
    if kind == "f64":
        if mode != "rn":
            raise Unsupported
        return _value(ins, fused_double, kind)

    def fused_single(x: Array, y: Array, z: Array) -> Array:
        return sum_for_float32(x.astype(np.float64) * y, z).astype(np.float32)

    def fused(x: Array, y: Array, z: Array) -> Array:
        exact = x.astype(np.float64) * y.astype(np.float64)
        return narrow(odd_sum(exact, z.astype(np.float64)), dtype, mode)

    return _value(ins, fused_single if kind == "f32" and mode == "rn" else fused, kind)


def _divide(ins: Instruction) -> Value:
    kind = ins.parts[-1]
    if _mode(ins) != "rn":
        raise Unsupported
    return _value(ins, np.divide, kind)


def compute_extreme(which: str, dtype: DType, propagate_nan: bool = False) -> _Function:
    """min or max. A NaN loses against a number, unless it is to be propagated; -0 is less than +0."""
    choose: Any = getattr(np, f"{which}imum" if propagate_nan else f"f{which}")
    join: Any = np.bitwise_or if which == "min" else np.bitwise_and
    bits = np.dtype(f"u{dtype.itemsize}")

    def extreme(x: Array, y: Array) -> Any:
        if dtype.itemsize == 2:
            result = choose(x.astype(np.float32), y.astype(np.float32)).astype(dtype)
        else:
            result = choose(x, y)
        zero = result == 0
        if zero.any():
            signed = join(x.view(bits), y.view(bits)).view(dtype)
            result = np.where(zero & (x == y), signed, result)
        return result

    return extreme


def _extreme(ins: Instruction) -> Value:
    kind = ins.parts[-1]
    if ins.has("xorsign") or len(ins.operands) != 3:
        raise Unsupported
    return _value(ins, compute_extreme(ins.parts[0], _element(kind), ins.has("NaN")), kind)


def _sign_bit(ins: Instruction) -> Value:
    """neg and abs change one bit, also of a NaN."""
    kind = ins.parts[-1]
    bits = np.dtype(f"u{_element(kind).itemsize}")
    sign = bits.type(1 << (bits.itemsize * 8 - 1))
    dtype = _element(kind)

    def change(x: Array) -> Any:
        raw = x.view(bits)
        return (raw ^ sign if ins.parts[0] == "neg" else raw & ~sign).view(dtype)

    return _value(ins, change, kind)


def _copysign(ins: Instruction) -> Value:
    kind = ins.parts[-1]
    d, sign, magnitude = ins.operands
    return Value([(d, kind)], [(sign, kind), (magnitude, kind)], lambda s, m: np.copysign(m, s))


_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "rcp": lambda x: 1.0 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


def _unary(ins: Instruction) -> Value:
    kind = ins.parts[-1]
    dtype, function, mode = _element(kind), _FUNCTIONS[ins.parts[0]], _mode(ins)
    if mode != "rn":
        raise Unsupported
    # A square root or a quotient of float32 numbers, rounded to float64 first, never comes out as a tie of float32.
    return _value(ins, lambda x: narrow(function(x.astype(np.float64)), dtype), kind)


def _test_property(ins: Instruction) -> Value:
    kind = ins.parts[-1]
    d, x = ins.operands
    tiny = np.finfo(dtype_of(kind)).tiny
    tests: dict[str, Callable[[Array], Any]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= tiny),
        "subnormal": lambda x: (x != 0) & (np.abs(x) < tiny),
    }
    return Value([(d, "pred")], [(x, kind)], tests[ins.parts[1]])


BUILD: dict[str, Callable[[Instruction], Value]] = {
    "add": _add,
    "sub": _add,
    "mul": _multiply,
    "fma": _fused,
    "mad": _fused,
    "div": _divide,
    "min": _extreme,
    "max": _extreme,
    "neg": _sign_bit,
    "abs": _sign_bit,
    "copysign": _copysign,
    "testp": _test_property,
    **dict.fromkeys(_FUNCTIONS, _unary),
}
