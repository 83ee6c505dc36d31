"""PTX types and the NumPy types that hold them.

A register is stored as an unsigned integer of its width (a predicate as a bool) and read through a view of the type
that the instruction names. Packed types (f16x2, bf16x2) are read as uint32 and split by those who use them.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["BFLOAT16", "Array", "DType", "dtype_of", "storage_of", "unsigned", "width_of"]

Array = NDArray[Any]
DType = np.dtype[Any]

BFLOAT16: DType = np.dtype(ml_dtypes.bfloat16)

_UNSIGNED: dict[int, DType] = {bits: np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)}
_SIGNED: dict[int, DType] = {bits: np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)}
_FLOAT: dict[int, DType] = {bits: np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)}
_BOOL: DType = np.dtype(bool)


@cache
def width_of(kind: str) -> int:
    """Bits of a PTX type: 32 for "f32" and for "f16x2", 1 for "pred"."""
    if kind == "pred":
        return 1
    match = re.fullmatch(r"(?:bf|tf|[bsuf])(\d+)(x2)?", kind)
    if match is None:
        raise ValueError(f"not a PTX type: {kind}")
    return int(match[1]) * (2 if match[2] else 1)


@cache
def dtype_of(kind: str) -> DType:
    """The NumPy type through which a value of a PTX type is read."""
    bits = width_of(kind)
    if kind == "pred":
        return _BOOL
    if kind == "bf16":
        return BFLOAT16
    if kind.endswith("x2") or kind[0] in "bu":
        return _UNSIGNED[bits]
    return _SIGNED[bits] if kind[0] == "s" else _FLOAT[bits]


def storage_of(bits: int) -> DType:
    """How a register of that many bits is stored."""
    return _BOOL if bits == 1 else _UNSIGNED[bits]


def unsigned(nbytes: int) -> DType:
    """A type of that many bytes that copies as it is; 16 bytes travel as complex128, which NumPy moves fastest."""
    return np.dtype(np.complex128) if nbytes == 16 else _UNSIGNED[nbytes * 8]
