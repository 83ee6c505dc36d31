"""Moves, selections, comparisons and everything on single bits. Here marks of undefined bits are exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np

from kvcupy.backends.ptx.assemble import Marks, Unsupported, Value, any_marked
from kvcupy.backends.ptx.integer import halves_marked, packed
from kvcupy.backends.ptx.parse import Imm, Instruction, Operand, Pair, Vec
from kvcupy.backends.ptx.rounding import flush
from kvcupy.backends.ptx.types import Array, dtype_of, storage_of, width_of

__all__ = ["BUILD"]


def same_bits(compute: Callable[..., Array], data: int) -> Marks:
    """Marks of an instruction that only moves bits of its first `data` sources: its own function moves them.

    If what says where they go is itself undefined, so is the whole result.
    """

    def marks(values: Sequence[Array], marks: Sequence[Array | None]) -> Array | None:
        if any(mark is not None for mark in marks[data:]):
            return any_marked(values, marks)
        moved = [
            np.zeros_like(value) if mark is None else mark.view(value.dtype)
            for value, mark in zip(values[:data], marks[:data], strict=True)
        ]
        result = compute(*moved, *values[data:])
        return result.view(storage_of(result.itemsize * 8))

    return marks


def _flips(compute: Callable[..., Array]) -> Marks:
    """Marks of a bitwise function: a bit is undefined if changing undefined bits of the sources can change it."""

    def marks(values: Sequence[Array], marks: Sequence[Array | None]) -> Array:
        bits = [np.zeros(1, value.dtype) if mark is None else mark for value, mark in zip(values, marks, strict=True)]
        base = compute(*values)
        result = np.zeros_like(base)
        for flipped in product((False, True), repeat=len(values)):
            changed = [value ^ bit if flip else value for value, bit, flip in zip(values, bits, flipped, strict=True)]
            result |= compute(*changed) ^ base
        return result

    return marks


_LOGIC: dict[str, Callable[[Array, Array], Array]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def logic(ins: Instruction) -> Value:
    kind = ins.parts[-1]
    d, x, y = ins.operands
    function = _LOGIC[ins.parts[0]]
    return Value([(d, kind)], [(x, kind), (y, kind)], function, _flips(function))


def invert(ins: Instruction) -> Value:
    kind = ins.parts[-1]
    d, x = ins.operands
    return Value([(d, kind)], [(x, kind)], np.invert, lambda values, marks: marks[0])


def logic3(ins: Instruction) -> Value:
    """Any function of three bits, given as its table of eight."""
    d, x, y, z, table = ins.operands
    assert isinstance(table, Imm)
    entries = table.value

    def compute(x: Array, y: Array, z: Array) -> Array:
        result: Any = np.zeros(1, np.uint32)
        for index in range(8):
            if entries >> index & 1:
                result = result | ((x if index & 4 else ~x) & (y if index & 2 else ~y) & (z if index & 1 else ~z))
        return result  # type: ignore[no-any-return]

    return Value([(d, "b32")], [(x, "b32"), (y, "b32"), (z, "b32")], compute, _flips(compute))


def shift(ins: Instruction) -> Value:
    """Shifts by more than the width give zeros, or copies of the sign."""
    kind = ins.parts[-1]
    d, x, amount = ins.operands
    bits = width_of(kind)
    left = ins.parts[0] == "shl"

    def compute(x: Array, amount: Array) -> Any:
        whole = amount >= bits
        by = np.where(whole, bits - 1, amount).astype(x.dtype)
        shifted = x << by if left else x >> by
        if (not left and x.dtype.kind == "i") or not whole.any():
            return shifted
        return np.where(whole, x.dtype.type(0), shifted)

    return Value([(d, kind)], [(x, kind), (amount, "u32")], compute, same_bits(compute, 1))


def funnel_shift(ins: Instruction) -> Value:
    d, low, high, amount = ins.operands
    left, clamp = ins.has("l"), ins.has("clamp")

    def compute(low: Array, high: Array, amount: Array) -> Any:
        by = (np.minimum(amount, 32) if clamp else amount & 31).astype(np.uint64)
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        return ((both << by) >> np.uint64(32) if left else both >> by).astype(np.uint32)

    return Value([(d, "b32")], [(low, "b32"), (high, "b32"), (amount, "u32")], compute, same_bits(compute, 2))


def extract_field(ins: Instruction) -> Value:
    kind = ins.parts[-1]
    d, x, start, length = ins.operands
    bits = width_of(kind)

    def compute(x: Array, start: Array, length: Array) -> Array:
        start, length = (start & 255).astype(np.int64), (length & 255).astype(np.int64)
        wide = x.astype(np.int64) if x.dtype.kind == "i" else x.astype(np.uint64).view(np.int64)
        mask = np.where(length >= 64, -1, (np.int64(1) << np.minimum(length, 63)) - 1)
        inside = np.where(start >= 64, 0, wide.view(np.uint64) >> np.minimum(start, 63).astype(np.uint64))
        inside = np.where(start < bits, inside.view(np.int64), 0)
        if x.dtype.kind == "i":
            inside = np.where(start < bits, wide >> np.minimum(start, 63), wide >> 63)
            sign_at = np.minimum(start + length - 1, bits - 1)
            sign = np.where(length > 0, -(wide >> np.minimum(np.maximum(sign_at, 0), 63) & 1), 0)
            return ((inside & mask) | (sign & ~mask)).astype(x.dtype)
        return (inside & mask).astype(x.dtype)

    sources = [(x, kind), (start, "u32"), (length, "u32")]
    return Value([(d, kind)], sources, compute, same_bits(compute, 1))


def insert_field(ins: Instruction) -> Value:
    kind = ins.parts[-1]
    d, x, into, start, length = ins.operands
    bits = width_of(kind)

    def compute(x: Array, into: Array, start: Array, length: Array) -> Any:
        start, length = start & 255, np.minimum(length & 255, bits)
        ones = np.where(
            length >= 64,
            ~np.uint64(0),
            (np.uint64(1) << np.minimum(length, 63).astype(np.uint64)) - np.uint64(1),
        )
        by = np.minimum(start, 63).astype(np.uint64)
        mask = np.where(start < bits, ones << by, np.uint64(0)).astype(x.dtype)
        field = (x.astype(np.uint64) << by).astype(x.dtype)
        return (field & mask) | (into & ~mask)

    sources = [(x, kind), (into, kind), (start, "u32"), (length, "u32")]
    return Value([(d, kind)], sources, compute, same_bits(compute, 2))


def permute(ins: Instruction) -> Value:
    """Each byte of the result is one of the eight bytes of two registers, or copies of its sign."""
    d, low, high, selector = ins.operands
    mode = ins.one_of("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    if mode is not None:
        raise Unsupported

    def compute(low: Array, high: Array, selector: Array) -> Array:
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        result: Any = np.zeros(1, np.uint32)
        for byte in range(4):
            control = (selector >> np.uint32(4 * byte)) & np.uint32(15)
            value = (both >> ((control & np.uint32(7)) * np.uint32(8)).astype(np.uint64)).astype(np.uint8)
            sign = np.where(value >= 128, np.uint8(255), np.uint8(0))
            value = np.where(control >= 8, sign, value)
            result = result | (value.astype(np.uint32) << np.uint32(8 * byte))
        return result  # type: ignore[no-any-return]

    return Value([(d, "b32")], [(low, "b32"), (high, "b32"), (selector, "u32")], compute, same_bits(compute, 2))


def _copy(values: Sequence[Array], marks: Sequence[Array | None]) -> Array | None:
    return marks[0]


def move(ins: Instruction) -> Value:
    kind = ins.parts[-1]
    d, x = ins.operands
    kind = kind if kind == "pred" else f"b{width_of(kind)}"
    if isinstance(d, Vec):
        return _unpack(d, x, kind)
    if isinstance(x, Vec):
        return _pack(d, x, kind)
    return Value([(d, kind)], [(x, kind)], lambda x: x, _copy)


def _unpack(parts: Vec, x: Operand, kind: str) -> Value:
    count = len(parts.items)
    bits = width_of(kind) // count
    dtype = storage_of(bits)

    def split(x: Array) -> tuple[Array, ...]:
        each = np.ascontiguousarray(x).view(dtype).reshape(-1, count)
        return tuple(each[:, part] for part in range(count))

    def marks(values: Sequence[Array], marks: Sequence[Array | None]) -> Any:
        return None if marks[0] is None else split(marks[0])

    return Value([(part, f"b{bits}") for part in parts.items], [(x, kind)], split, marks)


def _pack(d: Operand, parts: Vec, kind: str) -> Value:
    count = len(parts.items)
    bits = width_of(kind) // count
    whole = storage_of(width_of(kind))

    def join(*values: Array) -> Array:
        size = max(len(value) for value in values)
        result = np.empty((size, count), storage_of(bits))
        for part, value in enumerate(values):
            result[:, part] = value
        return result.view(whole).reshape(-1)

    def marks(values: Sequence[Array], marks: Sequence[Array | None]) -> Array:
        return join(*(np.zeros(1, storage_of(bits)) if mark is None else mark for mark in marks))

    return Value([(d, kind)], [(part, f"b{bits}") for part in parts.items], join, marks)


def cache_policy(ins: Instruction) -> Value:
    """createpolicy: a hint that means nothing here."""
    return Value([(ins.operands[0], "b64")], [], lambda: np.zeros(1, np.uint64))


def select(ins: Instruction) -> Value:
    kind = f"b{width_of(ins.parts[-1])}"
    d, x, y, predicate = ins.operands

    def marks(values: Sequence[Array], marks: Sequence[Array | None]) -> Array:
        if marks[2] is not None:
            return np.asarray(any_marked(values, marks))
        none = np.zeros(1, storage_of(width_of(kind)))
        x, y = (none if mark is None else mark for mark in marks[:2])
        return np.where(values[2], x, y)

    return Value([(d, kind)], [(x, kind), (y, kind), (predicate, "pred")], lambda x, y, p: np.where(p, x, y), marks)


_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def _comparison(name: str, kind: str) -> Callable[[Array, Array], Array]:
    """With a NaN, the plain comparisons are false and those that end in u are true."""
    floating = kind.lstrip("b")[0] == "f"
    if name in ("num", "nan"):
        return lambda x, y: (np.isnan(x) | np.isnan(y)) == (name == "nan")
    if not floating:
        return _COMPARE[_UNSIGNED_NAMES.get(name, name)]
    if name == "ne":
        return lambda x, y: (x < y) | (x > y)
    if name in _COMPARE:
        return _COMPARE[name]
    opposite = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}[name]
    if opposite == "ne":
        return lambda x, y: ~((x < y) | (x > y))
    inverse = _COMPARE[opposite]
    return lambda x, y: ~inverse(x, y)


def _flushed(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda x, y: function(flush(x), flush(y))


def _split_comparison(ins: Instruction) -> tuple[Callable[[Array, Array], Array], str | None]:
    """The comparison and how it is combined with a predicate."""
    modifiers = [part for part in ins.parts[1:-1] if part != "ftz"]
    compare = _comparison(modifiers[0], ins.parts[-1])
    if ins.has("ftz") and ins.parts[-1] == "f32":
        compare = _flushed(compare)
    return compare, next((part for part in modifiers[1:] if part in _LOGIC), None)


def set_predicate(ins: Instruction) -> Value:
    kind = ins.parts[-1]
    compare, combine = _split_comparison(ins)
    d, x, y, *rest = ins.operands
    first, second = (d.value, d.predicate) if isinstance(d, Pair) else (d, None)
    if kind.endswith("x2"):
        half = dtype_of(kind[:-2])

        def both(x: Array, y: Array) -> tuple[Array, Array]:
            halves = [np.ascontiguousarray(value).view(half).reshape(-1, 2) for value in (x, y)]
            result = compare(*halves)
            return result[:, 0], result[:, 1]

        if combine:
            raise Unsupported
        return Value([(first, "pred"), (second, "pred")], [(x, kind), (y, kind)], both)
    results = [(first, "pred")] + ([(second, "pred")] if isinstance(d, Pair) else [])
    if combine is None:
        both_ways: Callable[..., Any] = lambda x, y: (compare(x, y), ~compare(x, y))  # noqa: E731
        return Value(results, [(x, kind), (y, kind)], both_ways if isinstance(d, Pair) else compare)
    logic = _LOGIC[combine]

    def combined(x: Array, y: Array, p: Array) -> Any:
        truth = compare(x, y)
        return (logic(truth, p), logic(~truth, p)) if isinstance(d, Pair) else logic(truth, p)

    def marks(values: Sequence[Array], marks: Sequence[Array | None]) -> Any:
        """A false predicate makes an undefined comparison irrelevant."""
        truth, of_truth = compare(*values[:2]), any_marked(values, marks[:2])
        each = [_flips(logic)([side, values[2]], [of_truth, marks[2]]) for side in (truth, ~truth)]
        return tuple(each) if isinstance(d, Pair) else each[0]

    return Value(results, [(x, kind), (y, kind), (rest[0], "pred")], combined, marks)


def set_value(ins: Instruction) -> Value:
    """A comparison whose result is a number: 1.0 or all ones, or zero."""
    result, kind = ins.parts[-2:]
    modifiers = ins.parts[1:-2]
    compare = _comparison(modifiers[0], kind)
    if any(part in _LOGIC for part in modifiers):
        raise Unsupported
    d, x, y = ins.operands
    if kind.endswith("x2"):
        half = dtype_of(kind[:-2])
        floating = result.endswith("x2")

        def halves(x: Array, y: Array) -> Array:
            truth = compare(x, y)
            return truth.astype(half) if floating else np.where(truth, np.uint16(0xFFFF), np.uint16(0))

        return Value([(d, "b32")], [(x, kind), (y, kind)], packed(halves, half), halves_marked)
    dtype = dtype_of(result)
    if result.lstrip("b")[0] == "f":
        return Value([(d, result)], [(x, kind), (y, kind)], lambda x, y: compare(x, y).astype(dtype))
    return Value([(d, result)], [(x, kind), (y, kind)], lambda x, y: -(compare(x, y).astype(dtype)))


BUILD: dict[str, Callable[[Instruction], Value]] = {
    **dict.fromkeys(_LOGIC, logic),
    "not": invert,
    "lop3": logic3,
    "shl": shift,
    "shr": shift,
    "shf": funnel_shift,
    "bfe": extract_field,
    "bfi": insert_field,
    "prmt": permute,
    "mov": move,
    "createpolicy": cache_policy,
    "selp": select,
    "setp": set_predicate,
    "set": set_value,
}
