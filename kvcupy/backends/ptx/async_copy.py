"""cp.async: copies from global to shared memory that arrive later.

A copy is read where it is issued, and lands where its own thread waits for the group it belongs to. Until then its
bytes in shared memory are in flight: whoever reads or writes them has forgotten a wait.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvcupy.backends.ptx.access import Site, check_alignment, check_shared_race, places_of, read_memory
from kvcupy.backends.ptx.assemble import Assembler, Step, Unsupported, check_defined
from kvcupy.backends.ptx.checks import WRITE
from kvcupy.backends.ptx.chunk import Chunk, Copy, Lanes
from kvcupy.backends.ptx.parse import Imm, Instruction, Reg
from kvcupy.backends.ptx.types import Array, unsigned

__all__ = ["BUILD"]


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
    amount_kind = "pred" if ignores else "u32"
    amount = assembler.read(rest[0], amount_kind) if rest else None
    amount_marks = assembler.read_marks(rest[0] if rest else None, amount_kind)
    site = Site(assembler, ins)

    def step(chunk: Chunk, lanes: Lanes) -> None:
        taken: Array | None = None
        if amount is not None:
            check_defined(chunk, lanes, amount_marks(chunk, lanes), ins, "as a size")
            given = np.broadcast_to(amount(chunk, lanes), lanes.count)
            taken = np.where(given, 0, nbytes) if ignores else given.astype(np.int64)
            if (taken > nbytes).any():
                lane = int(lanes.ids[(taken > nbytes).argmax()])
                raise site.fault(chunk, lane, "invalid cp.async", f"a source size above {nbytes}")
        values, marks = _read_part(chunk, lanes, sources(chunk, lanes), nbytes, taken, site)
        ((_, (_, at, _)),) = places_of(chunk, lanes, "shared", destinations(chunk, lanes), nbytes, WRITE, site)
        groups = chunk.copy_group[lanes.index].copy()
        chunk.copies.append(Copy(lanes.ids, at, values, marks, groups, ins, site.position))
        chunk.in_flight.put(at >> 2, np.full(lanes.count, (1 << 2 * nbytes) - 1, unsigned(nbytes // 4)))

    return step


def _read_part(
    chunk: Chunk, lanes: Lanes, addresses: Array, nbytes: int, taken: Array | None, site: Site
) -> tuple[Array, Array | None]:
    """The first `taken` bytes of each source, and zeros after them."""
    if taken is None or (taken == nbytes).all():
        return read_memory(chunk, lanes, "global", addresses, nbytes, site)
    check_alignment(chunk, lanes, addresses, nbytes, site)
    values, masks = np.zeros((lanes.count, nbytes), np.uint8), np.zeros((lanes.count, nbytes), np.uint8)
    for length in np.unique(taken[taken > 0]).tolist():
        some = np.flatnonzero(taken == length)
        part = lanes.select(some)
        width = length & -length  # the widest access that divides it
        for start in range(0, length, width):
            value, mark = read_memory(chunk, part, "global", addresses[some] + start, width, site)
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
        check_shared_race(chunk, copy.ids, copy.at, nbytes, WRITE, copy.instruction, copy.position)
        chunk.shared.put(copy.at, copy.values)
        chunk.shared.put_marks(copy.at, nbytes, copy.marks)
        chunk.in_flight.put(copy.at >> 2, np.zeros(len(copy.ids), unsigned(nbytes // 4)))
    chunk.copies = left


BUILD: dict[str, Callable[[Assembler, Instruction], Step]] = {"cp": copy_async}
