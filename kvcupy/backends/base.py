"""What a device must do. One class per device implements this; everything above is the same for all.

Arguments arrive checked (kvcupy.ops does it once), but a backend stays memory-safe whatever lengths, page ids
and slots it is given: a length is clamped to its table row, a page id or slot outside the pool is skipped.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from kvcupy.spec import KVSpec, Strides

Array = Any
"""An array in the device's memory: NumPy on `cpu` and `ptx`, CuPy on `cuda`."""

STORAGE_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Element type in memory of each codec that stores values as they are."""


@dataclass(frozen=True)
class Layer:
    """One layer of a pool, as the kernels see it: an address, strides, and how many pages there are.

    data: address of (page 0, head 0, token 0, K, dim 0). The elements of a row lie side by side.
    strides: bytes from there to other rows; any layout is nothing but strides.
    row_padding: bytes after each row's head_dim elements that append fills with zeros.
    """

    spec: KVSpec
    num_pages: int
    data: int
    strides: Strides
    row_padding: int


@dataclass(frozen=True)
class Cost:
    """What a piece of work took: its seconds, or, where time means nothing, what it asked of the device.

    sectors: 32-byte sectors of device memory that its requests moved; pool_sectors: those of them in pages.
    warp_instructions: how many were issued.
    """

    seconds: float | None = None
    sectors: int | None = None
    pool_sectors: int | None = None
    warp_instructions: int | None = None

    @classmethod
    def total(cls, costs: Iterable[Cost]) -> Cost:
        """The sums of what all of them have."""
        columns = zip(*map(astuple, costs), strict=True)
        return cls(*(None if None in column else sum(column) for column in columns))


DLPACK_HOST = 1
DLPACK_CUDA = (2, 13)  # device memory, and managed memory


def require_stored(dtype: str, purpose: str) -> None:
    """Raises ValueError for a codec whose bytes are counted but whose values are not stored yet."""
    if dtype not in STORAGE_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(STORAGE_DTYPES)} {purpose}, got {dtype}")


def host_array(array: Any) -> np.ndarray[Any, Any]:
    """Any array-like in host memory as NumPy; one that knows DLPack alone without a copy."""
    if hasattr(array, "__dlpack__") and not hasattr(array, "__array__"):
        return np.from_dlpack(array)
    return np.asarray(array)


class Backend(ABC):
    """The operations of one device, on arrays in its memory. Rows of K, V, q and out are C-contiguous.

    Shapes: tokens, batch (sequences), query_tokens; num_kv_heads and head_dim as in the layer's spec.
    """

    name: str
    timed = True
    """Whether seconds of this device mean anything; if not, `measure` counts instead."""

    def on(self, number: int | None = None) -> Backend:
        """The backend of one of several like devices, by number; None: the caller's current one."""
        return self

    def current(self) -> AbstractContextManager[Any]:
        """Inside, this device is the current one of its array library, whichever was before."""
        return nullcontext()

    def capturing(self) -> bool:
        """Whether launches are being captured into a graph instead of run."""
        return False

    @abstractmethod
    def describe(self) -> str:
        """The device in one line: model, cores or multiprocessors."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Array:
        """uint8 [nbytes], aligned to 128 bytes, of undefined content. Raises MemoryError if there is no room."""

    @abstractmethod
    def asarray(self, array: Any) -> Array:
        """The array in this device's memory, without a copy where it is there already."""

    def upload(self, array: Array) -> Array:
        """The array in this device's memory, aligned as the device aligns what it allocates."""
        return self.asarray(array)

    def in_place(self, name: str, array: Any) -> Array:
        """The array in this device's memory, never a copy: for what will be written. Raises TypeError."""
        if not self.holds(array):
            kind = f"{type(array).__module__}.{type(array).__name__}"
            raise TypeError(f"{name} must lie in the memory of device {self.name}, got {kind}")
        return self.asarray(array)

    def holds(self, array: Any) -> bool:
        """Whether `asarray` takes the array as it is, without a copy."""
        if hasattr(array, "__dlpack_device__"):
            return bool(array.__dlpack_device__()[0] == DLPACK_HOST)
        return hasattr(array, "__array_interface__")

    @abstractmethod
    def tonumpy(self, array: Array) -> np.ndarray[Any, Any]:
        """The array in host memory, without a copy where it is there already."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """A C-contiguous array of undefined content."""

    @abstractmethod
    def address(self, array: Array) -> int:
        """Address of an array's first element in this device's memory."""

    @abstractmethod
    def append(self, layer: Layer, k: Array, v: Array, slots: Array) -> None:
        """Store K and V of new tokens; the padding of their rows becomes zeros.

        k, v: [tokens, num_kv_heads, head_dim] of the storage dtype, each row contiguous, other strides any.
        slots: int64 [tokens], page·page_size + offset; a slot outside the pool (-1 by custom) is skipped.
        """

    @abstractmethod
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
        """Softmax attention of each query token over its sequence's pages. Overwrites out and lse.

        q, out: [query_tokens, num_q_heads, head_dim], float32, float16 or bfloat16, the sequences' query tokens
            one after another. page_table: int32 [batch, max_pages]. seq_lens: int32 [batch].
        query_lens: int32 [batch] of sum query_tokens, or None for one each: query token j of n in a sequence
            sees its first seq_len - n + 1 + j tokens.
        lse: float32 [query_tokens, num_q_heads], natural log of the sum of exponentials. A query token that
            sees no token gets out 0 and lse -inf.
        """

    @abstractmethod
    def gather(self, layer: Layer, slots: Array, k: Array, v: Array) -> None:
        """Read stored rows back into k and v, [tokens, num_kv_heads, head_dim] of the storage dtype.

        A slot outside the pool gives zeros.
        """

    @abstractmethod
    def copy_pages(self, data: Array, sources: Array, destinations: Array) -> None:
        """Copy whole pages: data[:, destination] = data[:, source] for each pair, in order.

        data: uint8 [num_layers, num_pages, page_stride]. sources, destinations: int64 [pairs].
        """

    @abstractmethod
    def merge_states(self, out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, out: Array, lse: Array) -> None:
        """Attention over the union of two disjoint sets of tokens, from the results over each.

        out_*: [rows, head_dim] of one dtype, lse_*: float32 [rows]. An empty set is (0, -inf).
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything launched so far is done."""

    def measure(self, calls: Iterable[Callable[[], object]]) -> list[Cost]:
        """Run the calls one after another; what each of them cost."""
        costs = []
        for call in calls:
            started = time.perf_counter()
            call()
            self.synchronize()
            costs.append(Cost(seconds=time.perf_counter() - started))
        return costs

    @abstractmethod
    def read_bandwidth(self) -> float | None:
        """Measured bytes per second of reading memory: the best of several sums over 1 GiB, with the threads
        that the kernels use. None on a device whose time means nothing."""

    @abstractmethod
    def last_level_cache_bytes(self) -> int:
        """Bytes of the largest cache between the cores and memory."""
