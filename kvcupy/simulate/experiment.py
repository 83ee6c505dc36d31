"""The layout experiment: a ragged batch decoded for real, from contiguous and paged caches, padded and not.

One driver for all devices: where time means something, what comes out is bandwidth; on `ptx`, counts. All strategies
take turns, layer by layer, so that a machine that is busy for a while slows all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from kvcupy.backends import get_backend
from kvcupy.backends.base import STORAGE_DTYPES, Cost, require_stored
from kvcupy.cache import KVCache
from kvcupy.measure import MAX_SHARE, MIN_READ_BYTES, layer_pools, require_plausible
from kvcupy.simulate.fragmentation import churn
from kvcupy.spec import KVSpec

Progress = Callable[[str, int, int], None]
"""Told (what is being done, how much of it is done, how much there is)."""

CHURN_REQUESTS = 2000

READ_RETRIES = 3

MAX_EMPTY = 4
"""Slots are allocated for at most so many times the tokens: emptier pages would measure something else."""


@dataclass(frozen=True)
class Strategy:
    """One way of laying out the cache: a row of the experiment's table."""

    name: str
    spec: KVSpec
    contiguous: bool


@dataclass(frozen=True)
class Row:
    """What was measured or counted, and computed, for one strategy.

    Bandwidths and tokens_per_s are None on a device that is not timed; sectors, bytes_moved and warp_instructions
    on one that is.
    """

    strategy: str
    dtype: str
    kv_bandwidth_bytes_per_s: float | None
    """K and V read by decode (elements, not padding) over the time of append and decode."""
    share_of_read_bandwidth: float | None
    tokens_per_s: float | None
    """Attention alone, all layers of the model: append and decode of one token per sequence."""
    kv_bytes: int
    """K and V that decode reads, elements alone, in all steps and layers."""
    sectors: int | None
    """32-byte sectors that append and decode move, in all steps and layers."""
    bytes_moved: int | None
    """32 bytes for each of the sectors."""
    warp_instructions: int | None
    bytes_per_token: int
    internal_fragmentation: float
    padding_waste: float
    external_fragmentation: float
    peak_pages: int


@dataclass(frozen=True)
class Comparison:
    """How fast a strategy decodes a layer, as a multiple of its baseline measured next to it.

    speed: the median over all layers and steps. spread: half of them lie within speed ± spread, about.
    """

    strategy: str
    baseline: str
    speed: float
    spread: float

    @property
    def certain(self) -> bool:
        """Whether this run can tell the two apart."""
        return abs(self.speed - 1) > self.spread


@dataclass(frozen=True)
class ExperimentResult:
    device: str
    device_description: str
    read_bandwidth_bytes_per_s: float | None
    working_set_bytes: int
    """Distinct K and V that the timed steps go round, all strategies together."""
    lengths: tuple[int, ...]
    rows: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]
    """Paged against contiguous, and padded against not; none on a device that is not timed."""


def strategies(spec: KVSpec, padding: int | str, max_tokens: int) -> list[Strategy]:
    """Contiguous and paged, each with rows as they are and with rows padded to `padding`."""
    plain = replace(spec, row_align=1)
    padded = replace(spec, row_align=padding)
    return [
        Strategy("contiguous", plain.contiguous(max_tokens), True),
        Strategy("contiguous + padding", padded.contiguous(max_tokens), True),
        Strategy("paged", plain, False),
        Strategy("paged + padding", padded, False),
    ]


def run_experiment(
    spec: KVSpec,
    *,
    num_q_heads: int,
    batch: int = 8,
    context: int = 1024,
    steps: int = 3,
    padding: int | str = "128-elements",
    device: str = "auto",
    seed: int = 0,
    churn_bytes: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> ExperimentResult:
    """Measure decode from every strategy, and churn requests through its allocator.

    spec: the model's cache; its row_align is replaced by each strategy's.
    batch sequences of context/2 to context tokens (the seed decides) decode `steps` tokens each, through all
    layers of the model. churn_bytes is the size of the pool that the churn, not executed, fills; None:
    32 sequences of `context` tokens without padding.
    Raises KVCupyError if more than the read bandwidth seems to be reached.
    """
    require_stored(spec.dtype, "to be executed")
    backend = get_backend(device)
    rng = np.random.default_rng(seed)
    lengths = rng.integers(max(1, context // 2), context + 1, batch)
    lengths[rng.integers(batch)] = context
    tokens = int(lengths.sum())
    token_bytes = spec.num_kv_heads * spec.head_dim * spec.itemsize * 2
    tokens_read = sum(tokens + batch * (step + 1) for step in range(steps))  # each step reads its new tokens too
    read_bytes = spec.num_layers * tokens_read * token_bytes

    table = strategies(spec, padding, context + steps)
    layer_bytes = tokens * token_bytes
    if backend.timed and layer_bytes < MIN_READ_BYTES:
        raise ValueError(
            f"batch and context must make a layer's K and V at least {MIN_READ_BYTES} bytes, or the calls would be "
            f"measured and not memory; got {layer_bytes} bytes from {tokens} tokens"
        )
    # A pool that is not visited twice need not be there twice: reading memory, below, empties the caches.
    num_pools = min(layer_pools(backend, len(table) * layer_bytes), spec.num_layers * steps)
    pages = [sum(strategy.spec.pages_for(int(n) + steps) for n in lengths) for strategy in table]
    slots = sum(n * strategy.spec.page_size for n, strategy in zip(pages, table, strict=True))
    if backend.timed and slots > MAX_EMPTY * len(table) * tokens:
        raise ValueError(
            f"context must be longer, or page_size smaller, to measure memory: {tokens} tokens leave the pages "
            f"that hold them nearly empty; got context {context} and page_size {spec.page_size}"
        )
    workloads = []
    for number, strategy in enumerate(table):
        progress("filling caches", number, len(table))
        pool_spec = replace(strategy.spec, num_layers=num_pools)
        workloads.append(_Workload(pool_spec, pages[number], num_q_heads, lengths, device, rng))
    progress("reading memory", 0, 1)
    read_bandwidth = backend.read_bandwidth()
    visits: list[Cost] = []
    for number in range(steps):
        progress("decoding", number, steps)
        for workload in workloads:
            workload.reserve()
        rounds = range(number * spec.num_layers, (number + 1) * spec.num_layers)
        visits += backend.measure(
            partial(workload.visit, turn % num_pools) for turn in rounds for workload in workloads
        )
    costs = [_total(visits[number :: len(table)]) for number in range(len(table))]
    bandwidths = [None if cost.seconds is None else read_bytes / cost.seconds for cost in costs]
    if read_bandwidth is not None:
        fastest = max(bandwidth or 0.0 for bandwidth in bandwidths)
        for attempt in range(READ_RETRIES):  # the machine may have become faster since
            if attempt == 0 or fastest > MAX_SHARE * read_bandwidth:
                read_bandwidth = max(read_bandwidth, backend.read_bandwidth() or 0.0)
        require_plausible(fastest / read_bandwidth)

    if churn_bytes is None:
        churn_bytes = 32 * context * table[0].spec.bytes_per_token
    rows = []
    for number, (strategy, cost, bandwidth) in enumerate(zip(table, costs, bandwidths, strict=True)):
        progress("churn", number, len(table))
        slots = churn_bytes // strategy.spec.bytes_per_token
        waste = churn(
            "contiguous" if strategy.contiguous else "paged",
            num_requests=CHURN_REQUESTS,
            slots=slots,
            page_size=spec.page_size,
            seed=seed,
        )
        rows.append(
            Row(
                strategy=strategy.name,
                dtype=spec.dtype,
                kv_bandwidth_bytes_per_s=bandwidth,
                share_of_read_bandwidth=bandwidth / read_bandwidth if bandwidth and read_bandwidth else None,
                tokens_per_s=None if cost.seconds is None else batch * steps / cost.seconds,
                kv_bytes=read_bytes,
                sectors=cost.sectors,
                bytes_moved=None if cost.sectors is None else 32 * cost.sectors,
                warp_instructions=cost.warp_instructions,
                bytes_per_token=strategy.spec.bytes_per_token,
                internal_fragmentation=waste.internal_fragmentation,
                padding_waste=strategy.spec.padding_waste,
                external_fragmentation=waste.external_fragmentation,
                peak_pages=waste.peak_pages,
            )
        )
    return ExperimentResult(
        device=backend.name,
        device_description=backend.describe(),
        read_bandwidth_bytes_per_s=read_bandwidth,
        working_set_bytes=len(table) * num_pools * layer_bytes,
        lengths=tuple(map(int, lengths)),
        rows=tuple(rows),
        comparisons=_comparisons([strategy.name for strategy in table], visits) if backend.timed else (),
    )


class _Workload:
    """A batch in a cache of one strategy, ready to decode: the same tokens for all strategies."""

    def __init__(
        self,
        spec: KVSpec,
        num_pages: int,
        num_q_heads: int,
        lengths: np.ndarray[Any, Any],
        device: str,
        rng: np.random.Generator,
    ) -> None:
        self.cache = KVCache(spec, num_pages=num_pages, device=device)
        _scatter_free_pages(self.cache, rng)
        chunk, dtype, row = 1024, STORAGE_DTYPES[spec.dtype], (spec.num_kv_heads, spec.head_dim)
        shapes = [*2 * [(max(chunk, len(lengths)), *row)], (len(lengths), num_q_heads, spec.head_dim)]
        k, v, self.q = (
            self.cache.pool.backend.upload(rng.standard_normal(shape, np.float32).astype(dtype)) for shape in shapes
        )
        self.k, self.v = k[: len(lengths)], v[: len(lengths)]
        self.sequences = [self.cache.add() for _ in lengths]
        for sequence, length in zip(self.sequences, lengths, strict=True):
            for start in range(0, length, chunk):
                count = min(chunk, int(length) - start)
                step = self.cache.reserve({sequence: count})
                for layer in range(spec.num_layers):
                    self.cache.append(step, layer, k[:count], v[:count])
        self.step = self.cache.reserve(dict.fromkeys(self.sequences, 0))
        self.cache.decode(self.step, spec.num_layers - 1, self.q)  # may compile

    def reserve(self) -> None:
        self.step = self.cache.reserve(dict.fromkeys(self.sequences, 1))

    def visit(self, layer: int) -> None:
        """What is measured: one layer's part of a step."""
        self.cache.append(self.step, layer, self.k, self.v)
        self.cache.decode(self.step, layer, self.q)


def _total(visits: list[Cost]) -> Cost:
    """Counts add up; seconds are the median times their number, since a pause that hits some is not theirs."""
    if visits[0].seconds is None:
        return Cost.total(visits)
    return Cost(seconds=float(np.median([visit.seconds for visit in visits])) * len(visits))


def _comparisons(names: list[str], visits: list[Cost]) -> tuple[Comparison, ...]:
    seconds = np.array([visit.seconds for visit in visits], np.float64).reshape(-1, len(names))
    comparisons = []
    for strategy, baseline in (("paged", "contiguous"), ("paged + padding", "paged")):
        speeds = seconds[:, names.index(baseline)] / seconds[:, names.index(strategy)]
        low, middle, high = np.percentile(speeds, (25, 50, 75))
        comparisons.append(Comparison(strategy, baseline, float(middle), float(high - low) / 2))
    return tuple(comparisons)


def _scatter_free_pages(cache: KVCache, rng: np.random.Generator) -> None:
    """Leave the free list in random order, as in a long-lived server: in a new cache all pages are neighbours."""
    owners = [cache.add() for _ in range(cache.free_pages)]
    cache.reserve(dict.fromkeys(owners, 1))
    for index in rng.permutation(len(owners)):
        cache.free(owners[index])
