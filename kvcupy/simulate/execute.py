"""A machine that executes: a real cache on a device, timed by it, or counted where time means nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvcupy.backends.base import STORAGE_DTYPES, Array, Cost
from kvcupy.cache import KVCache
from kvcupy.simulate.timing import FloatArray, IntArray


class ExecutingMachine:
    """Stores and attends for real, in every layer of a cache, with random K, V and q.

    What is timed is the cache's part of a step: append, and decode of the newest token of each sequence. The
    model's own work (projections, MLP, attention inside a prompt) is not there. On a device that is not timed, a
    step counts as a second for the schedule.

    costs: of the steps so far.
    """

    def __init__(self, cache: KVCache, num_q_heads: int, seed: int = 0) -> None:
        self.cache = cache
        self.num_pages = cache.pool.num_pages
        self.page_size = cache.spec.page_size
        self._num_q_heads = num_q_heads
        self._rng = np.random.default_rng(seed)
        self.costs: list[Cost] = []
        self._block = self._random(1024, 2 * cache.spec.num_kv_heads)

    @property
    def free_pages(self) -> int:
        return self.cache.free_pages

    def add(self) -> int:
        return self.cache.add()

    def free(self, sequence: int, /) -> None:
        self.cache.free(sequence)

    def prefill(self, prompts: Mapping[int, int], /) -> float:
        return self._step(prompts)

    def decode(
        self, sequences: Sequence[int], context_tokens: IntArray, max_steps: int, now_s: float, until_s: float, /
    ) -> FloatArray:
        return np.array([self._step(dict.fromkeys(sequences, 1))])

    def _step(self, counts: Mapping[int, int]) -> float:
        heads = self.cache.spec.num_kv_heads
        backend = self.cache.pool.backend
        rows = backend.upload(self._block[backend.upload(np.arange(sum(counts.values())) % len(self._block))])
        q = self._random(len(counts), self._num_q_heads)

        def run() -> None:
            step = self.cache.reserve(counts)
            for layer in range(self.cache.spec.num_layers):
                self.cache.append(step, layer, rows[:, :heads], rows[:, heads:])
                self.cache.decode(step, layer, q)

        (cost,) = backend.measure([run])
        self.costs.append(cost)
        return 1.0 if cost.seconds is None else cost.seconds

    def _random(self, tokens: int, heads: int) -> Array:
        spec = self.cache.spec
        values = self._rng.standard_normal((tokens, heads, spec.head_dim), np.float32)
        return self.cache.pool.backend.upload(values.astype(STORAGE_DTYPES[spec.dtype]))
