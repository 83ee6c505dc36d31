"""Rounding once. NumPy has neither a fused multiply-add nor any rounding but to nearest.

What makes both possible is rounding to odd: a float64 that is not exact gets its last bit set. It then lies strictly
on the right side of every tie of a narrower type, so that rounding it again, in any mode, gives what rounding the
exact value would have given (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
"""

from __future__ import annotations

import numpy as np

from kvcupy.backends.ptx.types import BFLOAT16, Array, DType

__all__ = ["flush", "fused_double", "narrow", "odd_sum", "round_to_integer", "sum_for_float32"]

_SMALLEST_NORMAL = np.array([2.0**-126]).view(np.uint64)[0]
_SIGN = np.uint64(1 << 63)


def _nudge(total: Array, error: Array) -> Array:
    """The neighbour with an odd last bit, where the exact value is total + error."""
    bits = total.view(np.uint64)
    inexact = np.isfinite(total) & (error != 0) & (bits & np.uint64(1) == 0)
    return np.where(inexact, np.nextafter(total, np.copysign(np.inf, error)), total)


def _exact_sum(x: Array, y: Array) -> tuple[Array, Array]:
    """The rounded sum and its error (Knuth)."""
    total = x + y
    back = total - x
    return total, (x - (total - back)) + (y - back)


def odd_sum(x: Array, y: Array) -> Array:
    """x + y in float64, rounded to odd."""
    return _nudge(*_exact_sum(x, y))


def sum_for_float32(x: Array, y: Array) -> Array:
    """x + y in float64, such that rounding it to the nearest float32 rounds only once.

    Only a sum that looks like a tie, or is too small for a normal float32, can be rounded wrongly by two steps.
    """
    total = np.asarray(x + y)
    bits = total.view(np.uint64) & ~_SIGN
    risky = (bits & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    risky |= (bits - np.uint64(1)) < _SMALLEST_NORMAL - np.uint64(1)
    if risky.any():
        x, y = np.broadcast_to(x, total.shape), np.broadcast_to(y, total.shape)
        total[risky] = odd_sum(x[risky], y[risky])
    return total


def fused_double(x: Array, y: Array, z: Array) -> Array:
    """x · y + z in float64, rounded once, where nothing over- or underflows on the way."""
    high, low = [], []
    for value in (x, y):
        big = value * 134217729.0  # 2^27 + 1: splits a float64 into two halves whose products are exact
        high.append(big - (big - value))
        low.append(value - high[-1])
    product = x * y
    rest = ((high[0] * high[1] - product) + high[0] * low[1] + low[0] * high[1]) + low[0] * low[1]
    middle, middle_error = _exact_sum(z, rest)
    top, top_error = _exact_sum(product, middle)
    result = top + odd_sum(middle_error, top_error)
    return np.where(np.isfinite(result), result, product + z)


def narrow(x: Array, dtype: DType, mode: str = "rn") -> Array:
    """float64 to a narrower float: rn to nearest even, rz towards zero, rm down, rp up."""
    if dtype == np.float64:
        return x
    if dtype == BFLOAT16:
        single = x.astype(np.float32)
        error = x - single
        odd = np.isfinite(single) & (error != 0) & (single.view(np.uint32) & np.uint32(1) == 0)
        single = np.where(
            odd, np.nextafter(single, np.copysign(np.float32(np.inf), error.astype(np.float32))), single
        )
        nearest = single.astype(dtype)
    else:
        nearest = x.astype(dtype)
    if mode == "rn":
        return nearest
    wide = nearest.astype(np.float64)
    finite = np.isfinite(x)
    # Next to a float in the order of its bits is the one with the next magnitude.
    bits = nearest.view(np.uint16 if dtype.itemsize == 2 else np.uint32)
    if mode == "rz":
        wrong, outwards = finite & (np.abs(wide) > np.abs(x)), np.zeros(len(x), bool)
    else:
        wrong = finite & ((wide > x) if mode == "rm" else (wide < x))
        outwards = np.signbit(x) == (mode == "rm")
    smallest = (bits << bits.dtype.type(1)) == 0
    one = bits.dtype.type(1)
    stepped = np.where(outwards, bits + one, np.where(smallest, bits, bits - one))
    return np.where(wrong, stepped, bits).view(dtype)


def round_to_integer(x: Array, mode: str) -> Array:
    """To an integral float: rni to nearest even, rzi towards zero, rmi down, rpi up."""
    function = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    result: Array = function(x)
    return result


def flush(x: Array) -> Array:
    """Subnormal float32 numbers become zeros of the same sign (.ftz)."""
    small = np.abs(x) < np.finfo(np.float32).tiny
    return np.where(small, np.copysign(np.float32(0), x), x)
