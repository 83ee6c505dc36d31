"""From instructions to closures: everything that can be decided once per instruction is decided here.

Most instructions compute a value from values. Their modules say only which operands they read and write, as which
types, and a NumPy function from the ones to the others (`Value`); reading, writing and the marks of undefined bits
are the same for all and live here. The rest (memory, warps) build their own closure, a `Step`.

Marks are bit masks, as wide as the value. Unless an instruction says how its result depends on single bits, a result
is undefined as soon as anything it was computed from is. While a chunk has no marks at all, none of this runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcupy.backends.ptx.chunk import Chunk, Lanes
from kvcupy.backends.ptx.parse import Imm, Instruction, Kernel, Mem, Not, Operand, Reg, Special, Sym
from kvcupy.backends.ptx.types import Array, DType, dtype_of, storage_of, width_of

__all__ = [
    "Assembler",
    "Marks",
    "Op",
    "Read",
    "ReadMarks",
    "Step",
    "Unsupported",
    "Value",
    "any_marked",
    "check_defined",
]

Step = Callable[[Chunk, Lanes], None]
Read = Callable[[Chunk, Lanes], Array]
Write = Callable[[Chunk, Lanes, Any], None]
ReadMarks = Callable[[Chunk, Lanes], Array | None]
WriteMarks = Callable[[Chunk, Lanes, Array | None], None]
Marks = Callable[[Sequence[Array], Sequence[Array | None]], Any]
"""From values and marks of the sources to marks of the result: a mask, a bool per lane, or None."""


class Unsupported(Exception):
    """Raised while an instruction is assembled: the interpreter does not know it."""


@dataclass
class Value:
    """An instruction that computes: results = compute(*sources). Operands come with the type they are used as."""

    results: Sequence[tuple[Operand, str]]
    sources: Sequence[tuple[Operand, str]]
    compute: Callable[..., Any]
    marks: Marks | None = None


@dataclass
class Op:
    """One assembled instruction.

    kind: "step", or what the scheduler does itself: "branch", "exit", "barrier", or "sync" for a step that needs
    lanes of its warp to be there. members: the mask of those lanes.
    """

    instruction: Instruction
    category: str
    kind: str = "step"
    run: Step | None = None
    guard: Read | None = None
    guard_marks: ReadMarks | None = None
    target: int = -1
    members: Read | None = None
    barrier: tuple[Read, Read | None] | None = None
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()


class Assembler:
    """Turns operands into closures, and remembers which typed views of registers they need."""

    def __init__(self, kernel: Kernel, symbols: dict[str, int]) -> None:
        self.kernel = kernel
        self.symbols = symbols
        self.slots: list[tuple[tuple[int, int] | str, DType]] = []
        self._slot_of: dict[tuple[tuple[int, int] | str, DType], int] = {}
        self.reads: set[int] = set()
        self.writes: set[int] = set()
        self.position = 0
        """Which instruction is being assembled."""

    def _slot(self, source: Reg | Special, dtype: DType) -> int:
        key = ((source.index, source.bits) if isinstance(source, Reg) else source.name, dtype)
        if key not in self._slot_of:
            self._slot_of[key] = len(self.slots)
            self.slots.append(key)
        return self._slot_of[key]

    def read(self, operand: Operand, kind: str) -> Read:
        """The operand's value in some lanes: an array of a value per lane, or of one value for all."""
        dtype = dtype_of(kind)
        if isinstance(operand, Reg):
            self.reads.add(operand.index)
            slot = self._slot(operand, dtype)
            return lambda chunk, lanes: chunk.views[slot][lanes.index]
        if isinstance(operand, Not):
            plain = self.read(operand.predicate, kind)
            return lambda chunk, lanes: ~plain(chunk, lanes)
        if isinstance(operand, Special):
            if operand.name.startswith(("%clock", "%globaltimer")):
                counts = dtype
                return lambda chunk, lanes: np.array([_clock(chunk)]).astype(counts)
            slot = self._slot(operand, dtype)
            return lambda chunk, lanes: chunk.views[slot][lanes.index]
        constant = self._constant(operand, kind, dtype)
        return lambda chunk, lanes: constant

    def _constant(self, operand: Operand, kind: str, dtype: DType) -> Array:
        if isinstance(operand, Sym):
            if operand.name not in self.symbols:
                raise Unsupported
            value = self.symbols[operand.name]
        elif isinstance(operand, Imm):
            value = operand.value
        else:
            raise Unsupported
        bits = width_of(kind)
        if kind == "pred":
            return np.array([value != 0])
        if isinstance(operand, Imm) and operand.float_bits not in (0, bits):
            literal = np.array([value], storage_of(operand.float_bits)).view(f"f{operand.float_bits // 8}")
            return literal.astype(dtype)
        return np.array([value % (1 << bits)], storage_of(bits)).view(dtype)

    def write(self, operand: Operand, kind: str) -> Write:
        """Stores a value per lane; into a wider register it is extended by its sign or by zeros."""
        if operand is None:
            return lambda chunk, lanes, value: None
        if not isinstance(operand, Reg):
            raise Unsupported
        self.writes.add(operand.index)
        dtype = dtype_of(kind)
        bits = width_of(kind)
        if operand.bits > bits:
            dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{operand.bits // 8}")
        slot = self._slot(operand, dtype)

        def put(chunk: Chunk, lanes: Lanes, value: Array) -> None:
            chunk.views[slot][lanes.index] = value

        return put

    def read_marks(self, operand: Operand, kind: str) -> ReadMarks:
        """Masks of the operand's undefined bits in some lanes, or None."""
        if isinstance(operand, Not):
            operand = operand.predicate
        if not isinstance(operand, Reg):
            return lambda chunk, lanes: None
        index = operand.index
        dtype = storage_of(width_of(kind))
        step = storage_of(operand.bits).itemsize // dtype.itemsize

        def read(chunk: Chunk, lanes: Lanes) -> Array | None:
            marks = chunk.marks.get(index)
            if marks is None:
                return None
            here = marks.view(dtype)[::step][lanes.index]
            return here if here.any() else None

        return read

    def write_marks(self, operand: Operand, kind: str) -> WriteMarks:
        """Stores masks, or a bool per lane for the whole value, or None for all defined."""
        if not isinstance(operand, Reg):
            return lambda chunk, lanes, marks: None
        index, storage = operand.index, storage_of(operand.bits)
        whole = True if operand.bits == 1 else (1 << operand.bits) - 1
        signed = kind[0] == "s" and operand.bits > width_of(kind)

        def write(chunk: Chunk, lanes: Lanes, marks: Array | None) -> None:
            old = chunk.marks.get(index)
            if marks is None or not marks.any():
                if old is not None:
                    old[lanes.index] = 0
                    if lanes.count == chunk.size or not old.any():
                        del chunk.marks[index]
                return
            if old is None:
                old = chunk.marks[index] = np.zeros(chunk.size, storage)
            if marks.dtype == bool:
                old[lanes.index] = np.where(marks, storage.type(whole), storage.type(0))
            elif signed:
                old[lanes.index] = marks.view(f"i{marks.itemsize}").astype(f"i{storage.itemsize}").view(storage)
            else:
                old[lanes.index] = marks

        return write

    def address(self, operand: Operand, instruction: Instruction) -> Read:
        """Addresses as int64, one per lane. An undefined address is a fault."""
        if not isinstance(operand, Mem):
            raise Unsupported
        base = operand.base
        kind = "u32" if isinstance(base, Reg) and base.bits == 32 else "s64"
        read, marks, offset = self.read(base, kind), self.read_marks(base, kind), operand.offset

        def addresses(chunk: Chunk, lanes: Lanes) -> Array:
            if chunk.marks:
                check_defined(chunk, lanes, marks(chunk, lanes), instruction, "as an address")
            value = read(chunk, lanes).astype(np.int64) + offset
            return value if len(value) == lanes.count else np.broadcast_to(value, lanes.count)

        return addresses

    def value(self, value: Value) -> Step:
        """The closure of an instruction that computes."""
        reads = [self.read(operand, kind) for operand, kind in value.sources]
        writes = [self.write(operand, kind) for operand, kind in value.results]
        marks = self._marks(value)
        compute = value.compute
        if len(writes) != 1:

            def many(chunk: Chunk, lanes: Lanes) -> None:
                values = [read(chunk, lanes) for read in reads]
                if chunk.marks:
                    marks(chunk, lanes, values)
                for write, result in zip(writes, compute(*values), strict=True):
                    write(chunk, lanes, result)

            return many
        put = writes[0]

        def one(chunk: Chunk, lanes: Lanes) -> None:
            values = [read(chunk, lanes) for read in reads]
            if chunk.marks:
                marks(chunk, lanes, values)
            put(chunk, lanes, compute(*values))

        return one

    def _marks(self, value: Value) -> Callable[[Chunk, Lanes, list[Array]], None]:
        reads = [self.read_marks(operand, kind) for operand, kind in value.sources]
        writes = [self.write_marks(operand, kind) for operand, kind in value.results]
        rule = value.marks or any_marked

        def carry(chunk: Chunk, lanes: Lanes, values: list[Array]) -> None:
            marks = [read(chunk, lanes) for read in reads]
            result = rule(values, marks) if any(mark is not None for mark in marks) else None
            each = result if isinstance(result, tuple) else (result,) * len(writes)
            for write, mark in zip(writes, each, strict=True):
                write(chunk, lanes, mark)

        return carry


def any_marked(values: Sequence[Array], marks: Sequence[Array | None]) -> Array | None:
    """A bool per lane: whether any source has an undefined bit."""
    result: Array | None = None
    for mark in marks:
        if mark is not None:
            result = mark != 0 if result is None else result | (mark != 0)
    return result


def check_defined(chunk: Chunk, lanes: Lanes, marks: Array | None, instruction: Instruction, use: str) -> None:
    if marks is not None:
        words = marks.view(np.uint64).reshape(-1, 2).any(axis=1) if marks.itemsize == 16 else marks != 0
        marked = np.broadcast_to(words, lanes.count)
        if marked.any():
            lane = int(lanes.ids[marked.argmax()])
            raise chunk.fault(instruction, lane, "undefined value", f"a value that was never written is used {use}")


def _clock(chunk: Chunk) -> int:
    return sum(counts.instructions for counts in chunk.counts)
