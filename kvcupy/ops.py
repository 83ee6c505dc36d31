"""The operations as functions, over a pool, a page table and a slot mapping that the caller owns.

Each checks its arguments once, before anything runs, and hands them to the pool's device. Shape and type checks
always happen; `check=False` leaves out those that must look at values (lengths, page ids, slots), which on a GPU
would copy them to the host. The kernels are memory-safe either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from numbers import Real
from typing import Any, ParamSpec, TypeVar

import numpy as np

from kvcupy.backends import Backend, backend_of, get_backend
from kvcupy.backends.base import STORAGE_DTYPES, Array
from kvcupy.pool import LayerPool

__all__ = ["append", "decode_attention", "gather", "merge_states"]

_MAX_SCALE = 2.0**127  # scores are taken in base 2, so that scale · log2(e) must fit float32
_BFLOAT16 = STORAGE_DTYPES["bfloat16"]
_FLOATS = (*STORAGE_DTYPES.values(), np.dtype(np.float64))

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _on_device_of_pool(operation: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """With several GPUs, conversions happen where the pool is, whichever GPU is current."""

    @wraps(operation)
    def run(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        pool = next((each for each in (*arguments, *options.values()) if isinstance(each, LayerPool)), None)
        if pool is None:
            raise TypeError("pool must be a LayerPool: one layer, such as pool[0] of a KVPool")
        with pool.backend.current():
            return operation(*arguments, **options)

    return run


@_on_device_of_pool
def append(k: Any, v: Any, pool: LayerPool, slot_mapping: Any, *, check: bool = True) -> None:
    """Store K and V of new tokens in a layer. Writes the pool, nothing else.

    k, v: [tokens, num_kv_heads, head_dim], float32, float16, bfloat16 (also as uint16 if the pool stores
        bfloat16) or float64; values of another type than the pool's are rounded to it. Any strides.
        What is too large for the pool's type becomes inf.
    slot_mapping: whole numbers [tokens], each page·page_size + offset, or -1 for a token to skip. A slot
        must not be given twice: what it would hold is undefined.

    Raises ValueError or TypeError for shapes, types or slots that do not fit; then nothing was written.
    """
    backend, spec = pool.backend, pool.spec
    if not pool.writable:
        raise ValueError("pool must be writable to append, got read-only memory")
    rows = _rows(backend, "k", k, pool), _rows(backend, "v", v, pool)
    if rows[0].shape != rows[1].shape:
        raise ValueError(f"k and v must have one shape, got {list(rows[0].shape)} and {list(rows[1].shape)}")
    slots = _whole_numbers(backend, "slot_mapping", slot_mapping, (None,), np.dtype(np.int64), check)
    if slots.shape[0] != rows[0].shape[0]:
        raise ValueError(
            f"k and v must have a token for each of {slots.shape[0]} slots, got {rows[0].shape[0]} tokens"
        )
    if _checking(backend, check) and slots.size:
        host = backend.tonumpy(slots)
        bad = np.flatnonzero((host < -1) | (host >= pool.num_slots))
        if bad.size:
            raise ValueError(
                f"slot_mapping must be -1 or 0 to {pool.num_slots - 1} "
                f"({pool.num_pages} pages of {spec.page_size}), got {host[bad[0]]} for token {bad[0]}"
            )
    backend.append(pool.layer, *rows, slots)


@_on_device_of_pool
def decode_attention(
    q: Any,
    pool: LayerPool,
    page_table: Any,
    seq_lens: Any,
    *,
    query_lens: Any = None,
    scale: Any = None,
    out: Any = None,
    return_lse: bool = False,
    check: bool = True,
) -> Any:
    """Attention of query tokens over the pages of their sequences: softmax(scale · q Kᵀ) V, in float32.

    q: [query_tokens, num_q_heads, head_dim], float32, float16 or bfloat16 (also as uint16 if the pool stores
        bfloat16), the sequences' tokens one after another; q head h reads KV head h // group, where group =
        num_q_heads / num_kv_heads is any whole number.
    page_table: int32 [batch, max_pages], the pages of each sequence in order; entries past its length may be
        anything. seq_lens: int32 [batch], tokens stored, the newest included.
    query_lens: whole numbers [batch], query tokens of each sequence, its last ones, each seeing itself and
        what came before; None: one each.
    scale: a real number; None: 1/sqrt(head_dim).
    out: where to write, like q in shape and type; made anew if None.

    Returns out, or (out, lse) with lse float32 [query_tokens, num_q_heads], the natural log of
    Σ exp(scale · q·k). A sequence of length 0 gives out 0 and lse -inf.
    Raises ValueError or TypeError before anything runs: for group counts that do not divide, for a length its
    table row cannot hold, for page ids outside the pool.
    """
    backend, spec = pool.backend, pool.spec
    queries = backend.asarray(q)
    bits = queries.dtype == np.uint16 and spec.dtype == "bfloat16"
    if bits:
        queries = queries.view(_BFLOAT16)
    if queries.dtype not in STORAGE_DTYPES.values():
        raise TypeError(f"q must be {', '.join(STORAGE_DTYPES)}, got {queries.dtype}")
    if queries.ndim != 3 or queries.shape[2] != spec.head_dim:
        raise ValueError(f"q must have shape [query_tokens, num_q_heads, {spec.head_dim}], got {list(queries.shape)}")
    query_tokens, num_q_heads = queries.shape[:2]
    if num_q_heads == 0 or num_q_heads % spec.num_kv_heads:
        raise ValueError(
            f"q must have a multiple of the pool's {spec.num_kv_heads} KV heads as its heads, got {num_q_heads}"
        )
    queries = _as_kernels_read(backend, queries)

    table = _whole_numbers(backend, "page_table", page_table, (None, None), np.dtype(np.int32), check)
    batch = table.shape[0]
    lengths = _whole_numbers(backend, "seq_lens", seq_lens, (batch,), np.dtype(np.int32), check)
    counts = None
    if query_lens is not None:
        counts = _whole_numbers(backend, "query_lens", query_lens, (batch,), np.dtype(np.int32), check)
    elif query_tokens != batch:
        raise ValueError(f"q must have one token for each of {batch} sequences, got {query_tokens}")
    if _checking(backend, check):
        host_counts = None if counts is None else backend.tonumpy(counts)
        _check_lengths(backend.tonumpy(table), backend.tonumpy(lengths), host_counts, query_tokens, pool)

    if out is None:
        result = target = backend.empty(queries.shape, queries.dtype)
    else:
        result = out
        target = backend.in_place("out", out)
        if target.dtype == np.uint16 and bits:
            target = target.view(_BFLOAT16)
        if target.shape != queries.shape or target.dtype != queries.dtype:
            raise ValueError(
                f"out must be {queries.dtype} {list(queries.shape)} like q, got {target.dtype} {list(target.shape)}"
            )
        if not getattr(target.flags, "writeable", True):
            raise ValueError("out must be writable")
    lse = backend.empty((query_tokens, num_q_heads), np.dtype(np.float32)) if return_lse else None
    direct = _direct(backend, target)
    destination = target if direct else backend.empty(queries.shape, queries.dtype)
    backend.decode_attention(
        pool.layer, queries, table, lengths, counts, _scale(scale, spec.head_dim), destination, lse
    )
    if not direct:
        target[...] = destination
    if out is None and bits:
        result = target.view(np.uint16)
    return (result, lse) if return_lse else result


@_on_device_of_pool
def gather(pool: LayerPool, slots: Any, *, check: bool = True) -> tuple[Array, Array]:
    """K and V of tokens as stored: two arrays [tokens, num_kv_heads, head_dim] of the pool's element type.

    slots: whole numbers [tokens], page·page_size + offset.
    """
    backend, spec = pool.backend, pool.spec
    wanted = _whole_numbers(backend, "slots", slots, (None,), np.dtype(np.int64), check)
    if _checking(backend, check) and wanted.size:
        host = backend.tonumpy(wanted)
        if host.min() < 0 or host.max() >= pool.num_slots:
            raise ValueError(f"slots must be 0 to {pool.num_slots - 1}, got values from {host.min()} to {host.max()}")
    shape = (wanted.shape[0], spec.num_kv_heads, spec.head_dim)
    k, v = (backend.empty(shape, STORAGE_DTYPES[spec.dtype]) for _ in range(2))
    backend.gather(pool.layer, wanted, k, v)
    return k, v


def merge_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, device: str | None = None) -> tuple[Array, Array]:
    """Attention over the union of two disjoint sets of tokens, from the results over each set.

    out_a, out_b: [..., head_dim] of one type; lse_a, lse_b: float32 [...], natural log.
    out = (e^a·out_a + e^b·out_b) / (e^a + e^b) and lse = ln(e^a + e^b); an empty set is (0, -inf).
    device: where they lie; found out from the type of out_a if not given.
    Returns (out, lse), new arrays.
    """
    backend = backend_of(out_a) if device is None else get_backend(device)
    a, b = backend.asarray(out_a), backend.asarray(out_b)
    if a.dtype not in STORAGE_DTYPES.values() or a.dtype != b.dtype:
        raise TypeError(f"out_a and out_b must share one of {', '.join(STORAGE_DTYPES)}, got {a.dtype} and {b.dtype}")
    if a.ndim < 1 or a.shape != b.shape:
        raise ValueError(f"out_a and out_b must have one shape, got {list(a.shape)} and {list(b.shape)}")
    lses = []
    for name, value in (("lse_a", lse_a), ("lse_b", lse_b)):
        array = backend.asarray(value)
        if array.dtype not in _FLOATS:
            raise TypeError(f"{name} must be float32, got {array.dtype}")
        if array.shape != a.shape[:-1]:
            raise ValueError(f"{name} must have shape {list(a.shape[:-1])}, got {list(array.shape)}")
        lses.append(_as_kernels_read(backend, array.astype(np.float32, copy=False)).reshape(-1))
    rows, head_dim = math.prod(a.shape[:-1]), a.shape[-1]
    out, lse = backend.empty((rows, head_dim), a.dtype), backend.empty((rows,), np.dtype(np.float32))
    flat = (_as_kernels_read(backend, array).reshape(rows, head_dim) for array in (a, b))
    backend.merge_states(next(flat), lses[0], next(flat), lses[1], out, lse)
    return out.reshape(a.shape), lse.reshape(a.shape[:-1])


# Checks


def _checking(backend: Backend, check: bool) -> bool:
    if check and backend.capturing():
        raise ValueError("check must be False while a CUDA graph is captured: it copies lengths and ids to the host")
    return check


def _as_kernels_read(backend: Backend, array: Array) -> Array:
    """C-contiguous, and each element aligned to its size: a copy where it is not."""
    return array if _direct(backend, array) else array.copy(order="C")


def _direct(backend: Backend, array: Array) -> bool:
    return bool(array.flags.c_contiguous) and backend.address(array) % array.itemsize == 0


def _rows(backend: Backend, name: str, array: Any, pool: LayerPool) -> Array:
    """K or V in the storage type, each row contiguous."""
    spec, storage = pool.spec, STORAGE_DTYPES[pool.spec.dtype]
    rows = backend.asarray(array)
    if rows.dtype == np.uint16 and spec.dtype == "bfloat16":
        rows = rows.view(_BFLOAT16)
    if rows.dtype not in _FLOATS:
        raise TypeError(f"{name} must be floating point, got {rows.dtype}")
    if rows.ndim != 3 or rows.shape[1:] != (spec.num_kv_heads, spec.head_dim):
        raise ValueError(
            f"{name} must have shape [tokens, {spec.num_kv_heads}, {spec.head_dim}], got {list(rows.shape)}"
        )
    if rows.dtype != storage:
        with np.errstate(over="ignore", invalid="ignore"):  # too large becomes inf, as the type has it
            rows = rows.astype(storage)
    side_by_side = spec.head_dim == 1 or rows.strides[2] == rows.itemsize
    return rows if side_by_side else rows.copy(order="C")


def _whole_numbers(
    backend: Backend, name: str, values: Any, shape: tuple[int | None, ...], dtype: np.dtype[Any], check: bool
) -> Array:
    """Integers of the wanted shape (None: any) as a contiguous array of the wanted width."""
    try:
        array = backend.asarray(values)
    except ValueError:  # rows of different lengths, for one
        raise ValueError(f"{name} must be an array of whole numbers, got {values!r}") from None
    if array.size == 0 and isinstance(values, list | tuple):
        array = array.astype(dtype)  # an empty list has no type of its own
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be whole numbers, got {array.dtype}")
    if array.ndim != len(shape) or any(want not in (None, got) for want, got in zip(shape, array.shape, strict=True)):
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(array.shape)}")
    if array.dtype != dtype:
        if check and array.size and not np.can_cast(array.dtype, dtype):
            limits = np.iinfo(dtype)
            low, high = int(array.min()), int(array.max())
            if low < limits.min or high > limits.max:
                raise ValueError(f"{name} must fit {dtype}, got values from {low} to {high}")
        array = array.astype(dtype)
    return _as_kernels_read(backend, array)


def _check_lengths(
    table: np.ndarray[Any, Any],
    lengths: np.ndarray[Any, Any],
    counts: np.ndarray[Any, Any] | None,
    query_tokens: int,
    pool: LayerPool,
) -> None:
    page_size = pool.spec.page_size
    capacity = table.shape[1] * page_size
    for row in np.flatnonzero((lengths < 0) | (lengths > capacity))[:1]:
        raise ValueError(
            f"seq_lens must be 0 to {capacity}, what a page_table row of {table.shape[1]} pages of {page_size} "
            f"holds; row {row} has {lengths[row]}"
        )
    used = np.arange(table.shape[1])[None] < -(-lengths.astype(np.int64)[:, None] // page_size)
    for row, column in np.argwhere(used & ((table < 0) | (table >= pool.num_pages)))[:1]:
        raise ValueError(
            f"page_table must hold page ids 0 to {pool.num_pages - 1} up to each sequence's length; "
            f"row {row} has {table[row, column]} at column {column}"
        )
    if counts is not None:
        check_query_lens(counts, lengths, query_tokens)


def check_query_lens(counts: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], query_tokens: int) -> None:
    """Raises ValueError unless a batch's query tokens are the last ones of its sequences, and q has them all."""
    if (counts.size and counts.min() < 0) or int(counts.sum()) != query_tokens:
        raise ValueError(
            f"query_lens must be 0 or more and sum to q's {query_tokens} tokens, "
            f"got values from {counts.min(initial=0)} that sum to {counts.sum()}"
        )
    for row in np.flatnonzero((counts > lengths) & (lengths > 0))[:1]:
        raise ValueError(
            f"query_lens must not exceed seq_lens; row {row} has {counts[row]} query tokens of {lengths[row]}"
        )


def _scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if getattr(scale, "ndim", None) == 0 and hasattr(scale, "item"):
        scale = scale.item()  # a NumPy scalar, or an array of one element on any device
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"scale must be a real number, got {scale!r}")
    try:
        value = float(scale)
    except OverflowError:
        value = math.inf
    if not abs(value) < _MAX_SCALE:
        raise ValueError(f"scale must be finite, and so must its float32 multiple by log2(e), got {scale}")
    return value
