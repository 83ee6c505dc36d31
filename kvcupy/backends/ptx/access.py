"""Loads and stores: every way to memory, and the checks on that way.

An access is checked in this order: is the address defined, inside a buffer, aligned to its width; is an asynchronous
copy still under way there; does it race; and, for a store to global memory, is the value defined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvcupy.backends.ptx.assemble import Assembler, Step, Unsupported, Value, check_defined
from kvcupy.backends.ptx.checks import READ, WRITE, Conflict
from kvcupy.backends.ptx.chunk import Chunk, Lanes
from kvcupy.backends.ptx.memory import LOCAL_WINDOW, SHARED_WINDOW, Buffer, Bytes, OutOfBounds
from kvcupy.backends.ptx.parse import Instruction, Mem, Operand, Sym, Vec
from kvcupy.backends.ptx.traffic import count_global, count_shared
from kvcupy.backends.ptx.types import Array, dtype_of, storage_of, unsigned, width_of

__all__ = ["BUILD", "Place", "Site", "check_alignment", "check_shared_race", "places_of", "read_memory", "space_of"]

_WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}


class Site:
    """An instruction that accesses memory, and its place in the kernel."""

    def __init__(self, assembler: Assembler, instruction: Instruction) -> None:
        self.instruction = instruction
        self.position = assembler.position

    def fault(self, chunk: Chunk, lane: int, kind: str, detail: str) -> Exception:
        return chunk.fault(self.instruction, lane, kind, detail)


Place = tuple[Bytes, Array, Array | None]
"""Storage, positions in it, and which of the lanes they belong to (None: all)."""


def check_alignment(chunk: Chunk, lanes: Lanes, addresses: Array, nbytes: int, site: Site) -> None:
    wrong = addresses & (nbytes - 1)
    if nbytes > 1 and wrong.any():
        at = int((wrong != 0).argmax())
        detail = f"{nbytes} bytes at {int(addresses[at]):#x}, which is no multiple of {nbytes}"
        raise site.fault(chunk, int(lanes.ids[at]), "misaligned access", detail)


def _global(chunk: Chunk, lanes: Lanes, addresses: Array, nbytes: int, kind: str, site: Site) -> list[Place]:
    try:
        found = chunk.launch.memory.find(addresses, nbytes)
    except OutOfBounds as error:
        raise site.fault(
            chunk, int(lanes.ids[error.position]), "global out of bounds", f"{kind} of {error}"
        ) from None
    check_alignment(chunk, lanes, addresses, nbytes, site)
    places: list[Place] = []
    for buffer, chosen in found:
        here = addresses if chosen is None else addresses[chosen]
        ids = lanes.ids if chosen is None else lanes.ids[chosen]
        if kind != READ and not buffer.writable:
            detail = f"{kind} of {nbytes} bytes at {int(here[0]):#x} in {buffer.name}"
            raise site.fault(chunk, int(ids[0]), "write to read-only memory", detail)
        at = buffer.locate(here)
        _check_global_race(chunk, buffer, ids, at, nbytes, kind, site)
        places.append((buffer.storage, at, chosen))
    return places


def _check_global_race(
    chunk: Chunk, buffer: Buffer, ids: Array, at: Array, nbytes: int, kind: str, site: Site
) -> None:
    races = chunk.launch.races_of(buffer)
    if races is None:
        return
    conflict = races.access(kind, at, nbytes, chunk.block_of[ids], site.position, buffer.storage.data.size)
    if conflict is not None:
        who = chunk.block_name(conflict.other)
        raise site.fault(chunk, int(ids[conflict.position]), "race between blocks", _tell(chunk, kind, conflict, who))


def _tell(chunk: Chunk, kind: str, conflict: Conflict, who: str) -> str:
    line = chunk.launch.program.ops[conflict.instruction].instruction.line
    return f"its {kind} is not ordered with the {conflict.earlier} by {who} at {line}"


def _shared(chunk: Chunk, lanes: Lanes, addresses: Array, nbytes: int, kind: str, site: Site) -> list[Place]:
    outside = (addresses < 0) | (addresses > chunk.shared_bytes - nbytes)
    if outside.any():
        first = int(outside.argmax())
        detail = f"{kind} of {nbytes} bytes at {int(addresses[first])} of {chunk.shared_bytes} bytes"
        raise site.fault(chunk, int(lanes.ids[first]), "shared out of bounds", detail)
    check_alignment(chunk, lanes, addresses, nbytes, site)
    at = chunk.shared_start[lanes.index] + addresses
    _check_in_flight(chunk, lanes, at, nbytes, kind, site)
    check_shared_race(chunk, lanes.ids, at, nbytes, kind, site.instruction, site.position)
    return [(chunk.shared, at, None)]


def _check_in_flight(chunk: Chunk, lanes: Lanes, at: Array, nbytes: int, kind: str, site: Site) -> None:
    if not (chunk.copies and chunk.checks):
        return
    flying = chunk.in_flight.take(at >> 2, max(1, nbytes // 4)) != 0
    if flying.any():
        lane = int(lanes.ids[flying.argmax()])
        detail = f"{kind} of shared bytes whose cp.async has not been waited for"
        raise site.fault(chunk, lane, "missing cp.async wait", detail)


def check_shared_race(
    chunk: Chunk, ids: Array, at: Array, nbytes: int, kind: str, instruction: Instruction, position: int
) -> None:
    if chunk.shared_races is None:
        return
    conflict = chunk.shared_races.access(kind, at, nbytes, ids, position)
    if conflict is not None:
        lane = int(ids[conflict.position])
        missing = "__syncwarp" if lane >> 5 == conflict.other >> 5 else "barrier"
        detail = _tell(chunk, kind, conflict, chunk.thread_name(conflict.other)) + f": no {missing} in between"
        raise chunk.fault(instruction, lane, "shared race", detail)


def _local(chunk: Chunk, lanes: Lanes, addresses: Array, nbytes: int, kind: str, site: Site) -> list[Place]:
    outside = (addresses < 0) | (addresses > chunk.launch.program.local_bytes - nbytes)
    if outside.any():
        at = int(outside.argmax())
        detail = f"{kind} of {nbytes} bytes at {int(addresses[at])} of {chunk.launch.program.local_bytes} bytes"
        raise site.fault(chunk, int(lanes.ids[at]), "local out of bounds", detail)
    check_alignment(chunk, lanes, addresses, nbytes, site)
    return [(chunk.local, lanes.ids * chunk.local_stride + addresses, None)]


_SPACES = {"global": _global, "const": _global, "shared": _shared, "local": _local}


def places_of(
    chunk: Chunk, lanes: Lanes, space: str, addresses: Array, nbytes: int, kind: str, site: Site
) -> list[tuple[str, Place]]:
    """Where an access goes; one in the generic space may go to several memories."""
    if space != "generic":
        _count(chunk, lanes, space, addresses, nbytes, kind, site)
        return [(space, place) for place in _SPACES[space](chunk, lanes, addresses, nbytes, kind, site)]
    if addresses.max() < SHARED_WINDOW:
        return places_of(chunk, lanes, "global", addresses, nbytes, kind, site)
    places: list[tuple[str, Place]] = []
    edges = (-(1 << 63), SHARED_WINDOW, LOCAL_WINDOW, 1 << 63)
    for name, low, high in zip(("global", "shared", "local"), edges, edges[1:], strict=False):
        inside = (addresses >= low) & (addresses <= high - 1)
        if not inside.any():
            continue
        some = np.flatnonzero(inside)
        part = lanes if inside.all() else lanes.select(some)
        base = _WINDOWS.get(name, 0)
        for _, (storage, at, chosen) in places_of(chunk, part, name, addresses[some] - base, nbytes, kind, site):
            places.append((name, (storage, at, some if chosen is None else some[chosen])))
    return places


def _count(chunk: Chunk, lanes: Lanes, space: str, addresses: Array, nbytes: int, kind: str, site: Site) -> None:
    if chunk.checks:
        if space == "global":
            count_global(chunk.counts[site.position], addresses, nbytes, lanes, kind != READ)
            if chunk.launch.watch is not None:
                start, end = chunk.launch.watch
                inside = (addresses >= start) & (addresses < end)
                if inside.any():
                    count_global(chunk.launch.watched, addresses[inside], nbytes, lanes.select(inside), kind != READ)
        elif space == "shared":
            count_shared(chunk.counts[site.position], addresses, nbytes, lanes)


def read_memory(
    chunk: Chunk, lanes: Lanes, space: str, addresses: Array, nbytes: int, site: Site
) -> tuple[Array, Array | None]:
    """Values and marks of nbytes at each address, as unsigned integers of that width."""
    places = places_of(chunk, lanes, space, addresses, nbytes, READ, site)
    if len(places) == 1:
        storage, at, _ = places[0][1]
        return storage.take(at, nbytes), storage.take_marks(at, nbytes) if chunk.checks else None
    values = np.empty(lanes.count, unsigned(nbytes))
    marks = np.zeros(lanes.count, unsigned(nbytes))
    marked = False
    for _, (storage, at, chosen) in places:
        values[chosen] = storage.take(at, nbytes)
        here = storage.take_marks(at, nbytes) if chunk.checks else None
        if here is not None:
            marks[chosen] = here
            marked = True
    return values, marks if marked else None


def _write(
    chunk: Chunk, lanes: Lanes, space: str, addresses: Array, values: Array, marks: Array | None, site: Site
) -> None:
    nbytes = values.itemsize
    for name, (storage, at, chosen) in places_of(chunk, lanes, space, addresses, nbytes, WRITE, site):
        here = values if chosen is None else values[chosen]
        mark = None if marks is None else marks if chosen is None else marks[chosen]
        if mark is not None and name == "global":
            part = lanes if chosen is None else lanes.select(chosen)
            check_defined(chunk, part, mark, site.instruction, "as a value stored to global memory")
        storage.put(at, here)
        storage.put_marks(at, nbytes, mark)
        if chunk.checks and name != "local":
            _check_same_instruction(chunk, lanes if chosen is None else lanes.select(chosen), storage, at, here, site)


def _check_same_instruction(chunk: Chunk, lanes: Lanes, storage: Bytes, at: Array, values: Array, site: Site) -> None:
    """Lanes that store different values to one address in one instruction: which one stays is anybody's guess."""
    words = np.dtype(np.uint64) if values.itemsize == 16 else values.dtype
    lost = storage.take(at, values.itemsize).view(words) != np.ascontiguousarray(values).view(words)
    if lost.any():
        lane = int(lanes.ids[lost.reshape(lanes.count, -1).any(axis=1).argmax()])
        detail = "several threads store different values to one address in the same instruction"
        raise site.fault(chunk, lane, "race between lanes", detail)


def space_of(ins: Instruction) -> str:
    return ins.one_of("global", "shared", "local", "const", "param") or "generic"


def _vector(ins: Instruction, operand: Operand) -> tuple[tuple[Operand, ...], str]:
    """The elements of a possibly vector operand, and the type of each."""
    return operand.items if isinstance(operand, Vec) else (operand,), ins.parts[-1]


def load(assembler: Assembler, ins: Instruction) -> Step:
    destination, source = ins.operands[:2]
    items, kind = _vector(ins, destination)
    space = space_of(ins)
    element = width_of(kind) // 8
    nbytes = element * len(items)
    writes = [assembler.write(item, kind) for item in items]
    write_marks = [assembler.write_marks(item, kind) for item in items]
    dtype, storage = dtype_of(kind), storage_of(8 * element)
    if space == "param":
        return _load_param(assembler, ins, nbytes, element, dtype)
    addresses = assembler.address(source, ins)
    site = Site(assembler, ins)
    count = len(items)

    def step(chunk: Chunk, lanes: Lanes) -> None:
        values, marks = read_memory(chunk, lanes, space, addresses(chunk, lanes), nbytes, site)
        parts = values.view(dtype).reshape(-1, count)
        for item, write in enumerate(writes):
            write(chunk, lanes, parts[:, item])
        if marks is not None:
            masks = marks.view(storage).reshape(-1, count)
            for item, write_mark in enumerate(write_marks):
                write_mark(chunk, lanes, masks[:, item])
        elif chunk.marks:
            for write_mark in write_marks:
                write_mark(chunk, lanes, None)

    return step


def _load_param(assembler: Assembler, ins: Instruction, nbytes: int, element: int, dtype: np.dtype[Any]) -> Step:
    destination, source = ins.operands[:2]
    items, kind = _vector(ins, destination)
    writes = [assembler.write(item, kind) for item in items]
    clear = [assembler.write_marks(item, kind) for item in items]
    assert isinstance(source, Mem)
    if isinstance(source.base, Sym):
        start = assembler.symbols[source.base.name] + source.offset

        def fixed(chunk: Chunk, lanes: Lanes) -> None:
            values = chunk.launch.params[start : start + nbytes].view(dtype)
            for item, write in enumerate(writes):
                write(chunk, lanes, values[item])
                clear[item](chunk, lanes, None)

        return fixed
    addresses = assembler.address(source, ins)

    def indexed(chunk: Chunk, lanes: Lanes) -> None:
        at = addresses(chunk, lanes)[:, None] + np.arange(nbytes)
        values = chunk.launch.params[np.clip(at, 0, chunk.launch.params.size - 1)].view(dtype)
        for item, write in enumerate(writes):
            write(chunk, lanes, values[:, item])
            clear[item](chunk, lanes, None)

    return indexed


def store(assembler: Assembler, ins: Instruction) -> Step:
    destination, source = ins.operands[:2]
    items, kind = _vector(ins, source)
    space = space_of(ins)
    if space in ("param", "const"):
        raise Unsupported
    element = width_of(kind) // 8
    kind = f"b{8 * element}"
    reads = [assembler.read(item, kind) for item in items]
    read_marks = [assembler.read_marks(item, kind) for item in items]
    addresses = assembler.address(destination, ins)
    site = Site(assembler, ins)
    count, storage, whole = len(items), storage_of(8 * element), unsigned(element * len(items))

    def join(parts: list[Array | None], lanes: Lanes) -> Array:
        joined = np.zeros((lanes.count, count), storage)
        for item, part in enumerate(parts):
            if part is not None:
                joined[:, item] = part
        return joined.view(whole).reshape(-1)

    def step(chunk: Chunk, lanes: Lanes) -> None:
        values = join([read(chunk, lanes) for read in reads], lanes)
        marks = None
        if chunk.marks:
            masks = [read(chunk, lanes) for read in read_marks]
            if any(mask is not None for mask in masks):
                marks = join(masks, lanes)
        _write(chunk, lanes, space, addresses(chunk, lanes), values, marks, site)

    return step


def convert_address(assembler: Assembler, ins: Instruction) -> Step:
    """cvta: between an address in its own space and a generic one."""
    kind = ins.parts[-1]
    dtype = dtype_of(kind)
    base = _WINDOWS.get(space_of(ins), 0)
    shift = np.array([-base if ins.has("to") else base], np.int64).astype(dtype)
    d, source = ins.operands
    return assembler.value(Value([(d, kind)], [(source, kind)], lambda x: x + shift, lambda values, marks: marks[0]))


BUILD: dict[str, Callable[[Assembler, Instruction], Step]] = {
    "ld": load,
    "ldu": load,
    "st": store,
    "cvta": convert_address,
}
