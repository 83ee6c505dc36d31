"""The layout experiment: a ragged batch decoded for real, from contiguous and paged caches, padded and not.

One driver for all devices: where time means something, what comes out is bandwidth; on `ptx`, counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from kvcupy.backends import get_backend
from kvcupy.backends.base import STORAGE_DTYPES, Cost
from kvcupy.cache import KVCache, Step
from kvcupy.measure import MAX_SHARE, layer_pools, require_plausible
from kvcupy.simulate.fragmentation import churn
from kvcupy.spec import KVSpec

Progress = Callable[[str, int, int], None]
"""Told (what is being done, how much of it is done, how much there is)."""

CHURN_REQUESTS = 2000

READ_RETRIES = 3


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
class ExperimentResult:
    device: str
    device_description: str
    read_bandwidth_bytes_per_s: float | None
    working_set_bytes: int
    lengths: tuple[int, ...]
    rows: tuple[Row, ...]


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
    steps: int = 2,
    padding: int | str = "128-elements",
    device: str = "auto",
    seed: int = 0,
    churn_slots: int = 32768,
    progress: Progress = lambda what, done, total: None,
) -> ExperimentResult:
    """Measure decode from every strategy, and churn requests through its allocator.

    spec: the model's cache; its row_align is replaced by each strategy's.
    batch sequences of context/2 to context tokens (the seed decides) decode `steps` tokens each, through all
    layers of the model. churn_slots is the size in token slots of the pool that the churn, not executed, fills.
    Raises KVCupyError if more than the read bandwidth seems to be reached.
    """
    backend = get_backend(device)
    rng = np.random.default_rng(seed)
    lengths = rng.integers(max(1, context // 2), context + 1, batch)
    lengths[rng.integers(batch)] = context
    tokens = int(lengths.sum())
    token_bytes = spec.num_kv_heads * spec.head_dim * spec.itemsize * 2
    num_pools = layer_pools(backend, tokens * token_bytes)
    tokens_read = sum(tokens + batch * (step + 1) for step in range(steps))  # each step reads its new tokens too
    read_bytes = spec.num_layers * tokens_read * token_bytes

    table = strategies(spec, padding, context + steps)
    progress("reading memory", 0, 1)
    read_bandwidth = backend.read_bandwidth()
    costs = [
        _decode_cost(
            replace(strategy.spec, num_layers=num_pools),
            spec.num_layers,
            num_q_heads,
            lengths,
            steps,
            device,
            rng,
            partial(progress, strategy.name),
        )
        for strategy in table
    ]
    bandwidths = [None if cost.seconds is None else read_bytes / cost.seconds for cost in costs]
    if read_bandwidth is not None:
        fastest = max(bandwidth or 0.0 for bandwidth in bandwidths)
        for attempt in range(READ_RETRIES):  # the machine may have become faster since
            if attempt == 0 or fastest > MAX_SHARE * read_bandwidth:
                read_bandwidth = max(read_bandwidth, backend.read_bandwidth() or 0.0)
        require_plausible(fastest / read_bandwidth)

    rows = []
    for number, (strategy, cost, bandwidth) in enumerate(zip(table, costs, bandwidths, strict=True)):
        progress("churn", number, len(table))
        waste = churn(
            "contiguous" if strategy.contiguous else "paged",
            num_requests=CHURN_REQUESTS,
            slots=churn_slots,
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
        working_set_bytes=num_pools * tokens * token_bytes,
        lengths=tuple(map(int, lengths)),
        rows=tuple(rows),
    )


def _decode_cost(
    pool_spec: KVSpec,
    num_layers: int,
    num_q_heads: int,
    lengths: np.ndarray[Any, Any],
    steps: int,
    device: str,
    rng: np.random.Generator,
    progress: Callable[[int, int], None],
) -> Cost:
    """Cost of `steps` decode steps, each num_layers times append and decode, round the pools of pool_spec.

    Seconds are by the median layer: on a shared machine, a pause that hits some of them is not theirs.
    """
    batch = len(lengths)
    cache = KVCache(pool_spec, num_pages=sum(pool_spec.pages_for(int(n) + steps) for n in lengths), device=device)
    _scatter_free_pages(cache, rng)
    backend = cache.pool.backend
    chunk, dtype = 1024, STORAGE_DTYPES[pool_spec.dtype]
    row = (pool_spec.num_kv_heads, pool_spec.head_dim)
    k, v, q = (
        backend.upload(rng.standard_normal(shape, np.float32).astype(dtype))
        for shape in (2 * [(max(chunk, batch), *row)] + [(batch, num_q_heads, pool_spec.head_dim)])
    )

    sequences = [cache.add() for _ in lengths]
    for number, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        progress(number, batch + steps)
        for start in range(0, length, chunk):
            count = min(chunk, int(length) - start)
            step = cache.reserve({sequence: count})
            for layer in range(pool_spec.num_layers):
                cache.append(step, layer, k[:count], v[:count])

    cache.decode(cache.reserve(dict.fromkeys(sequences, 0)), pool_spec.num_layers - 1, q)  # may compile
    visits: list[Cost] = []
    for number in range(steps):
        progress(batch + number, batch + steps)
        step = cache.reserve(dict.fromkeys(sequences, 1))

        def visit(layer: int, step: Step = step) -> None:
            cache.append(step, layer, k[:batch], v[:batch])
            cache.decode(step, layer, q)

        first = number * num_layers
        layers = [layer % pool_spec.num_layers for layer in range(first, first + num_layers)]
        visits += backend.measure([partial(visit, layer) for layer in layers])
    if not backend.timed:
        return Cost.total(visits)
    return Cost(seconds=float(np.median([visit.seconds for visit in visits])) * len(visits))


def _scatter_free_pages(cache: KVCache, rng: np.random.Generator) -> None:
    """Leave the free list in random order, as in a long-lived server: in a new cache all pages are neighbours."""
    owners = [cache.add() for _ in range(cache.free_pages)]
    cache.reserve(dict.fromkeys(owners, 1))
    for index in rng.permutation(len(owners)):
        cache.free(owners[index])
