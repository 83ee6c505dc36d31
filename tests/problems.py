"""Random decode problems: a pool full of NaN, scattered pages, hostile table entries, and the true answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from reference import attention

from kvcupy import KVPool, KVSpec, LayerPool, append
from kvcupy.backends import get_backend
from kvcupy.backends.base import STORAGE_DTYPES

Array = np.ndarray[Any, Any]

TOLERANCE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
"""Relative to the largest value in sight. float32: accumulation order. Half types: rounding of the result to
q's type, 2^-11 and 2^-8, twice over."""


def on_device(device: str, array: Array) -> Any:
    """The array in a device's memory, where kernels may write it."""
    return get_backend(device).asarray(array)


def host(array: Any) -> Array:
    """The array in host memory, from whatever device."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def assert_same(got: Any, expected: Any) -> None:
    """Equal bit by bit, NaN with NaN, wherever they lie."""
    np.testing.assert_array_equal(host(got), host(expected))


def poisoned_pool(spec: KVSpec, num_pages: int, device: str) -> KVPool:
    """A pool in which every byte is 0xFF: NaN in each float type."""
    pool = KVPool(spec, num_pages, device=device)
    pool.data[...] = 0xFF
    return pool


@dataclass
class Problem:
    """One layer with tokens in it. keys and values: per sequence, as stored, [tokens, num_kv_heads, head_dim]."""

    pool: LayerPool
    page_table: Array
    seq_lens: Array
    keys: list[Array]
    values: list[Array]
    rng: np.random.Generator

    def slots(self, row: int) -> Array:
        page_size = self.pool.spec.page_size
        positions = np.arange(self.seq_lens[row])
        return self.page_table[row, positions // page_size].astype(np.int64) * page_size + positions % page_size

    def queries(self, count: int, group: int, dtype: str = "float32") -> Array:
        spec = self.pool.spec
        shape = (count, spec.num_kv_heads * group, spec.head_dim)
        return self.rng.standard_normal(shape).astype(STORAGE_DTYPES[dtype])

    def expected(self, q: Array, query_lens: list[int] | None = None, scale: float | None = None) -> Any:
        """float64 (out, lse) of each query token, by plain softmax attention over its sequence's tokens."""
        scale = 1 / np.sqrt(q.shape[2]) if scale is None else scale
        results, token = [], 0
        for row, count in enumerate(query_lens or [1] * len(self.seq_lens)):
            for index in range(count):
                seen = max(0, int(self.seq_lens[row]) - count + 1 + index)
                results.append(attention(q[token], self.keys[row][:seen], self.values[row][:seen], scale))
                token += 1
        outs = np.array([out for out, _ in results]).reshape(q.shape)
        return outs, np.array([lse for _, lse in results]).reshape(q.shape[:2])


def make_problem(spec: KVSpec, lengths: list[int], device: str, seed: int = 0, spare_pages: int = 3) -> Problem:
    rng = np.random.default_rng(seed)
    pages = [spec.pages_for(length) for length in lengths]
    num_pages = sum(pages) + spare_pages
    order = rng.permutation(num_pages)
    # Entries past a sequence's length are anything: nobody may look at them.
    table = rng.choice(
        [-1, 0, num_pages - 1, num_pages, 2**31 - 1, -(2**31)], size=(len(lengths), max([1, *pages]) + 1)
    )
    table = table.astype(np.int32)
    for row, count in enumerate(pages):
        table[row, :count], order = order[:count], order[count:]
    pool = poisoned_pool(spec, num_pages, device)[0]
    problem = Problem(pool, table, np.array(lengths, np.int32), [], [], rng)
    for row, length in enumerate(lengths):
        shape = (length, spec.num_kv_heads, spec.head_dim)
        k, v = (rng.standard_normal(shape).astype(STORAGE_DTYPES[spec.dtype]) for _ in range(2))
        append(k, v, pool, problem.slots(row))
        problem.keys.append(k)
        problem.values.append(v)
    return problem


def assert_close(got: Array, expected: Array, dtype: str) -> None:
    """Equal within the dtype's tolerance, relative to the largest expected value; infinities must match."""
    got = host(got).astype(np.float64)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.where(finite, 0, got), np.where(finite, 0, expected))
    assert np.isfinite(got[finite]).all()
    bound = TOLERANCE[dtype] * max(1.0, float(np.abs(expected[finite]).max(initial=0)))
    np.testing.assert_allclose(got[finite], expected[finite], rtol=0, atol=bound)
