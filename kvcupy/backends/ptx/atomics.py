"""atom and red. Lanes that hit one address take their turns in ascending order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvcupy.backends.ptx.access import Site, places_of, space_of
from kvcupy.backends.ptx.assemble import Assembler, Step, Unsupported, check_defined
from kvcupy.backends.ptx.checks import ATOMIC
from kvcupy.backends.ptx.chunk import Chunk, Lanes
from kvcupy.backends.ptx.floating import compute_add, compute_extreme
from kvcupy.backends.ptx.integer import packed
from kvcupy.backends.ptx.parse import Instruction
from kvcupy.backends.ptx.types import Array, dtype_of, unsigned, width_of

__all__ = ["BUILD"]


def _atomic_function(ins: Instruction) -> tuple[str, Callable[..., Array]]:
    kind = ins.parts[-1]
    if kind == "noftz":
        raise Unsupported
    name = ins.one_of("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
    element = dtype_of(kind.removesuffix("x2"))
    floating = kind.lstrip("b")[0] == "f"
    functions: dict[str, Callable[..., Any]] = {
        "add": compute_add(element) if floating else np.add,
        "min": compute_extreme("min", element) if floating else np.minimum,
        "max": compute_extreme("max", element) if floating else np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "exch": lambda old, new: new,
        "cas": lambda old, expected, new: np.where(old == expected, new, old),
        "inc": lambda old, limit: np.where(old >= limit, 0, old + old.dtype.type(1)).astype(old.dtype),
        "dec": lambda old, limit: np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1)),
    }
    if name is None:
        raise Unsupported
    function = functions[name]
    return kind, packed(function, element) if kind.endswith("x2") else function


def atomic(assembler: Assembler, ins: Instruction) -> Step:
    """atom and red. Lanes that hit one address take their turns in ascending order."""
    kind, function = _atomic_function(ins)
    operands = list(ins.operands)
    destination = None if ins.parts[0] == "red" else operands.pop(0)
    addresses = assembler.address(operands[0], ins)
    reads = [assembler.read(operand, kind) for operand in operands[1:]]
    read_marks = [assembler.read_marks(operand, kind) for operand in operands[1:]]
    write, write_marks = assembler.write(destination, kind), assembler.write_marks(destination, kind)
    space, site = space_of(ins), Site(assembler, ins)
    nbytes, dtype = width_of(kind) // 8, dtype_of(kind)
    releases = ins.has("release", "acq_rel") and not ins.has("cta")

    def step(chunk: Chunk, lanes: Lanes) -> None:
        arguments = [np.broadcast_to(read(chunk, lanes), lanes.count) for read in reads]
        if chunk.marks:
            for read in read_marks:
                check_defined(chunk, lanes, read(chunk, lanes), ins, "in an atomic operation")
        if releases:
            chunk.launch.order.fence(chunk.block_of[lanes.ids], site.position)
        old = np.empty(lanes.count, dtype)
        old_marks = np.zeros(lanes.count, bool)
        for _, (storage, at, chosen) in places_of(chunk, lanes, space, addresses(chunk, lanes), nbytes, ATOMIC, site):
            which = np.arange(lanes.count) if chosen is None else chosen
            marks = storage.take_marks(at, nbytes) if chunk.checks else None
            if marks is not None:
                old_marks[which] = marks != 0
            for turn in _turns(at):
                before = storage.take(at[turn], nbytes).view(dtype)
                after = function(before, *(each[which[turn]] for each in arguments))
                storage.put(at[turn], np.ascontiguousarray(after).view(unsigned(nbytes)))
                old[which[turn]] = before
        if old_marks.any():
            check_defined(chunk, lanes, old_marks, ins, "in an atomic operation")
        write(chunk, lanes, old)
        if chunk.marks:
            write_marks(chunk, lanes, None)

    return step


def _turns(at: Array) -> list[Array]:
    """Positions split such that no address comes twice in one part."""
    order = np.argsort(at, kind="stable")
    ranked = at[order]
    new = np.ones(len(at), bool)
    new[1:] = ranked[1:] != ranked[:-1]
    if new.all():
        return [np.arange(len(at))]
    start = np.maximum.accumulate(np.where(new, np.arange(len(at)), 0))
    turn = np.arange(len(at)) - start
    by_turn = np.argsort(turn, kind="stable")
    return np.split(order[by_turn], np.cumsum(np.bincount(turn))[:-1])


BUILD: dict[str, Callable[[Assembler, Instruction], Step]] = {"atom": atomic, "red": atomic}
