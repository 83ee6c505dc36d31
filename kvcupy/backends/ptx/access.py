"""Loads, stores, atomics and asynchronous copies: every way to memory, and the checks on that way.

An access is checked in this order: is the address defined, inside a buffer, aligned to its width; is an asynchronous
copy still under way there; does it race; and, for a store to global memory, is the value defined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvcupy.backends.ptx.assemble import Assembler, Step, Unsupported, check_defined
from kvcupy.backends.ptx.checks import ATOMIC, READ, WRITE, Conflict
from kvcupy.backends.ptx.chunk import Chunk, Copy, Lanes
from kvcupy.backends.ptx.floating import compute_add, compute_extreme
from kvcupy.backends.ptx.integer import packed
from kvcupy.backends.ptx.memory import LOCAL_WINDOW, SHARED_WINDOW, Buffer, Bytes, OutOfBounds
from kvcupy.backends.ptx.parse import Imm, Instruction, Mem, Operand, Reg, Sym, Vec
from kvcupy.backends.ptx.traffic import count_global, count_shared
from kvcupy.backends.ptx.types import Array, dtype_of, storage_of, unsigned, width_of

__all__ = ["BUILD", "Site", "read_shared"]

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


def _check_alignment(chunk: Chunk, lanes: Lanes, addresses: Array, nbytes: int, site: Site) -> None:
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
    _check_alignment(chunk, lanes, addresses, nbytes, site)
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
    _check_alignment(chunk, lanes, addresses, nbytes, site)
    at = chunk.shared_start[lanes.index] + addresses
    _check_in_flight(chunk, lanes, at, nbytes, kind, site)
    _check_shared_race(chunk, lanes.ids, at, nbytes, kind, site.instruction, site.position)
    return [(chunk.shared, at, None)]


def _check_in_flight(chunk: Chunk, lanes: Lanes, at: Array, nbytes: int, kind: str, site: Site) -> None:
    if not (chunk.copies and chunk.checks):
        return
    flying = chunk.in_flight.take(at >> 2, max(1, nbytes // 4)) != 0
    if flying.any():
        lane = int(lanes.ids[flying.argmax()])
        detail = f"{kind} of shared bytes whose cp.async has not been waited for"
        raise site.fault(chunk, lane, "missing cp.async wait", detail)


def _check_shared_race(
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
    _check_alignment(chunk, lanes, addresses, nbytes, site)
    return [(chunk.local, lanes.ids * chunk.local_stride + addresses, None)]


_SPACES = {"global": _global, "const": _global, "shared": _shared, "local": _local}


def _places(
    chunk: Chunk, lanes: Lanes, space: str, addresses: Array, nbytes: int, kind: str, site: Site
) -> list[tuple[str, Place]]:
    """Where an access goes; one in the generic space may go to several memories."""
    if space != "generic":
        _count(chunk, lanes, space, addresses, nbytes, kind, site)
        return [(space, place) for place in _SPACES[space](chunk, lanes, addresses, nbytes, kind, site)]
    if addresses.max() < SHARED_WINDOW:
        return _places(chunk, lanes, "global", addresses, nbytes, kind, site)
    places: list[tuple[str, Place]] = []
    edges = (-(1 << 63), SHARED_WINDOW, LOCAL_WINDOW, 1 << 63)
    for name, low, high in zip(("global", "shared", "local"), edges, edges[1:], strict=False):
        inside = (addresses >= low) & (addresses <= high - 1)
        if not inside.any():
            continue
        some = np.flatnonzero(inside)
        part = lanes if inside.all() else lanes.select(some)
        base = _WINDOWS.get(name, 0)
        for _, (storage, at, chosen) in _places(chunk, part, name, addresses[some] - base, nbytes, kind, site):
            places.append((name, (storage, at, some if chosen is None else some[chosen])))
    return places


def _count(chunk: Chunk, lanes: Lanes, space: str, addresses: Array, nbytes: int, kind: str, site: Site) -> None:
    if chunk.checks:
        if space == "global":
            count_global(chunk.counts[site.position], addresses, nbytes, lanes, kind != READ)
        elif space == "shared":
            count_shared(chunk.counts[site.position], addresses, nbytes, lanes)


def _read(
    chunk: Chunk, lanes: Lanes, space: str, addresses: Array, nbytes: int, site: Site
) -> tuple[Array, Array | None]:
    """Values and marks of nbytes at each address, as unsigned integers of that width."""
    places = _places(chunk, lanes, space, addresses, nbytes, READ, site)
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


def read_shared(chunk: Chunk, lanes: Lanes, addresses: Array, nbytes: int, site: Site) -> tuple[Array, Array | None]:
    return _read(chunk, lanes, "shared", addresses, nbytes, site)


def _write(
    chunk: Chunk, lanes: Lanes, space: str, addresses: Array, values: Array, marks: Array | None, site: Site
) -> None:
    nbytes = values.itemsize
    for name, (storage, at, chosen) in _places(chunk, lanes, space, addresses, nbytes, WRITE, site):
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


def _space(ins: Instruction) -> str:
    return ins.one_of("global", "shared", "local", "const", "param") or "generic"


def _vector(ins: Instruction, operand: Operand) -> tuple[tuple[Operand, ...], str]:
    """The elements of a possibly vector operand, and the type of each."""
    return operand.items if isinstance(operand, Vec) else (operand,), ins.parts[-1]


def load(assembler: Assembler, ins: Instruction) -> Step:
    destination, source = ins.operands[:2]
    items, kind = _vector(ins, destination)
    space = _space(ins)
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
        values, marks = _read(chunk, lanes, space, addresses(chunk, lanes), nbytes, site)
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
    space = _space(ins)
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
    from kvcupy.backends.ptx.assemble import Value

    kind = ins.parts[-1]
    dtype = dtype_of(kind)
    base = _WINDOWS.get(_space(ins), 0)
    shift = np.array([-base if ins.has("to") else base], np.int64).astype(dtype)
    d, source = ins.operands
    return assembler.value(Value([(d, kind)], [(source, kind)], lambda x: x + shift, lambda values, marks: marks[0]))


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
    space, site = _space(ins), Site(assembler, ins)
    nbytes, dtype = width_of(kind) // 8, dtype_of(kind)

    def step(chunk: Chunk, lanes: Lanes) -> None:
        arguments = [np.broadcast_to(read(chunk, lanes), lanes.count) for read in reads]
        if chunk.marks:
            for read in read_marks:
                check_defined(chunk, lanes, read(chunk, lanes), ins, "in an atomic operation")
        old = np.empty(lanes.count, dtype)
        old_marks = np.zeros(lanes.count, bool)
        for _, (storage, at, chosen) in _places(chunk, lanes, space, addresses(chunk, lanes), nbytes, ATOMIC, site):
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


def copy_async(assembler: Assembler, ins: Instruction) -> Step:
    """cp.async: the copy is read where it is issued, and lands in shared memory where it is waited for."""
    what = ins.parts[2]
    if what == "commit_group":
        return _commit
    if what == "wait_all":
        return lambda chunk, lanes: _land(chunk, lanes, None)
    if what == "wait_group":
        (pending,) = ins.operands
        assert isinstance(pending, Imm)
        keep = pending.value
        return lambda chunk, lanes: _land(chunk, lanes, keep)
    if what not in ("ca", "cg"):
        raise Unsupported
    to, source, size, *rest = ins.operands
    assert isinstance(size, Imm)
    nbytes = size.value
    destinations, sources = assembler.address(to, ins), assembler.address(source, ins)
    ignores = bool(rest) and isinstance(rest[0], Reg) and rest[0].bits == 1
    if rest and isinstance(rest[0], Reg) and rest[0].bits == 64:
        rest = []  # a cache policy
    amount = assembler.read(rest[0], "pred" if ignores else "u32") if rest else None
    site = Site(assembler, ins)

    def step(chunk: Chunk, lanes: Lanes) -> None:
        taken: Array | None = None
        if amount is not None:
            given = np.broadcast_to(amount(chunk, lanes), lanes.count)
            taken = np.where(given, 0, nbytes) if ignores else given.astype(np.int64)
            if (taken > nbytes).any():
                lane = int(lanes.ids[(taken > nbytes).argmax()])
                raise site.fault(chunk, lane, "invalid cp.async", f"a source size above {nbytes}")
        values, marks = _read_part(chunk, lanes, sources(chunk, lanes), nbytes, taken, site)
        ((_, (_, at, _)),) = _places(chunk, lanes, "shared", destinations(chunk, lanes), nbytes, WRITE, site)
        groups = chunk.copy_group[lanes.index].copy()
        chunk.copies.append(Copy(lanes.ids, at, values, marks, groups, ins, site.position))
        chunk.in_flight.put(at >> 2, np.full(lanes.count, (1 << 2 * nbytes) - 1, unsigned(nbytes // 4)))

    return step


def _read_part(
    chunk: Chunk, lanes: Lanes, addresses: Array, nbytes: int, taken: Array | None, site: Site
) -> tuple[Array, Array | None]:
    """The first `taken` bytes of each source, and zeros after them."""
    if taken is None or (taken == nbytes).all():
        return _read(chunk, lanes, "global", addresses, nbytes, site)
    _check_alignment(chunk, lanes, addresses, nbytes, site)
    values, masks = np.zeros((lanes.count, nbytes), np.uint8), np.zeros((lanes.count, nbytes), np.uint8)
    for length in np.unique(taken[taken > 0]).tolist():
        some = np.flatnonzero(taken == length)
        part = lanes.select(some)
        width = length & -length  # the widest access that divides it
        for start in range(0, length, width):
            value, mark = _read(chunk, part, "global", addresses[some] + start, width, site)
            values[some, start : start + width] = value.view(np.uint8).reshape(-1, width)
            if mark is not None:
                masks[some, start : start + width] = mark.view(np.uint8).reshape(-1, width)
    whole = unsigned(nbytes)
    return values.view(whole).reshape(-1), masks.view(whole).reshape(-1) if masks.any() else None


def _commit(chunk: Chunk, lanes: Lanes) -> None:
    chunk.copy_group[lanes.index] += 1


def _land(chunk: Chunk, lanes: Lanes, keep: int | None) -> None:
    """All but the last `keep` committed groups of these lanes arrive; with None, everything does."""
    waiting = np.zeros(chunk.size, bool)
    waiting[lanes.index] = True
    left = []
    for copy in chunk.copies:
        lands = waiting[copy.ids]
        if keep is not None:
            lands &= copy.groups < chunk.copy_group[copy.ids] - keep
        if not lands.any():
            left.append(copy)
            continue
        if not lands.all():
            left.append(copy.part(~lands))
            copy = copy.part(lands)
        nbytes = copy.values.itemsize
        _check_shared_race(chunk, copy.ids, copy.at, nbytes, WRITE, copy.instruction, copy.position)
        chunk.shared.put(copy.at, copy.values)
        chunk.shared.put_marks(copy.at, nbytes, copy.marks)
        chunk.in_flight.put(copy.at >> 2, np.zeros(len(copy.ids), unsigned(nbytes // 4)))
    chunk.copies = left


BUILD: dict[str, Callable[[Assembler, Instruction], Step]] = {
    "ld": load,
    "ldu": load,
    "st": store,
    "cvta": convert_address,
    "atom": atomic,
    "red": atomic,
    "cp": copy_async,
}
