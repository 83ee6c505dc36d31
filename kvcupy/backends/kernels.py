"""What the devices `cuda` and `ptx` share: the same sources, variants and launches. Only who runs them differs."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcupy.backends.base import STORAGE_DTYPES, Array, Backend, Layer
from kvcupy.backends.plan import DecodePlan, decode_variant, widest
from kvcupy.backends.source import AppendVariant, CopyPagesVariant, GatherVariant, MergeStatesVariant, Variant

__all__ = ["KernelBackend", "Memory"]

_NAMES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}
_BLOCK = 256
"""Threads of a block that only moves bytes, at most."""


@dataclass(frozen=True)
class Memory:
    """A range of the device's memory, as a kernel argument."""

    address: int
    nbytes: int


class KernelBackend(Backend):
    """A device that runs the CUDA kernels. Subclasses say how: launches, grids, workspace."""

    @abstractmethod
    def launch(self, variant: Variant, kernel: str, grid: tuple[int, int], block: int, *arguments: Any) -> None:
        """Run a kernel of a variant's source, compiled on first use.

        arguments: in the order of the kernel's parameters: arrays and `Memory` are passed as pointers, None as a
        null pointer, NumPy scalars by value. They must have exactly the parameter's width.
        """

    @abstractmethod
    def persistent_blocks(self, variant: Variant, kernel: str, block: int) -> int:
        """How many thread blocks of a kernel the device holds at once."""

    @abstractmethod
    def workspace(self, nbytes: int) -> Array:
        """uint8 [nbytes], aligned to 16 bytes, of undefined content, that the kernels launched next may use."""

    def append(self, layer: Layer, k: Array, v: Array, slots: Array) -> None:
        tokens, spec = k.shape[0], layer.spec
        if tokens == 0:
            return
        row_bytes = spec.head_dim * spec.itemsize
        alignments = (self.address(k), *k.strides[:2], self.address(v), *v.strides[:2])
        variant = AppendVariant(
            page_size=spec.page_size,
            row_bytes=row_bytes,
            padding_bytes=layer.row_padding,
            copy_bytes=widest(row_bytes, layer.row_padding, *_alignments(layer), *alignments),
        )
        pieces = spec.num_kv_heads * 2 * (row_bytes + layer.row_padding) // variant.copy_bytes
        sources = (argument for rows in (k, v) for argument in (rows, *map(np.int64, rows.strides[:2])))
        arguments = (*_layer_arguments(layer), *sources, slots, np.int32(spec.num_kv_heads))
        self.launch(variant, "append", (tokens, 1), _block(pieces), *arguments)

    def gather(self, layer: Layer, slots: Array, k: Array, v: Array) -> None:
        tokens, spec = k.shape[0], layer.spec
        if tokens == 0:
            return
        row_bytes = spec.head_dim * spec.itemsize
        copy_bytes = widest(row_bytes, *_alignments(layer), self.address(k), self.address(v))
        variant = GatherVariant(page_size=spec.page_size, row_bytes=row_bytes, copy_bytes=copy_bytes)
        pieces = spec.num_kv_heads * 2 * row_bytes // copy_bytes
        arguments = (*_layer_arguments(layer), slots, np.int32(spec.num_kv_heads), k, v)
        self.launch(variant, "gather", (tokens, 1), _block(pieces), *arguments)

    def copy_pages(self, data: Array, sources: Array, destinations: Array) -> None:
        num_layers, num_pages, page_stride = data.shape
        if sources.shape[0] == 0:
            return
        variant = CopyPagesVariant(copy_bytes=widest(self.address(data), page_stride))
        columns = page_stride // variant.copy_bytes
        block = _block(columns)
        sizes = np.int64(page_stride), np.int32(num_pages)
        arguments = (data, *sizes, sources, destinations, np.int32(sources.shape[0]))
        self.launch(variant, "copy_pages", (-(-columns // block), num_layers), block, *arguments)

    def decode_plan(self, layer: Layer, q: Array, batch: int) -> DecodePlan:
        """How `decode_attention` will be launched for q [query_tokens, num_q_heads, head_dim]."""
        query_tokens, num_q_heads, head_dim = q.shape
        spec = layer.spec
        q_row_bytes = head_dim * q.dtype.itemsize
        variant = decode_variant(
            kv=spec.dtype,
            q=_NAMES[q.dtype],
            head_dim=head_dim,
            page_size=spec.page_size,
            rows=num_q_heads // spec.num_kv_heads * -(-query_tokens // batch),
            load_bytes=_load_bytes(layer),
            q_load_bytes=widest(self.address(q), q_row_bytes),
        )
        return DecodePlan(variant, self.persistent_blocks(variant, "decode_attention", variant.threads))

    def decode_attention(
        self,
        layer: Layer,
        q: Array,
        page_table: Array,
        seq_lens: Array,
        query_lens: Array | None,
        scale: float,
        out: Array,
        lse: Array | None,
    ) -> None:
        batch, max_pages = page_table.shape
        query_tokens, num_q_heads = q.shape[:2]
        if batch == 0 or query_tokens == 0:
            return
        num_kv_heads = layer.spec.num_kv_heads
        sizes = map(np.int32, (batch, query_tokens, num_kv_heads, num_q_heads // num_kv_heads))
        plan = self.decode_plan(layer, q, batch)
        results = out, lse, self.workspace(plan.workspace_bytes)
        self.launch(
            plan.variant,
            "decode_attention",
            (plan.grid, 1),
            plan.block,
            *_layer_arguments(layer),
            q,
            page_table,
            np.int32(max_pages),
            seq_lens,
            query_lens,
            *sizes,
            np.float32(scale * math.log2(math.e)),
            *results,
        )
        self.launch(plan.variant, "merge_partials", plan.merge_grid, plan.merge_block, *results)

    def merge_states(self, out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, out: Array, lse: Array) -> None:
        rows, head_dim = out.shape
        if rows == 0:
            return
        warps = _BLOCK // 32
        sizes = np.int64(rows), np.int32(head_dim)
        variant = MergeStatesVariant(t=_NAMES[out.dtype])
        arguments = (out_a, lse_a, out_b, lse_b, out, lse, *sizes)
        self.launch(variant, "merge_states", (-(-rows // warps), 1), _BLOCK, *arguments)


def _block(pieces: int) -> int:
    """Threads for that many pieces of work: whole warps, at most a full block."""
    return min(_BLOCK, -(-pieces // 32) * 32)


def _alignments(layer: Layer) -> tuple[int, ...]:
    strides = layer.strides
    return layer.data, strides.page, strides.head, strides.token, strides.kv


def _load_bytes(layer: Layer) -> int:
    """The widest load that starts at a row and takes it whole without leaving its padding."""
    width = widest(*_alignments(layer))
    row_bytes = layer.spec.head_dim * layer.spec.itemsize
    while -(-row_bytes // width) * width > row_bytes + layer.row_padding:
        width //= 2
    return width


def _layer_arguments(layer: Layer) -> tuple[Any, ...]:
    spec, strides = layer.spec, layer.strides
    last = strides.offset(layer.num_pages - 1, spec.num_kv_heads - 1, spec.page_size - 1, 1)
    memory = Memory(layer.data, last + spec.head_dim * spec.itemsize + layer.row_padding)
    return memory, *map(np.int64, (strides.page, strides.head, strides.token, strides.kv)), np.int32(layer.num_pages)
