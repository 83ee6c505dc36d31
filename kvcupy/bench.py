"""What decode and append cost, shape by shape: seconds on `cpu` and `cuda`, counted sectors and lines on `ptx`.

Shapes are measured in turn, round after round, each round with the device's read bandwidth beside them: on a machine
whose speed changes from one minute to the next, only what was measured side by side compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from kvcupy import ops
from kvcupy.backends import Backend, get_backend
from kvcupy.backends.base import STORAGE_DTYPES, require_stored
from kvcupy.measure import layer_pools, require_plausible
from kvcupy.pool import LayerPool
from kvcupy.spec import LAYOUTS, KVSpec

Array = np.ndarray[Any, Any]

SECTOR_BYTES = 32
LINE_BYTES = 128


@dataclass(frozen=True)
class Shape:
    """A batch: `batch` sequences of `context` tokens each, in one layer of `spec`, under num_q_heads query heads."""

    spec: KVSpec
    num_q_heads: int
    batch: int
    context: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of the batch's K and V, elements alone."""
        return 2 * self.batch * self.context * self.spec.num_kv_heads * self.spec.head_dim * self.spec.itemsize

    @property
    def num_pages(self) -> int:
        return self.batch * self.spec.pages_for(self.context)

    @property
    def pool_bytes(self) -> int:
        """Bytes of a layer's pages, as whole lines: pools that follow one another are aligned alike."""
        return -(-self.num_pages * self.spec.strides.page // LINE_BYTES) * LINE_BYTES


@dataclass(frozen=True)
class Footprint:
    """What the elements of K and V of a batch lie in: 32-byte sectors, and 128-byte lines."""

    sectors: int
    lines: int
    lines_with_k_and_v: int


@dataclass(frozen=True)
class Row:
    """One operation on one shape. What a device cannot tell is None: counts on `cpu` and `cuda`, seconds on `ptx`.

    op: "decode", which reads all K and V of the batch, or "append", which writes all of them at once.
    kv_bytes: bytes of those K and V, elements alone.
    seconds: of one launch, with its merge. bytes_per_s: kv_bytes over that.
    share_of_read_bandwidth: the median over rounds of bytes_per_s over the round's read bandwidth.
    kv_sectors: 32-byte sectors that requests to the pages move; one that two requests ask for counts twice.
    kv_sectors_over_minimum: kv_sectors over kv_bytes / 32. kv_useful_share: its inverse.
    kv_footprint_sectors: different sectors that hold an element: what memory must deliver, even if a cache catches
        every second request.
    kv_lines, kv_lines_with_k_and_v: different 128-byte lines that hold an element; those that hold K and V.
    sectors: all that the launches move: K and V, q, results, page table, partial results.
    """

    op: str
    batch: int
    context: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    layout: str
    row_align: int | str
    page_size: int
    row_bytes: int
    kv_bytes: int
    seconds: float | None = None
    bytes_per_s: float | None = None
    share_of_read_bandwidth: float | None = None
    kv_sectors: int | None = None
    kv_sectors_over_minimum: float | None = None
    kv_useful_share: float | None = None
    kv_footprint_sectors: int | None = None
    kv_lines: int | None = None
    kv_lines_with_k_and_v: int | None = None
    sectors: int | None = None
    warp_instructions: int | None = None


@dataclass(frozen=True)
class BenchResult:
    """read_bandwidth_bytes_per_s: the median over rounds. working_set_bytes: the smallest of any shape."""

    device: str
    device_description: str
    read_bandwidth_bytes_per_s: float | None
    working_set_bytes: int | None
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Axes:
    """Values of each property of a shape, to be combined. heads: pairs of (query heads, KV heads)."""

    batch: tuple[int, ...]
    context: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    head_dim: tuple[int, ...] = (128,)
    dtype: tuple[str, ...] = ("float16",)
    layout: tuple[str, ...] = ("interleaved",)
    row_align: tuple[int | str, ...] = (16,)
    page_size: int = 16

    def shapes(self) -> list[Shape]:
        """All combinations. Raises ValueError for a value that no cache can have."""
        return [
            Shape(
                KVSpec(
                    num_layers=1,
                    num_kv_heads=kv_heads,
                    head_dim=head_dim,
                    page_size=self.page_size,
                    dtype=dtype,
                    layout=layout,
                    row_align=row_align,
                ),
                q_heads,
                batch,
                context,
            )
            for dtype, head_dim, row_align, layout, (q_heads, kv_heads), batch, context in product(
                self.dtype, self.head_dim, self.row_align, self.layout, self.heads, self.batch, self.context
            )
        ]


def default_axes(device: str) -> Axes:
    """What is measured on a device unless other values are given. `ptx`: all layouts and paddings of small batches.
    Else one shape of 128 MiB of K and V (`cuda`: 1 GiB)."""
    if device == "ptx":
        return Axes(
            batch=(2,),
            context=(200,),
            heads=((2, 2),),
            head_dim=(64, 80, 96, 120, 125, 128, 256),
            dtype=tuple(STORAGE_DTYPES),
            layout=tuple(LAYOUTS),
            row_align=(1, 16, 128, "128-elements"),
        )
    return Axes(batch=(64 if device == "cuda" else 8,), context=(4096,), heads=((32, 8),))


def default_shapes(device: str) -> list[Shape]:
    """A short list for a device: on `ptx` all combinations, else the default shape and what differs in one thing."""
    axes = default_axes(device)
    if device == "ptx":
        return axes.shapes()
    (base,) = axes.shapes()
    spec, batch, context = base.spec, base.batch, base.context
    return [
        base,
        *(replace(base, spec=replace(spec, dtype=dtype)) for dtype in STORAGE_DTYPES if dtype != spec.dtype),
        *(replace(base, spec=replace(spec, layout=layout)) for layout in LAYOUTS if layout != spec.layout),
        replace(base, spec=replace(spec, head_dim=64)),
        replace(base, spec=replace(spec, num_kv_heads=base.num_q_heads), context=context // 4),
        replace(base, batch=batch // 8, context=context * 8),
        replace(base, batch=batch * 8, context=context // 8),
    ]


def bench(
    wanted: Sequence[Shape],
    device: str = "auto",
    *,
    rounds: int = 3,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> BenchResult:
    """Measure, or on `ptx` count, these shapes. progress is told (what, how much of it is done, how much there is).

    Raises KVCupyError if more than the read bandwidth seems to be reached, ValueError for a dtype whose values are
    not stored.
    """
    for shape in wanted:
        require_stored(shape.spec.dtype, "to measure")
    backend = get_backend(device)
    if backend.timed:
        return _measure(wanted, backend, rounds, np.random.default_rng(seed), progress)
    rows = tuple(_count(wanted, backend, seed, progress))
    return BenchResult(backend.name, backend.describe(), None, None, rows)


class _Batch:
    """A shape in memory: pages in random order in several pools, and what goes in and comes out."""

    def __init__(self, shape: Shape, backend: Backend, memory: Any, num_pools: int, rng: np.random.Generator) -> None:
        spec = shape.spec
        self.shape = shape
        self.pools = []
        for number in range(num_pools):
            data = memory[number * shape.pool_bytes : (number + 1) * shape.pool_bytes]
            self.pools.append(LayerPool.wrap(spec, data, strides=spec.strides, device=backend.name))
        self.page_table = rng.permutation(shape.num_pages).astype(np.int32).reshape(shape.batch, -1)
        self._table = backend.upload(self.page_table)
        self._lengths = backend.upload(np.full(shape.batch, shape.context, np.int32))
        slots = self.page_table[:, :, None].astype(np.int64) * spec.page_size + np.arange(spec.page_size)
        self._slots = backend.upload(slots.reshape(shape.batch, -1)[:, : shape.context].reshape(-1))
        q = rng.standard_normal((shape.batch, shape.num_q_heads, spec.head_dim), np.float32)
        self._q = backend.upload(q.astype(STORAGE_DTYPES[spec.dtype]))
        self._out = backend.empty(q.shape, STORAGE_DTYPES[spec.dtype])

    def decode(self, pool: LayerPool) -> None:
        ops.decode_attention(self._q, pool, self._table, self._lengths, out=self._out, check=False)

    def append(self, source: Any, pool: LayerPool) -> None:
        """Write the whole batch at once, with K and V from the bytes of `source`."""
        spec, tokens = self.shape.spec, self.shape.batch * self.shape.context
        rows = source[: self.shape.kv_bytes].view(STORAGE_DTYPES[spec.dtype])
        k, v = rows.reshape(2, tokens, spec.num_kv_heads, spec.head_dim)
        ops.append(k, v, pool, self._slots, check=False)


_TILE_BYTES = 1 << 20


def _filled(backend: Backend, nbytes: int) -> Any:
    """At least nbytes that are ordinary small numbers in every float type."""
    memory = backend.allocate(-(-nbytes // _TILE_BYTES) * _TILE_BYTES)
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 8, _TILE_BYTES // 2) | 0x3C00 | rng.integers(0, 2, _TILE_BYTES // 2) << 15
    memory.reshape(-1, _TILE_BYTES)[...] = backend.upload(words.astype(np.uint16).view(np.uint8))
    return memory


def _measure(
    wanted: Sequence[Shape],
    backend: Backend,
    rounds: int,
    rng: np.random.Generator,
    progress: Callable[[str, int, int], None],
) -> BenchResult:
    pools = [layer_pools(backend, shape.kv_bytes) for shape in wanted]
    needed = max(count * shape.pool_bytes for count, shape in zip(pools, wanted, strict=True))
    progress("filling memory", 0, 1)
    memory = _filled(backend, needed)
    source = _filled(backend, max(shape.kv_bytes for shape in wanted))
    batches = [_Batch(shape, backend, memory, count, rng) for shape, count in zip(wanted, pools, strict=True)]
    bandwidths: list[float] = []
    seconds: dict[tuple[int, str], list[float]] = {}
    for number in range(-1, rounds):  # the first one compiles, and is not a result
        if number >= 0:
            progress("reading memory", number * len(wanted), rounds * len(wanted))
            bandwidths.append(backend.read_bandwidth() or 0.0)
        for index, batch in enumerate(batches):
            what = "compiling" if number < 0 else f"round {number + 1} of {rounds}"
            progress(what, max(0, number) * len(wanted) + index, rounds * len(wanted))
            for op, work in (("decode", batch.decode), ("append", partial(batch.append, source))):
                visited = batch.pools if number >= 0 else batch.pools[:1]
                costs = backend.measure([partial(work, pool) for pool in visited])
                if number >= 0:
                    seconds.setdefault((index, op), []).append(median(cost.seconds or 0.0 for cost in costs))
    rows = []
    for (index, op), taken in seconds.items():
        shape = wanted[index]
        share = median(shape.kv_bytes / each / bandwidth for each, bandwidth in zip(taken, bandwidths, strict=True))
        require_plausible(share)
        rows.append(
            replace(
                _row(op, shape),
                seconds=median(taken),
                bytes_per_s=shape.kv_bytes / median(taken),
                share_of_read_bandwidth=share,
            )
        )
    working_set = min(count * shape.kv_bytes for count, shape in zip(pools, wanted, strict=True))
    return BenchResult(backend.name, backend.describe(), median(bandwidths), working_set, tuple(rows))


def _row(op: str, shape: Shape) -> Row:
    spec = shape.spec
    return Row(
        op=op,
        batch=shape.batch,
        context=shape.context,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=spec.dtype,
        layout=spec.layout,
        row_align=spec.row_align,
        page_size=spec.page_size,
        row_bytes=spec.row_bytes,
        kv_bytes=shape.kv_bytes,
    )


# Counting


def _count(
    wanted: Sequence[Shape], backend: Backend, seed: int, progress: Callable[[str, int, int], None]
) -> Iterator[Row]:
    """Paddings that make rows of the same length make the same addresses: those are launched once."""
    memory = _filled(backend, max(shape.pool_bytes for shape in wanted))
    known: dict[tuple[Shape, int], Row] = {}
    for number, shape in enumerate(wanted):
        progress("counting", number, len(wanted))
        key = replace(shape, spec=replace(shape.spec, row_align=1)), shape.spec.row_bytes
        if key not in known:
            known[key] = _counted(shape, backend, memory, seed)
        yield replace(known[key], row_align=shape.spec.row_align)


def _counted(shape: Shape, backend: Backend, memory: Any, seed: int) -> Row:
    batch = _Batch(shape, backend, memory, 1, np.random.default_rng(seed))
    (cost,) = backend.measure([partial(batch.decode, batch.pools[0])])
    lies_in = footprint(shape.spec, batch.page_table, [shape.context] * shape.batch)
    assert cost.pool_sectors is not None
    moved = cost.pool_sectors * SECTOR_BYTES
    return replace(
        _row("decode", shape),
        kv_sectors=cost.pool_sectors,
        kv_sectors_over_minimum=moved / shape.kv_bytes,
        kv_useful_share=shape.kv_bytes / moved,
        kv_footprint_sectors=lies_in.sectors,
        kv_lines=lies_in.lines,
        kv_lines_with_k_and_v=lies_in.lines_with_k_and_v,
        sectors=cost.sectors,
        warp_instructions=cost.warp_instructions,
    )


def footprint(spec: KVSpec, page_table: Array, lengths: Sequence[int]) -> Footprint:
    """Where the elements of these sequences lie, in a layer that starts at a multiple of 128 bytes.

    page_table: [batch, max_pages]; lengths: tokens of each sequence.

    A row of 64 float16 is a line of its own; one of 80 shares lines with its neighbours:

    >>> aligned = footprint(KVSpec(num_layers=1, num_kv_heads=1, head_dim=64), np.array([[0]]), [16])
    >>> aligned.lines, aligned.lines_with_k_and_v
    (32, 0)
    >>> footprint(KVSpec(num_layers=1, num_kv_heads=1, head_dim=80), np.array([[0]]), [16])
    Footprint(sectors=160, lines=40, lines_with_k_and_v=24)
    """
    strides = spec.strides
    slots = []
    for pages, length in zip(page_table, lengths, strict=True):
        positions = np.arange(length)
        slots.append(pages[positions // spec.page_size] * strides.page + positions % spec.page_size * strides.token)
    heads = np.arange(spec.num_kv_heads) * strides.head
    k = (np.concatenate(slots).astype(np.int64)[:, None] + heads).reshape(-1)
    row_bytes = spec.head_dim * spec.itemsize
    k_lines, v_lines = (_touched(rows, row_bytes, LINE_BYTES) for rows in (k, k + strides.kv))
    return Footprint(
        sectors=len(_touched(np.concatenate([k, k + strides.kv]), row_bytes, SECTOR_BYTES)),
        lines=len(np.union1d(k_lines, v_lines)),
        lines_with_k_and_v=len(np.intersect1d(k_lines, v_lines)),
    )


def _touched(starts: Array, nbytes: int, unit: int) -> Array:
    """Numbers of the units of `unit` bytes in which the rows of nbytes at `starts` lie, each once."""
    first, last = starts // unit, (starts + nbytes - 1) // unit
    units = first[:, None] + np.arange(int((last - first).max(initial=0)) + 1)
    return np.unique(units[units <= last[:, None]])
