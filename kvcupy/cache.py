"""The cache as an inference loop uses it: sequences, steps, layers. Lengths and page tables live on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcupy import ops
from kvcupy.allocator import PageAllocator, Reservation
from kvcupy.backends.base import Array
from kvcupy.errors import StaleStep
from kvcupy.pool import KVPool, LayerPool, Unique
from kvcupy.spec import KVSpec, whole_number


@dataclass(frozen=True, eq=False)
class Step:
    """Room for one step's new tokens, and what the kernels need to know about its batch.

    sequences: ids, in the order of the batch: that of the dict given to `KVCache.reserve`.
    counts: new tokens of each sequence; K and V of a step have sum(counts) tokens, sequence after sequence.
    seq_lens: int32 [batch], tokens with the new ones. page_table: int32 [batch, max_pages], unused entries -1.
    slot_mapping: int64 [sum(counts)], where the new tokens go.
    """

    sequences: tuple[int, ...]
    counts: tuple[int, ...]
    seq_lens: Array
    page_table: Array
    slot_mapping: Array
    _lengths: np.ndarray[Any, Any]
    _reservation: Reservation

    @property
    def alive(self) -> bool:
        """False once one of its sequences was reserved again, forked, truncated, freed or cancelled."""
        return self._reservation.alive


@dataclass(frozen=True)
class CacheStats:
    """What a cache holds. `tokens` counts a token that forks share once for each of them."""

    device: str
    sequences: int
    tokens: int
    num_pages: int
    used_pages: int
    free_pages: int
    shared_pages: int
    total_bytes: int
    used_bytes: int
    internal_fragmentation: float
    """Share of the used pages' slots that hold no token."""
    padding_waste: float
    """Share of a row's bytes that is padding."""


class KVCache(Unique):
    """A paged KV cache of many sequences on one device.

    spec: the shape of a token's K and V. Give num_pages, or memory as bytes or text such as "8GiB".
    device: "cuda", "cpu", "ptx", or "auto": "cuda" where a GPU answers, else "cpu".

    A step appends first, then decodes, layer by layer:

    >>> import numpy as np
    >>> cache = KVCache(KVSpec(num_layers=1, num_kv_heads=2, head_dim=64), num_pages=8)
    >>> a = cache.add()
    >>> step = cache.reserve({a: 3})
    >>> k, v = np.ones((2, 3, 2, 64), np.float16)
    >>> cache.append(step, 0, k, v)
    >>> out = cache.decode(step, 0, np.ones((1, 4, 64), np.float16))
    >>> out.shape, float(out[0, 0, 0])
    ((1, 4, 64), 1.0)

    One cache is for one thread at a time.
    """

    def __init__(
        self,
        spec: KVSpec,
        *,
        memory: int | str | None = None,
        num_pages: int | None = None,
        device: str = "auto",
    ) -> None:
        self.pool = KVPool(spec, num_pages, memory=memory, device=device)
        self.spec = spec
        self._allocator = PageAllocator(self.pool.num_pages, spec.page_size)
        self._layers = list(self.pool)
        # Host copy of the page tables: a row per sequence, brought up to date when its pages change.
        self._table = np.full((8, 8), -1, np.int32)
        self._rows: dict[int, int] = {}
        self._free_rows = list(range(7, -1, -1))

    def __repr__(self) -> str:
        used = self._allocator.used_pages
        return f"KVCache({used} of {self.pool.num_pages} pages used on {self.device}, {self.spec})"

    @property
    def device(self) -> str:
        return self.pool.backend.name

    @property
    def free_pages(self) -> int:
        return self._allocator.free_pages

    @property
    def sequences(self) -> list[int]:
        """Ids of the live sequences, oldest first."""
        return self._allocator.sequences

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._allocator.length(sequence)

    # Sequences

    def add(self) -> int:
        """A new, empty sequence: its id."""
        sequence = self._allocator.add()
        self._give_row(sequence)
        return sequence

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens. Pages are shared; the first to write into one gets a copy."""
        child = self._allocator.fork(sequence)
        self._give_row(child)
        self._write_row(child, 0)
        return child

    def truncate(self, sequence: int, tokens: int) -> None:
        """Keep the first `tokens` tokens of a sequence. More than it has is a ValueError."""
        self._allocator.truncate(sequence, tokens)

    def free(self, sequence: int) -> None:
        """Forget a sequence and give back its pages."""
        self._allocator.free(sequence)
        self._free_rows.append(self._rows.pop(sequence))

    # Steps

    def reserve(self, counts: Mapping[int, int]) -> Step:
        """Make room for counts[sequence] new tokens in each sequence: all of them, or OutOfPages and nothing.

        Lengths advance now; the step is good until its sequences are reserved again, forked, truncated or
        freed, and `cancel` takes it back. Pages shared with a fork are copied here, if they will be written.
        A count of 0 puts a sequence into the batch without a new token.
        """
        reservation = self._allocator.reserve(counts)
        try:
            return self._make_step(reservation)
        except BaseException:  # no memory for the step's arrays, or an interrupt
            self._cancel(reservation)
            raise

    def cancel(self, step: Step) -> None:
        """Undo a reservation: lengths and pages are as before; the step, and any older one, is stale.

        Raises StaleStep if it no longer stands.
        """
        self._cancel(step._reservation)

    def append(self, step: Step, layer: int, k: Any, v: Any) -> None:
        """Store the step's new tokens in one layer.

        k, v: [sum(step.counts), num_kv_heads, head_dim], sequence after sequence; types as in `kvcupy.append`.
        """
        pool = self._layer(step, layer)
        ops.append(k, v, pool, step.slot_mapping, check=False)

    def decode(
        self,
        step: Step,
        layer: int,
        q: Any,
        *,
        query_lens: Any = None,
        scale: float | None = None,
        out: Any = None,
        return_lse: bool = False,
    ) -> Any:
        """Attention of the step's query tokens in one layer, over all tokens stored so far, the new included.

        q: [query_tokens, num_q_heads, head_dim]: by default each sequence's last token; with query_lens
        [batch] (a list or NumPy array), each sequence's last n tokens, causal. Returns out, or (out, lse): see
        `kvcupy.decode_attention`.
        """
        pool = self._layer(step, layer)
        if query_lens is not None:
            query_lens = _query_lens(query_lens, step._lengths, len(q))
        return ops.decode_attention(
            q,
            pool,
            step.page_table,
            step.seq_lens,
            query_lens=query_lens,
            scale=scale,
            out=out,
            return_lse=return_lse,
            check=False,
        )

    # Looking

    def read(self, sequence: int, layer: int) -> tuple[Array, Array]:
        """K and V of all tokens of a sequence as stored: two arrays [tokens, num_kv_heads, head_dim]."""
        pages = np.array(self._allocator.pages(sequence), np.int64)
        slots = pages[:, None] * self.spec.page_size + np.arange(self.spec.page_size)
        wanted = slots.reshape(-1)[: self._allocator.length(sequence)]
        return ops.gather(self.pool[layer], wanted, check=False)

    def stats(self) -> CacheStats:
        """Counts of pages, tokens and bytes, and what of them is wasted."""
        allocator, page_size = self._allocator, self.spec.page_size
        tokens = {sequence: allocator.length(sequence) for sequence in allocator.sequences}
        filled: dict[int, int] = {}  # a shared page is as full as its longest owner says
        for sequence, length in tokens.items():
            pages = allocator.pages(sequence)
            for page in pages[:-1]:
                filled[page] = page_size
            for page in pages[-1:]:
                filled[page] = max(filled.get(page, 0), length - (len(pages) - 1) * page_size)
        slots = allocator.used_pages * page_size
        return CacheStats(
            device=self.device,
            sequences=len(tokens),
            tokens=sum(tokens.values()),
            num_pages=allocator.num_pages,
            used_pages=allocator.used_pages,
            free_pages=allocator.free_pages,
            shared_pages=allocator.shared_pages,
            total_bytes=self.pool.nbytes,
            used_bytes=allocator.used_pages * self.spec.page_bytes,
            internal_fragmentation=1 - sum(filled.values()) / slots if slots else 0.0,
            padding_waste=self.spec.padding_waste,
        )

    def check_integrity(self) -> None:
        """Prove that every page is free or owned and that counts agree. Raises IntegrityError."""
        self._allocator.check_integrity()

    # Inside

    def _make_step(self, reservation: Reservation) -> Step:
        counts = reservation.counts
        batch = len(counts)
        if reservation.copies:
            pairs = np.array(reservation.copies, np.int64).T.copy()
            backend = self.pool.backend
            backend.copy_pages(self.pool.data, *map(backend.asarray, pairs))
        new = np.fromiter(counts.values(), np.int64, batch)
        ends = np.fromiter(map(self._allocator.length, counts), np.int64, batch)
        starts = ends - new
        for sequence in reservation.grown:
            first = (self._allocator.length(sequence) - counts[sequence]) // self.spec.page_size
            self._write_row(sequence, first)
        rows = np.fromiter(map(self._rows.__getitem__, counts), np.int64, batch)
        page_size = self.spec.page_size
        num_pages = -(-ends // page_size)
        columns = np.arange(max(1, int(num_pages.max(initial=0))))
        table = np.where(columns < num_pages[:, None], self._table[rows[:, None], columns], np.int32(-1))
        # Position of each new token in its sequence: start + how many of the sequence's new tokens precede it.
        positions = np.arange(int(new.sum())) + np.repeat(starts - (np.cumsum(new) - new), new)
        pages = self._table[np.repeat(rows, new), positions // page_size].astype(np.int64)
        to_device = self.pool.backend.upload
        return Step(
            sequences=tuple(counts),
            counts=tuple(counts.values()),
            seq_lens=to_device(ends.astype(np.int32)),
            page_table=to_device(table),
            slot_mapping=to_device(pages * page_size + positions % page_size),
            _lengths=ends,
            _reservation=reservation,
        )

    def _cancel(self, reservation: Reservation) -> None:
        self._allocator.cancel(reservation)
        for sequence in reservation.counts:
            self._write_row(sequence, 0)

    def _layer(self, step: Step, layer: int) -> LayerPool:
        if step._reservation.allocator is not self._allocator:
            raise ValueError("step must come from this cache, got one of another")
        if not step.alive:
            raise StaleStep(
                "this step's sequences were reserved again, forked, truncated, freed or cancelled since: reserve anew"
            )
        return self._layers[whole_number("layer", layer, 0, len(self._layers) - 1)]

    def _give_row(self, sequence: int) -> None:
        if not self._free_rows:
            rows = len(self._table)
            self._table = np.concatenate([self._table, np.full_like(self._table, -1)])
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        self._rows[sequence] = self._free_rows.pop()

    def _write_row(self, sequence: int, first: int) -> None:
        """Bring a sequence's row up to date from column `first` on."""
        pages = self._allocator.pages(sequence)
        while len(pages) > self._table.shape[1]:
            self._table = np.concatenate([self._table, np.full_like(self._table, -1)], axis=1)
        self._table[self._rows[sequence], first : len(pages)] = pages[first:]


def _query_lens(query_lens: Any, lengths: np.ndarray[Any, Any], query_tokens: int) -> np.ndarray[Any, Any]:
    """Checked on the host, which knows the lengths: a step copies nothing from the device."""
    counts = np.asarray(query_lens)
    if counts.dtype.kind not in "iu" or counts.shape != lengths.shape:
        raise ValueError(f"query_lens must be whole numbers of shape [{len(lengths)}], got {query_lens!r}")
    ops.check_query_lens(counts, lengths, query_tokens)
    return counts.astype(np.int32)
