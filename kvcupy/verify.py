"""Is this device right? A matrix of shapes, dtypes and layouts against attention in float64.

Each case fills a pool with NaN, appends ragged sequences to scattered pages, reads them back bit for bit, and
compares decode with softmax attention in NumPy. Nothing but the sequences' own tokens may reach the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcupy.backends.base import STORAGE_DTYPES
from kvcupy.ops import append, decode_attention, gather
from kvcupy.pool import KVPool
from kvcupy.spec import LAYOUTS, KVSpec

Array = np.ndarray[Any, Any]

BOUNDS = {"float32": 4e-6, "float16": 1e-3, "bfloat16": 8e-3}
"""Largest error of out, relative to the largest value of V: of sums in float32, and of rounding out to q's dtype
(half a step is 2^-12 of a value in float16, 2^-9 in bfloat16; the bounds leave a factor of 4)."""


@dataclass(frozen=True)
class Case:
    """One shape to verify. q has the pool's dtype; query_lens None is one query token for each sequence."""

    spec: KVSpec
    group: int
    lengths: tuple[int, ...]
    query_lens: tuple[int, ...] | None = None

    def __str__(self) -> str:
        spec = self.spec
        heads = f"{spec.num_kv_heads * self.group}/{spec.num_kv_heads} heads"
        tokens = "+".join(map(str, self.lengths))
        queries = f", query_lens {self.query_lens}" if self.query_lens else ""
        return (
            f"{spec.dtype} {spec.layout}, {heads}, head_dim {spec.head_dim}, pages of {spec.page_size}, "
            f"row_align {spec.row_align}, {tokens} tokens{queries}"
        )


@dataclass(frozen=True)
class Outcome:
    """What came of a case. error and lse_error are relative, against `bound`; inf if a value is not finite."""

    case: Case
    stored_exactly: bool
    error: float
    lse_error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.stored_exactly and self.error <= self.bound and self.lse_error <= BOUNDS["float32"]


def cases(quick: bool = False) -> Iterator[Case]:
    """The matrix: every dtype and layout, head_dim 1 to 512, groups 1 to 71, pages of 1 to 256 tokens, a page
    for a whole sequence, lengths from 0. quick: a part of it with short sequences."""
    head_dims = (1, 80, 128) if quick else (1, 8, 64, 80, 96, 100, 112, 128, 160, 192, 256, 511, 512)
    groups = (1, 4, 7) if quick else (1, 2, 3, 4, 5, 7, 8, 16, 71)
    pages = (1, 16) if quick else (1, 3, 16, 32, 256, 1024)
    lengths = (0, 1, 17, 40) if quick else (0, 1, 15, 16, 17, 257, 1000)
    aligns: tuple[int | str, ...] = (16, 1) if quick else (16, 1, 64, "128-elements")
    number = 0
    for dtype in STORAGE_DTYPES:
        for layout in LAYOUTS:
            for head_dim in head_dims:
                spec = KVSpec(
                    num_layers=1,
                    num_kv_heads=1 + number % 3,
                    head_dim=head_dim,
                    page_size=pages[number % len(pages)],
                    dtype=dtype,
                    layout=layout,
                    row_align=aligns[number // 2 % len(aligns)],
                )
                query_lens = tuple(min(n, 1 + number % 5) for n in lengths) if number % 4 == 3 else None
                yield Case(spec, groups[number % len(groups)], lengths, query_lens)
                number += 1


def verify_case(case: Case, device: str, seed: int = 0) -> Outcome:
    """Run one case on a device."""
    spec = case.spec
    rng = np.random.default_rng(seed)
    page_counts = [spec.pages_for(length) for length in case.lengths]
    order = rng.permutation(sum(page_counts) + 2)
    pool = KVPool(spec, len(order), device=device)
    pool.data[...] = 0xFF  # NaN in each dtype
    layer, backend = pool[0], pool.backend
    table = np.full((len(case.lengths), max(page_counts)), -1, np.int32)
    sequences = []
    stored_exactly = True
    for row, (length, count) in enumerate(zip(case.lengths, page_counts, strict=True)):
        table[row, :count], order = order[:count], order[count:]
        positions = np.arange(length)
        slots = table[row, positions // spec.page_size].astype(np.int64) * spec.page_size + positions % spec.page_size
        shape = (length, spec.num_kv_heads, spec.head_dim)
        k, v = (rng.standard_normal(shape, np.float32).astype(STORAGE_DTYPES[spec.dtype]) for _ in range(2))
        append(k, v, layer, slots)
        read = gather(layer, slots)
        stored_exactly &= all(
            backend.tonumpy(got).tobytes() == want.tobytes() for got, want in zip(read, (k, v), strict=True)
        )
        sequences.append((k.astype(np.float64), v.astype(np.float64)))

    counts = case.query_lens or (1,) * len(case.lengths)
    shape = (sum(counts), spec.num_kv_heads * case.group, spec.head_dim)
    q = rng.standard_normal(shape, np.float32).astype(STORAGE_DTYPES[spec.dtype])
    out, lse = decode_attention(q, layer, table, np.array(case.lengths), query_lens=case.query_lens, return_lse=True)
    expected = [
        _attention(q[token].astype(np.float64), k[:seen], v[:seen])
        for token, (k, v, seen) in enumerate(
            (*sequences[row], max(0, case.lengths[row] - count + 1 + index))
            for row, count in enumerate(counts)
            for index in range(count)
        )
    ]
    largest = max(float(np.abs(v).max(initial=1.0)) for _, v in sequences)
    return Outcome(
        case,
        stored_exactly,
        _error(backend.tonumpy(out), np.array([result for result, _ in expected])) / largest,
        _error(backend.tonumpy(lse), np.array([total for _, total in expected])) / 10,
        BOUNDS[spec.dtype],
    )


def verify(
    device: str, quick: bool = False, seed: int = 0, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Outcome]:
    """Run the whole matrix on a device; progress is told (cases done, cases in all)."""
    outcomes: list[Outcome] = []
    matrix = list(cases(quick))
    for number, case in enumerate(matrix):
        outcomes.append(verify_case(case, device, seed + number))
        progress(number + 1, len(matrix))
    return outcomes


def _attention(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Softmax attention of one query token in float64: out [q_heads, dim], lse [q_heads]."""
    group = q.shape[0] // k.shape[1]
    if not len(k):
        return np.zeros(q.shape), np.full(len(q), -np.inf)
    scores = np.einsum("hd,thd->ht", q, np.repeat(k, group, axis=1)) / np.sqrt(q.shape[1])
    peak = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=1, keepdims=True)
    return np.einsum("ht,thd->hd", weights / total, np.repeat(v, group, axis=1)), (peak + np.log(total))[:, 0]


def _error(got: Array, expected: Array) -> float:
    """The largest difference; inf where one is finite and the other not, or NaN."""
    got = got.astype(np.float64)
    same = got == expected
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(got - expected))
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0))
