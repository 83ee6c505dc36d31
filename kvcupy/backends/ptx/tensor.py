"""Tensor core instructions: ldmatrix, and mma on 16-bit floats and 8-bit integers.

A warp holds a matrix in fragments. With g = lane / 4 and t = lane % 4, register i of A holds row g + 8·(i & 1) and,
n to a register, the columns from n·t + 4n·(i / 2); register i of B holds column g and the rows from n·t + 4n·i; the
four values of C and D are rows g and g + 8, columns 2t and 2t + 1 (PTX ISA, "Matrix fragments for mma").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvcupy.backends.ptx.access import Site, read_memory
from kvcupy.backends.ptx.assemble import Assembler, Read, ReadMarks, Step, Unsupported
from kvcupy.backends.ptx.chunk import Chunk, Lanes
from kvcupy.backends.ptx.parse import Instruction, Operand, Vec
from kvcupy.backends.ptx.rounding import narrow
from kvcupy.backends.ptx.types import Array, DType, dtype_of, width_of

__all__ = ["BUILD"]


def load_matrix(assembler: Assembler, ins: Instruction) -> Step:
    """Each group of eight lanes gives the rows of one 8×8 matrix of 16-bit elements."""
    destination, source = ins.operands
    registers = destination.items if isinstance(destination, Vec) else (destination,)
    if not ins.has("m8n8") or ins.parts[-1] != "b16" or not ins.has("shared"):
        raise Unsupported
    addresses = assembler.address(source, ins)
    writes = [assembler.write(register, "b32") for register in registers]
    write_marks = [assembler.write_marks(register, "b32") for register in registers]
    transposed = ins.has("trans")
    site = Site(assembler, ins)
    count = len(registers)

    def spread(rows: Array) -> Any:
        """uint32 [matrix, lane of chunk] from uint128 rows."""
        elements = rows.view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            elements = elements.swapaxes(2, 3)
        pairs = np.ascontiguousarray(elements).view(np.uint32)  # [warp, matrix, row, pair]
        return pairs.reshape(-1, count, 32).swapaxes(0, 1).reshape(count, -1)

    def step(chunk: Chunk, lanes: Lanes) -> None:
        givers = (lanes.ids & 31) < 8 * count
        rows, marks = read_memory(chunk, lanes.select(givers), "shared", addresses(chunk, lanes)[givers], 16, site)
        for write, value in zip(writes, spread(rows), strict=True):
            write(chunk, lanes, value)
        if chunk.marks or marks is not None:
            masks: Sequence[Array | None] = [None] * count if marks is None else list(spread(marks))
            for write_mark, mask in zip(write_marks, masks, strict=True):
                write_mark(chunk, lanes, mask)

    return step


class _Fragment:
    """The registers of one operand of mma, and where their elements lie in its matrix."""

    def __init__(self, assembler: Assembler, operand: Operand, kind: str) -> None:
        assert isinstance(operand, Vec)
        self.registers = operand.items
        self.dtype: DType = dtype_of(kind)
        self.per_register = 32 // width_of(kind)
        self.reads: list[Read] = [assembler.read(register, "b32") for register in self.registers]
        self.read_marks: list[ReadMarks] = [assembler.read_marks(register, "b32") for register in self.registers]

    def _elements(self, values: Sequence[Array], dtype: DType) -> list[Array]:
        """Per register [warp, lane, element]."""
        return [np.ascontiguousarray(value).view(dtype).reshape(-1, 32, self.per_register) for value in values]

    def elements(self, chunk: Chunk, lanes: Lanes) -> list[Array]:
        values = [np.broadcast_to(read(chunk, lanes), lanes.count) for read in self.reads]
        return [part.astype(np.float64) for part in self._elements(values, self.dtype)]

    def marked(self, chunk: Chunk, lanes: Lanes) -> list[Array] | None:
        """The same shape: 1 where an element has an undefined bit; None if none has."""
        marks = [read(chunk, lanes) for read in self.read_marks]
        if all(mark is None for mark in marks):
            return None
        known = [np.zeros(lanes.count, np.uint32) if mark is None else mark for mark in marks]
        bits = np.dtype(f"u{self.dtype.itemsize}")
        return [(part != 0).astype(np.float64) for part in self._elements(known, bits)]


def _matrix_a(parts: Sequence[Array]) -> Array:
    """[warp, 16, depth] from one array [warp, lane, element] per register."""
    warps, _, n = parts[0].shape
    matrix = np.empty((warps, 2, 8, len(parts) // 2 or 1, 4, n))  # [warp, row half, g, column part, t, element]
    for i, part in enumerate(parts):
        matrix[:, i & 1, :, i >> 1] = part.reshape(warps, 8, 4, n)
    return matrix.reshape(warps, 16, -1)


def _matrix_b(parts: Sequence[Array]) -> Array:
    """[warp, depth, 8]"""
    warps, _, n = parts[0].shape
    matrix = np.empty((warps, len(parts), 4, n, 8))  # [warp, row part, t, element, g]
    for i, part in enumerate(parts):
        matrix[:, i] = part.reshape(warps, 8, 4, n).transpose(0, 2, 3, 1)
    return matrix.reshape(warps, -1, 8)


def _matrix_c(parts: Sequence[Array]) -> Array:
    """[warp, 16, 8] from four registers of one element, or two of two."""
    warps, _, n = parts[0].shape
    matrix = np.empty((warps, 2, 8, 4, 2))  # [warp, row half, g, t, element]
    for i in range(4):
        matrix[:, i >> 1, :, :, i & 1] = parts[i // n][:, :, i % n].reshape(warps, 8, 4)
    return matrix.reshape(warps, 16, 8)


def _fragment_c(matrix: Array, n: int) -> list[Array]:
    """The other way: [lane of the chunk, element] per register."""
    values = matrix.reshape(-1, 2, 8, 4, 2)
    flat = [values[:, i >> 1, :, :, i & 1].reshape(-1) for i in range(4)]
    return [np.stack(flat[i : i + n], axis=1) for i in range(0, 4, n)]


_SHAPES = {"m16n8k8": 8, "m16n8k16": 16, "m16n8k32": 32}


def multiply(assembler: Assembler, ins: Instruction) -> Step:
    """D = A·B + C. Products and their sum are exact in float64 and rounded once; a GPU may round the sum in steps."""
    to, kind_a, kind_b, kind_c = ins.parts[-4:]
    integer = kind_a in ("s8", "u8")
    if not (integer or (kind_a in ("f16", "bf16") and kind_a == kind_b)) or to != kind_c:
        raise Unsupported
    a, b, c = (
        _Fragment(assembler, operand, kind)
        for operand, kind in zip(ins.operands[1:], (kind_a, kind_b, kind_c), strict=True)
    )
    destination = ins.operands[0]
    assert isinstance(destination, Vec)
    depth = _SHAPES[next(part for part in ins.parts if part in _SHAPES)]
    if len(a.registers) * a.per_register * 2 != depth or len(b.registers) * b.per_register * 4 != depth:
        raise Unsupported
    writes = [assembler.write(register, "b32") for register in destination.items]
    write_marks = [assembler.write_marks(register, "b32") for register in destination.items]
    dtype = dtype_of(to)
    saturates = ins.has("satfinite")

    def step(chunk: Chunk, lanes: Lanes) -> None:
        total = _matrix_a(a.elements(chunk, lanes)) @ _matrix_b(b.elements(chunk, lanes))
        total += _matrix_c(c.elements(chunk, lanes))
        if chunk.marks:
            carry(chunk, lanes)
        if integer:
            exact = total.astype(np.int64)
            result = np.clip(exact, -(1 << 31), (1 << 31) - 1).astype(dtype) if saturates else exact.astype(dtype)
        else:
            result = narrow(total, dtype)
        for write, part in zip(writes, _fragment_c(result, c.per_register), strict=True):
            write(chunk, lanes, np.ascontiguousarray(part).view(np.uint32).reshape(-1))

    def carry(chunk: Chunk, lanes: Lanes) -> None:
        """An element of D is undefined if anything in its row of A, its column of B, or C is."""
        marked: Array = np.zeros((lanes.warps, 16, 8))
        rows, columns, added = (fragment.marked(chunk, lanes) for fragment in (a, b, c))
        if rows is not None:
            marked += _matrix_a(rows).max(axis=2)[:, :, None]
        if columns is not None:
            marked += _matrix_b(columns).max(axis=1)[:, None, :]
        if added is not None:
            marked += _matrix_c(added)
        parts = _fragment_c(marked, c.per_register) if marked.any() else [None] * len(write_marks)
        for write, part in zip(write_marks, parts, strict=True):
            write(chunk, lanes, None if part is None else part.max(axis=1) > 0)

    return step


BUILD: dict[str, Callable[[Assembler, Instruction], Step]] = {"ldmatrix": load_matrix, "mma": multiply}
