"""How kernels are launched: which variant, how wide its loads, how many thread blocks, how much workspace.

Plain arithmetic on shapes and alignments, the same for every device that runs the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from kvcupy.backends.base import STORAGE_DTYPES
from kvcupy.backends.source import DecodeVariant

__all__ = ["DecodePlan", "decode_variant", "widest"]

THREADS = 128
"""Threads of a decode block: four warps, few enough that a small sequence still keeps all of them busy."""

MAX_ROWS = 8
"""Rows of q that share one read of K and V, at most."""


def widest(*multiples: int, limit: int = 16) -> int:
    """The widest access in bytes, a power of two up to `limit`, that divides all these addresses and strides."""
    width = limit
    for multiple in multiples:
        while multiple % width:
            width //= 2
    return width


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@cache
def decode_variant(
    *, kv: str, q: str, head_dim: int, page_size: int, rows: int, load_bytes: int, q_load_bytes: int
) -> DecodeVariant:
    """The decode kernel for these shapes.

    rows: rows of q per KV head and sequence: group · query tokens. The kernel may take them in several passes.
    load_bytes, q_load_bytes: the widest load that alignment allows; for q, the kernel may take a narrower one.
    """
    vector = load_bytes // STORAGE_DTYPES[kv].itemsize
    vectors = _ceil_div(head_dim, vector)
    lanes = min(32, 1 << (vectors - 1).bit_length())
    lane_vectors = _ceil_div(vectors, lanes)
    # Registers: a lane keeps its elements of every row twice, for q and for the result, and the loads of a tile.
    elements = lane_vectors * vector
    passes = _ceil_div(rows, MAX_ROWS if elements <= 8 else MAX_ROWS // 2)
    rows = _ceil_div(rows, passes)
    steps = max(1, (4 if rows * elements <= 32 else 2) // lane_vectors)
    return DecodeVariant(
        kv=kv,
        q=q,
        head_dim=head_dim,
        page_size=page_size,
        rows=rows,
        threads=THREADS,
        chunk=THREADS // lanes * steps,
        lanes=lanes,
        load_bytes=load_bytes,
        q_load_bytes=min(q_load_bytes, vector * STORAGE_DTYPES[q].itemsize),
    )


@dataclass(frozen=True)
class DecodePlan:
    """One decode launch: `decode_attention` on `grid` blocks, then `merge_partials` on `grid` times `rows`.

    Nothing in it depends on lengths, so it stays right, and the work balanced, when they change.
    """

    variant: DecodeVariant
    grid: int

    @property
    def block(self) -> int:
        return self.variant.threads

    @property
    def merge_grid(self) -> tuple[int, int]:
        return self.grid, self.variant.rows

    @property
    def merge_block(self) -> int:
        """Threads that merge one row: one per element, up to 128."""
        return min(128, _ceil_div(self.variant.head_dim, 32) * 32)

    @property
    def workspace_bytes(self) -> int:
        """Bytes for two partial results per block, as decode_attention.cu lays them out: per row, 16 bytes of
        where it goes, and twice a maximum, a sum and head_dim elements in float32."""
        return self.grid * self.variant.rows * (16 + 2 * (8 + 4 * self.variant.head_dim))

    def units(self, length: int, num_kv_heads: int, rows: int) -> int:
        """Units of a sequence: KV heads times passes times chunks. rows: group · query tokens."""
        chunks = _ceil_div(max(length, 1), self.variant.chunk)
        return num_kv_heads * _ceil_div(rows, self.variant.rows) * chunks

    def shares(self, total_units: int) -> list[int]:
        """Units of each thread block."""
        share = _ceil_div(total_units, self.grid)
        return [max(0, min(share, total_units - block * share)) for block in range(self.grid)]
