"""What memory requests cost: sectors and lines of global memory, bank conflicts of shared memory.

A request is one instruction of one warp. Global memory moves in sectors of 32 bytes, found by lines of 128. Shared
memory has 32 banks of 4 bytes; lanes that need different words of one bank take turns. 8 bytes a lane are served
by half warps and 16 bytes by quarter warps, so those need two and four passes anyway.
"""

from __future__ import annotations

import numpy as np

from kvcupy.backends.ptx.chunk import Lanes
from kvcupy.backends.ptx.report import Counts
from kvcupy.backends.ptx.types import Array

__all__ = ["count_global", "count_shared"]


def _per_warp(addresses: Array, lanes: Lanes) -> Array:
    """A row of 32 addresses for each warp; an absent lane repeats another of its warp, which costs nothing."""
    warps = lanes.warps
    if lanes.count == 32 * warps:
        return addresses.reshape(warps, 32)
    row = np.searchsorted(lanes.warp_ids, lanes.ids >> 5)
    rows = np.empty((warps, 32), np.int64)
    rows[row] = addresses[:, None]
    rows[row, lanes.ids & 31] = addresses
    return rows


def _sorted(rows: Array) -> Array:
    return rows if (rows[:, 1:] >= rows[:, :-1]).all() else np.sort(rows, axis=1)


def _distinct(rows: Array) -> int:
    return int(np.count_nonzero(rows[:, 1:] != rows[:, :-1])) + len(rows)


def count_global(counts: Counts, addresses: Array, nbytes: int, lanes: Lanes, store: bool) -> None:
    rows = _sorted(_per_warp(addresses, lanes))
    if store:
        counts.global_stores += len(rows)
    else:
        counts.global_loads += len(rows)
    counts.sectors += _distinct(rows >> 5)
    counts.lines += _distinct(rows >> 7)
    # Accesses of one request are aligned and equally wide: two of them coincide or share no byte.
    useful = ((rows[:, 1:] != rows[:, :-1]).sum(axis=1) + 1) * nbytes
    counts.useful_bytes += int(useful.sum())
    counts.minimum_sectors += int((-(-useful // 32)).sum())


def count_shared(counts: Counts, addresses: Array, nbytes: int, lanes: Lanes) -> None:
    rows = _per_warp(addresses, lanes)
    counts.shared_requests += len(rows)
    unit = max(4, nbytes)
    banks = 128 // unit
    words = rows // unit
    if len(rows) > 1 and (words - words[:, :1] == words[0] - words[0, 0]).all():
        # Every warp has the same pattern, moved by whole words: as many conflicts in each.
        counts.bank_conflicts += _conflicts(words[:1], banks) * len(rows)
    else:
        counts.bank_conflicts += _conflicts(words, banks)


def _conflicts(words: Array, banks: int) -> int:
    phases = _sorted(words.reshape(-1, banks))  # a phase has as many lanes as there are banks of this width
    first = np.ones(phases.shape, bool)
    np.not_equal(phases[:, 1:], phases[:, :-1], out=first[:, 1:])
    keys = np.arange(len(phases))[:, None] * banks + phases % banks
    uses = np.bincount(keys[first], minlength=len(phases) * banks).reshape(-1, banks)
    return int(uses.max(axis=1).sum()) - len(phases)
