"""Instructions in which the lanes of a warp see each other: shuffles, votes, matches and reductions.

The scheduler lets them run only when all lanes that the member mask names, and that have not exited, are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvcupy.backends.ptx.assemble import Assembler, Step, Unsupported
from kvcupy.backends.ptx.chunk import Chunk, Lanes
from kvcupy.backends.ptx.parse import Instruction, Pair
from kvcupy.backends.ptx.types import Array, dtype_of

__all__ = ["BUILD", "bits_per_warp"]


_EVERYONE = np.uint32(0xFFFFFFFF)


def bits_per_warp(chunk: Chunk, lanes: Lanes, truth: Array | bool) -> Array:
    """For every warp of the chunk, a mask of the lanes for which truth holds."""
    weights = np.where(truth, 2.0 ** (lanes.ids & 31), 0.0)  # sums of powers of two are exact in float64
    return np.bincount(lanes.ids >> 5, weights, chunk.size >> 5).astype(np.uint32)


def _masks(marks: Array | None, size: int) -> Array:
    return np.zeros(size, bool) if marks is None else np.broadcast_to(marks != 0, size)


def shuffle(assembler: Assembler, ins: Instruction) -> Step:
    mode = ins.one_of("up", "down", "bfly", "idx")
    d, source, lane_operand, clamp_operand, members_operand = ins.operands
    value_to, predicate_to = (d.value, d.predicate) if isinstance(d, Pair) else (d, None)
    read, read_marks = assembler.read(source, "b32"), assembler.read_marks(source, "b32")
    read_lane, read_clamp = assembler.read(lane_operand, "u32"), assembler.read(clamp_operand, "u32")
    read_members = assembler.read(members_operand, "u32")
    write, write_marks = assembler.write(value_to, "b32"), assembler.write_marks(value_to, "b32")
    write_predicate = assembler.write(predicate_to, "pred")
    clear_predicate = assembler.write_marks(predicate_to, "pred")

    def step(chunk: Chunk, lanes: Lanes) -> None:
        own = lanes.ids & 31
        by = (read_lane(chunk, lanes) & np.uint32(31)).astype(np.int64)
        control = read_clamp(chunk, lanes).astype(np.int64)
        clamp, segment = control & 31, (control >> 8) & 31
        last = (own & segment) | (clamp & ~segment)
        if mode == "up":
            target = own - by
            inside = target >= last
        else:
            if mode == "down":
                target = own + by
            elif mode == "bfly":
                target = own ^ by
            else:
                target = (own & segment) | (by & ~segment)
            inside = target <= last
        target = np.where(inside, target, own)
        members = read_members(chunk, lanes)
        if lanes.count == 32 * lanes.warps and (members == _EVERYONE).all():
            at = (np.arange(lanes.count) & ~31) + target
        else:
            _check_source(chunk, lanes, own, target, members, ins)
            at = np.searchsorted(lanes.ids, (lanes.ids & ~31) + target)
        values = np.broadcast_to(read(chunk, lanes), lanes.count)
        if chunk.marks:
            marks = read_marks(chunk, lanes)
            write_marks(chunk, lanes, None if marks is None else np.broadcast_to(marks, lanes.count)[at])
            clear_predicate(chunk, lanes, None)
        write(chunk, lanes, values[at])
        write_predicate(chunk, lanes, inside)

    return step


def _check_source(chunk: Chunk, lanes: Lanes, own: Array, target: Array, members: Array, ins: Instruction) -> None:
    present = bits_per_warp(chunk, lanes, True)[lanes.ids >> 5] & members
    absent = (present >> target.astype(np.uint32) & np.uint32(1)) == 0
    if absent.any():
        at = int(absent.argmax())
        detail = f"lane {int(own[at])} reads lane {int(target[at])}, which does not take part"
        raise chunk.fault(ins, int(lanes.ids[at]), "shuffle from an inactive lane", detail)


def vote(assembler: Assembler, ins: Instruction) -> Step:
    mode = ins.one_of("all", "any", "uni", "ballot")
    d, source, members_operand = ins.operands
    kind = ins.parts[-1]
    read, read_marks = assembler.read(source, "pred"), assembler.read_marks(source, "pred")
    read_members = assembler.read(members_operand, "u32")
    write, write_marks = assembler.write(d, kind), assembler.write_marks(d, kind)
    if mode is None:
        raise Unsupported

    def step(chunk: Chunk, lanes: Lanes) -> None:
        members = read_members(chunk, lanes)
        warp = lanes.ids >> 5
        if chunk.marks:
            marked = bits_per_warp(chunk, lanes, _masks(read_marks(chunk, lanes), lanes.count))
            write_marks(chunk, lanes, (marked[warp] & members) != 0)
        ones = bits_per_warp(chunk, lanes, read(chunk, lanes))[warp] & members
        present = bits_per_warp(chunk, lanes, True)[warp] & members
        results: dict[str, Callable[[], Array]] = {
            "all": lambda: ones == present,
            "any": lambda: ones != 0,
            "uni": lambda: (ones == 0) | (ones == present),
            "ballot": lambda: ones,
        }
        write(chunk, lanes, results[mode]())

    return step


def active_mask(assembler: Assembler, ins: Instruction) -> Step:
    write = assembler.write(ins.operands[0], "b32")

    def step(chunk: Chunk, lanes: Lanes) -> None:
        write(chunk, lanes, bits_per_warp(chunk, lanes, True)[lanes.ids >> 5])

    return step


def _by_source(chunk: Chunk, lanes: Lanes, values: Array, members: Array) -> Any:
    """For each of the 32 lanes of a warp: its value as every lane sees it, and where it takes part."""
    everywhere = np.zeros(chunk.size, values.dtype)
    everywhere[lanes.index] = values
    present = bits_per_warp(chunk, lanes, True)[lanes.ids >> 5] & members
    base = lanes.ids & ~31
    for lane in range(32):
        yield everywhere[base + lane], (present >> np.uint32(lane) & np.uint32(1)) != 0


def reduce(assembler: Assembler, ins: Instruction) -> Step:
    name, kind = ins.parts[2], ins.parts[-1]
    functions: dict[str, Any] = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    function = functions[name]
    d, source, members_operand = ins.operands
    read, read_marks = assembler.read(source, kind), assembler.read_marks(source, kind)
    read_members = assembler.read(members_operand, "u32")
    write, write_marks = assembler.write(d, kind), assembler.write_marks(d, kind)

    def step(chunk: Chunk, lanes: Lanes) -> None:
        members = read_members(chunk, lanes)
        if chunk.marks:
            marked = bits_per_warp(chunk, lanes, _masks(read_marks(chunk, lanes), lanes.count))
            write_marks(chunk, lanes, (marked[lanes.ids >> 5] & members) != 0)
        total, started = np.zeros(lanes.count, dtype_of(kind)), np.zeros(lanes.count, bool)
        for value, takes_part in _by_source(chunk, lanes, read(chunk, lanes), members):
            total = np.where(takes_part, np.where(started, function(total, value), value), total)
            started |= takes_part
        write(chunk, lanes, total)

    return step


def match(assembler: Assembler, ins: Instruction) -> Step:
    mode, kind = ins.parts[1], ins.parts[-1]
    d, source, members_operand = ins.operands
    value_to, predicate_to = (d.value, d.predicate) if isinstance(d, Pair) else (d, None)
    read, read_marks = assembler.read(source, kind), assembler.read_marks(source, kind)
    read_members = assembler.read(members_operand, "u32")
    write, write_marks = assembler.write(value_to, "b32"), assembler.write_marks(value_to, "b32")
    write_predicate = assembler.write(predicate_to, "pred")

    def step(chunk: Chunk, lanes: Lanes) -> None:
        members = read_members(chunk, lanes)
        if chunk.marks:
            marked = bits_per_warp(chunk, lanes, _masks(read_marks(chunk, lanes), lanes.count))
            write_marks(chunk, lanes, (marked[lanes.ids >> 5] & members) != 0)
        own = read(chunk, lanes)
        equal = np.zeros(lanes.count, np.uint32)
        present = np.zeros(lanes.count, np.uint32)
        for lane, (value, takes_part) in enumerate(_by_source(chunk, lanes, own, members)):
            bit = np.uint32(1 << lane)
            present |= np.where(takes_part, bit, np.uint32(0))
            equal |= np.where(takes_part & (value == own), bit, np.uint32(0))
        if mode == "any":
            write(chunk, lanes, equal)
        else:
            write(chunk, lanes, np.where(equal == present, present, np.uint32(0)))
            write_predicate(chunk, lanes, equal == present)

    return step


BUILD: dict[str, Callable[[Assembler, Instruction], Step]] = {
    "shfl": shuffle,
    "vote": vote,
    "activemask": active_mask,
    "redux": reduce,
    "match": match,
}
