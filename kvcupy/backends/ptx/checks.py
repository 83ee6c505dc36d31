"""Races: who touched which byte last, and was it ordered before who touches it now?

Every access leaves a token beside the bytes it touched. In shared memory a token is a time and a lane. Two accesses
by different lanes are ordered if both lanes passed a barrier of the block in between, or, within one warp, a
`__syncwarp`; if they are not and one of them writes, they race. It does not matter in which order the interpreter
happened to run them. In global memory a token is a time and a block, and only a fence with atomics orders blocks.

Not seen: a `__syncwarp` of part of a warp, or a barrier of part of a block, is taken to order all lanes that passed
one, whether or not it was the same; and within a block, accesses to global memory are compared only between lanes of
one instruction.

Tokens are kept per granule: 16 bytes to begin with, and split when a narrower access comes. All earlier accesses
covered whole granules, so nothing is lost by that.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from kvcupy.backends.ptx.types import Array

__all__ = ["ATOMIC", "READ", "WRITE", "BlockOrder", "Conflict", "GlobalRaces", "SharedRaces"]

READ, WRITE, ATOMIC = "read", "write", "atomic access"


class Conflict(NamedTuple):
    """position: which of the accesses races. other: the lane or block it races with, and at which instruction."""

    position: int
    other: int
    instruction: int
    earlier: str


class _Tokens:
    """Tokens over some bytes, 0 for nobody: who wrote, who read last, who else read before, who was atomic.

    Only pages that were touched have any. A cell is a granule of such a page.
    """

    _PAGE_BITS = 12

    def __init__(self, nbytes: int) -> None:
        self._granule = 16
        self._slot_of_page = np.zeros(0, np.int64)
        self._pages = 0
        self._use(np.zeros((4, 0), np.int64))
        self.grow(nbytes)

    def _use(self, planes: Array) -> None:
        self._planes = planes
        self.writers, self.readers, self.others, self.atomics = planes

    def grow(self, nbytes: int) -> None:
        """Make room for addresses below nbytes."""
        more = -(-nbytes >> self._PAGE_BITS) - self._slot_of_page.size
        if more > 0:
            self._slot_of_page = np.concatenate([self._slot_of_page, np.full(more, -1)])

    def _add(self, pages: Array) -> None:
        self._slot_of_page[pages] = self._pages + np.arange(pages.size)
        self._pages += pages.size
        needed = (self._pages << self._PAGE_BITS) // self._granule
        if needed > self._planes.shape[1]:
            grown = np.zeros((4, max(needed, 2 * self._planes.shape[1])), np.int64)
            grown[:, : self._planes.shape[1]] = self._planes
            self._use(grown)

    def cells(self, at: Array, nbytes: int, *per_access: Array) -> tuple[Array, ...]:
        """The cells of each access, and the given arrays repeated to match them."""
        if nbytes < self._granule:
            self._use(np.repeat(self._planes, self._granule // nbytes, axis=1))
            self._granule = nbytes
        pages = at >> self._PAGE_BITS
        slots = self._slot_of_page[pages]
        if (slots < 0).any():
            self._add(np.unique(pages[slots < 0]))
            slots = self._slot_of_page[pages]
        inside = at & ((1 << self._PAGE_BITS) - 1)
        cells = (slots << self._PAGE_BITS | inside) // self._granule
        count = nbytes // self._granule
        if count == 1:
            return (cells, *per_access)
        cells = (cells[:, None] + np.arange(count)).reshape(-1)
        return (cells, *(np.repeat(each, count) for each in per_access))


class SharedRaces:
    """Races on the shared memory of a chunk of blocks, between lanes of one block."""

    _LANE_BITS = 24
    _LANE = (1 << _LANE_BITS) - 1

    def __init__(self, nbytes: int, lanes: int) -> None:
        self._tokens = _Tokens(nbytes)
        self._history = [0]
        self._block_sync = np.zeros(lanes, np.int64)
        self._warp_sync = np.zeros(lanes, np.int64)
        self._horizon = 0  # everything before it is ordered for all lanes

    def sync_block(self, ids: Array) -> None:
        """These lanes passed a barrier together."""
        self._block_sync[ids] = self._warp_sync[ids] = len(self._history)
        self._horizon = int(self._block_sync.min()) << self._LANE_BITS

    def sync_warp(self, ids: Array) -> None:
        """These lanes of one or more warps passed a __syncwarp."""
        self._warp_sync[ids] = len(self._history)

    def access(self, kind: str, at: Array, nbytes: int, ids: Array, instruction: int) -> Conflict | None:
        """Lanes ids access nbytes each at the storage positions at."""
        time = len(self._history)
        self._history.append(instruction)
        cells, ids_, position = self._tokens.cells(at, nbytes, ids, np.arange(len(ids)))
        tokens = self._tokens
        earlier = {WRITE: tokens.writers}
        if kind != READ:
            earlier[READ] = tokens.readers
        if kind != ATOMIC:
            earlier[ATOMIC] = tokens.atomics
        planes = [*earlier.items()] + ([(READ, tokens.others)] if kind != READ else [])
        for what, plane in planes:
            found = plane[cells]
            racing = self._racing(found, ids_)
            if racing is not None:
                token = int(found[racing])
                other = (token & self._LANE) - 1
                return Conflict(int(position[racing]), other, self._history[token >> self._LANE_BITS], what)
        mine = (time << self._LANE_BITS) | (ids_ + 1)
        if kind == READ:
            self._note_read(cells, mine)
        else:
            (tokens.writers if kind == WRITE else tokens.atomics)[cells] = mine
        return None

    def _racing(self, tokens: Array, ids: Array) -> int | None:
        """The first access that is not ordered after its token."""
        recent = tokens >= max(self._horizon, 1)
        if not recent.any():
            return None
        at = np.flatnonzero(recent)
        tokens, ids = tokens[at], ids[at]
        others, times = (tokens & self._LANE) - 1, tokens >> self._LANE_BITS
        block = np.minimum(self._block_sync[others], self._block_sync[ids])
        warp = np.minimum(self._warp_sync[others], self._warp_sync[ids])
        ordered = times < np.where(others >> 5 == ids >> 5, warp, block)
        racing = ~ordered & (others != ids)
        return int(at[racing.argmax()]) if racing.any() else None

    def _note_read(self, cells: Array, mine: Array) -> None:
        """Two readers are enough to remember: the last, and one of another warp, or else of another lane."""
        readers = self._tokens.readers
        before = readers[cells]
        readers[cells] = mine
        last = readers[cells]
        self._note_other(cells, before, last)
        lost = last != mine  # lanes that read one cell in the same instruction: only one of them stayed
        if lost.any():
            self._note_other(cells[lost], mine[lost], last[lost])

    def _note_other(self, cells: Array, tokens: Array, last: Array) -> None:
        moves = np.flatnonzero((tokens >= max(self._horizon, 1)) & ((tokens ^ last) & self._LANE != 0))
        if not len(moves):
            return
        cells, tokens = cells[moves], tokens[moves]
        kept = self._tokens.others[cells]
        warp, last_warp, kept_warp = (((each & self._LANE) - 1) >> 5 for each in (tokens, last[moves], kept))
        useful = (kept >= max(self._horizon, 1)) & (kept_warp != last_warp)
        better = (warp != last_warp) | ~useful
        self._tokens.others[cells[better]] = tokens[better]


class BlockOrder:
    """What orders accesses of different blocks within one launch, and the launch's clock.

    A block's access comes before another block's if in between the one passed a fence and then did an atomic, and
    the other did an atomic on the same address after that: so a counter tells the last block that all the others
    are done. Nothing else orders blocks.
    """

    _POSITION_BITS = 20

    def __init__(self) -> None:
        self._history = [0]
        self._fences: dict[int, list[int]] = {}
        self._atomics: list[tuple[int, Array, Array]] = []
        self._indexed = 0
        self._by_block: dict[int, list[tuple[int, int]]] = {}
        self._latest: dict[int, dict[int, int]] = {}

    def tick(self, instruction: int) -> int:
        """The time of an access by this instruction."""
        self._history.append(instruction)
        return len(self._history) - 1

    def instruction_at(self, time: int) -> int:
        return self._history[time]

    def fence(self, blocks: Array, instruction: int) -> None:
        time = self.tick(instruction)
        for block in np.unique(blocks).tolist():
            self._fences.setdefault(block, []).append(time)

    def atomic(self, time: int, blocks: Array, addresses: Array) -> None:
        self._atomics.append((time, blocks, addresses))

    def _index(self) -> None:
        """Atomics per block: in which order, and on which address."""
        for time, blocks, addresses in self._atomics[self._indexed :]:
            for position, (block, address) in enumerate(zip(blocks.tolist(), addresses.tolist(), strict=True)):
                when = time << self._POSITION_BITS | position
                self._by_block.setdefault(block, []).append((when, address))
                self._latest.setdefault(block, {})[address] = when
        self._indexed = len(self._atomics)

    def ordered(self, earlier: int, time: int, later: int) -> bool:
        """Whether what block `earlier` did at that time comes before what block `later` does now."""
        self._index()
        latest = self._latest.get(later, {})
        fences = self._fences.get(earlier, [])
        at = bisect_right(fences, time)
        fence = fences[at] if at < len(fences) else None
        for when, address in self._by_block.get(earlier, []):
            released = when >> self._POSITION_BITS
            # The access itself may have been an atomic that the other block's atomic followed.
            if (released == time or (fence is not None and released > fence)) and latest.get(address, -1) > when:
                return True
        return False


class GlobalRaces:
    """Races on one buffer between the blocks of one launch."""

    _BLOCK_BITS = 24
    _BLOCK = (1 << _BLOCK_BITS) - 1

    def __init__(self, order: BlockOrder, address: int) -> None:
        self._order = order
        self._address = address
        self._tokens = _Tokens(0)

    def access(
        self, kind: str, at: Array, nbytes: int, blocks: Array, instruction: int, storage_bytes: int
    ) -> Conflict | None:
        """Threads of the given blocks access nbytes each at the storage positions at."""
        tokens = self._tokens
        tokens.grow(storage_bytes)
        cells, blocks_, position = tokens.cells(at, nbytes, blocks, np.arange(len(blocks)))
        time = self._order.tick(instruction)
        planes = [(WRITE, tokens.writers)]
        if kind != READ:
            planes += [(READ, tokens.readers), (READ, tokens.others)]
        if kind != ATOMIC:
            planes.append((ATOMIC, tokens.atomics))
        for what, plane in planes:
            conflict = self._conflict(plane[cells], blocks_, position, what)
            if conflict is not None:
                return conflict
        mine = (time << self._BLOCK_BITS) | (blocks_ + 1)
        if kind == READ:
            self._note_read(cells, mine)
        elif kind == ATOMIC:
            tokens.atomics[cells] = mine
            self._order.atomic(time, blocks, at + self._address)
        else:
            tokens.writers[cells] = mine
            # Of several blocks that write one cell in one instruction, only one is found there afterwards.
            return self._conflict(tokens.writers[cells], blocks_, position, what=WRITE)
        return None

    def _conflict(self, found: Array, blocks: Array, position: Array, what: str) -> Conflict | None:
        suspects = np.flatnonzero((found != 0) & (found & self._BLOCK != blocks + 1))
        if not len(suspects):
            return None
        pairs, first = np.unique(np.stack([found[suspects], blocks[suspects]]), axis=1, return_index=True)
        for (token, block), which in zip(pairs.T.tolist(), first.tolist(), strict=True):
            other, time = (token & self._BLOCK) - 1, token >> self._BLOCK_BITS
            if not self._order.ordered(other, time, block):
                return Conflict(int(position[suspects[which]]), other, self._order.instruction_at(time), what)
        return None

    def _note_read(self, cells: Array, mine: Array) -> None:
        """As in shared memory: the last reader, and one of another block."""
        tokens = self._tokens
        before = tokens.readers[cells]
        tokens.readers[cells] = mine
        last = tokens.readers[cells]
        for each in (before, mine):
            moves = (each != 0) & (each & self._BLOCK != last & self._BLOCK)
            if moves.any():
                tokens.others[cells[moves]] = each[moves]
