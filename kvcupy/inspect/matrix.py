"""Which variants are compiled to be looked at: those that launches choose for the shapes people serve.

A shape goes through the same operations as a user's, on a device that notes what it is asked to launch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcupy.backends.base import STORAGE_DTYPES, Layer
from kvcupy.backends.ptx.device import PtxBackend
from kvcupy.backends.source import Variant
from kvcupy.ops import append, decode_attention, gather
from kvcupy.pool import LayerPool
from kvcupy.spec import LAYOUTS, ROW_ALIGNS, KVSpec

__all__ = ["Inspected", "Shape", "inspected", "random_shapes", "shapes"]


@dataclass(frozen=True)
class Shape:
    """A cache and the queries to it. q_dtype None: that of the cache."""

    spec: KVSpec
    group: int
    q_dtype: str | None = None

    def __str__(self) -> str:
        spec = self.spec
        return (
            f"{spec.dtype}, head_dim {spec.head_dim}, group {self.group}, {spec.num_kv_heads} KV heads, "
            f"pages of {spec.page_size}, {spec.layout}, row_align {spec.row_align}, q {self.q_dtype or spec.dtype}"
        )


@dataclass(frozen=True)
class Inspected:
    """A kernel that a launch chose: its variant, its threads per block, and the first shape that asks for it."""

    kernel: str
    variant: Variant
    threads: int
    shape: Shape


def _shape(head_dim: int, group: int, dtype: str = "float16", heads: int = 8, **spec: Any) -> Shape:
    return Shape(KVSpec(num_layers=1, num_kv_heads=heads, head_dim=head_dim, dtype=dtype, **spec), group)


def shapes() -> Iterator[Shape]:
    """The committed list. Their variants are at most 150, so that all compile in minutes."""
    for group in (1, 2, 4, 5, 7, 8, 16):
        yield _shape(128, group)
    for head_dim in (64, 256):
        for group in (1, 4, 7, 8):
            yield _shape(head_dim, group)
    for head_dim in (80, 96, 112):
        for group in (1, 4, 8):
            yield _shape(head_dim, group)
        yield _shape(head_dim, 4, "bfloat16")
    for head_dim in (64, 128, 256):
        for dtype in ("bfloat16", "float32"):
            for group in (1, 4, 8):
                yield _shape(head_dim, group, dtype)
    # Other pages; a page for a whole sequence is the contiguous cache.
    for page_size in (1, 7, 32, 4096):
        yield _shape(128, 8, page_size=page_size)
    # Other head dims, a row's padding, and none: then loads are 8, 4 and 2 bytes wide.
    for head_dim in (1, 40, 100, 160, 192, 512):
        yield _shape(head_dim, 4)
    yield _shape(80, 8, row_align=128)
    yield _shape(64, 8, row_align="128-elements")
    yield _shape(100, 8, row_align=1)
    yield _shape(126, 8, row_align=1)
    yield _shape(125, 8, row_align=1, heads=1, page_size=1)
    yield _shape(125, 1, "float32", row_align=1)


def random_shapes(seed: int) -> Iterator[Shape]:
    """Shapes without end, of everything that a cache accepts; any dtype of q."""
    rng = random.Random(seed)
    while True:
        spec = KVSpec(
            num_layers=1,
            num_kv_heads=rng.randint(1, 16),
            head_dim=rng.choice((rng.randint(1, 256), 8 * rng.randint(1, 32), rng.randint(257, 512))),
            page_size=rng.choice((1, 8, 16, 32, 64, 128, rng.randint(1, 256))),
            dtype=rng.choice(list(STORAGE_DTYPES)),
            layout=rng.choice(list(LAYOUTS)),
            row_align=rng.choice(ROW_ALIGNS),
        )
        yield Shape(spec, rng.randint(1, 32), rng.choice(list(STORAGE_DTYPES)))


class _Recorder(PtxBackend):
    """Runs nothing and keeps what it is asked to launch."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(grid=1)
        self.shape = shape
        self.launches: list[Inspected] = []

    def launch(self, variant: Variant, kernel: str, grid: tuple[int, int], block: int, *arguments: Any) -> None:
        self.launches.append(Inspected(kernel, variant, block, self.shape))


def launches(shape: Shape) -> list[Inspected]:
    """All that a shape ever launches: one of each kernel."""
    recorder, spec = _Recorder(shape), shape.spec
    dtype, q_dtype = STORAGE_DTYPES[spec.dtype], STORAGE_DTYPES[shape.q_dtype or spec.dtype]
    page = recorder.allocate(spec.strides.page)
    pool = LayerPool(recorder, Layer(spec, 1, recorder.address(page), spec.strides, spec.padding_bytes_per_row), page)
    k = np.zeros((1, spec.num_kv_heads, spec.head_dim), dtype)
    q = np.zeros((1, spec.num_kv_heads * shape.group, spec.head_dim), q_dtype)
    slots = np.zeros(1, np.int64)
    append(k, k, pool, slots)
    gather(pool, slots)
    recorder.copy_pages(page[None, None], slots, slots)
    out, lse = decode_attention(q, pool, [[0]], [1], return_lse=True)
    recorder.merge_states(out[0], lse[0], out[0], lse[0], out[0], lse[0])
    return recorder.launches


def inspected(shapes: Iterable[Shape]) -> list[Inspected]:
    """What these shapes launch, each kernel of each variant once."""
    found: dict[tuple[str, Variant], Inspected] = {}
    for shape in shapes:
        for launch in launches(shape):
            found.setdefault((launch.kernel, launch.variant), launch)
    return list(found.values())
