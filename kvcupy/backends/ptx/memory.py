"""Memory: the bytes, and beside them the marks of bytes that nothing was ever written to.

Global memory is the caller's own: a `Buffer` names an address range of this process, and the kernel reads and writes
there in place. A `SparseBuffer` has an address of its own and holds only the pages that were touched, so that a pool
of many gigabytes costs nothing. Whatever lies in no buffer is out of bounds.

Addresses in the generic space tell by themselves where they point: shared and local memory are seen through windows
far above any address of a process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import numpy as np

from kvcupy.backends.ptx.types import Array, unsigned

__all__ = ["LOCAL_WINDOW", "SHARED_WINDOW", "Buffer", "Bytes", "GlobalMemory", "OutOfBounds", "SparseBuffer"]

SHARED_WINDOW = 1 << 60
LOCAL_WINDOW = 1 << 61

UNDEFINED = 0xFF
"""The mark of a byte without a value, and also what such a byte holds: NaN in every float type."""


class Bytes:
    """Bytes that can be read and written through any aligned width of 1, 2, 4, 8 or 16.

    marks: None where every byte has a value, else one mark per byte, of the same layout.
    """

    def __init__(self, data: Array, marks: Array | None = None) -> None:
        self.data = data
        self.marks = marks
        self._views = _views(data)
        self._mark_views = None if marks is None else _views(marks)

    @classmethod
    def blank(cls, nbytes: int, defined: bool = False) -> Bytes:
        """Fresh memory; nbytes is rounded up to a multiple of 16."""
        nbytes = -(-nbytes // 16) * 16
        if defined:
            return cls(_aligned_zeros(nbytes))
        data, marks = _aligned_zeros(nbytes), _aligned_zeros(nbytes)
        data[:] = UNDEFINED
        marks[:] = UNDEFINED
        return cls(data, marks)

    def take(self, at: Array, nbytes: int) -> Array:
        values: Array = self._views[nbytes][at // nbytes]
        return values

    def put(self, at: Array, values: Array) -> None:
        self._views[values.itemsize][at // values.itemsize] = values

    def take_marks(self, at: Array, nbytes: int) -> Array | None:
        """Marks as bit masks of the same width, or None if all these bytes have a value."""
        if self._mark_views is None:
            return None
        marks = self._mark_views[nbytes][at // nbytes]
        return marks if marks.view(np.uint8).any() else None

    def put_marks(self, at: Array, nbytes: int, marks: Array | None) -> None:
        """The marks of bytes just written; None says that all have a value."""
        if self._mark_views is not None:
            self._mark_views[nbytes][at // nbytes] = 0 if marks is None else marks


def _views(data: Array) -> dict[int, Array]:
    return {nbytes: data.view(unsigned(nbytes)) for nbytes in (1, 2, 4, 8, 16)}


def _aligned_zeros(nbytes: int) -> Array:
    raw = np.zeros(nbytes + 16, np.uint8)
    skip = -raw.ctypes.data % 16
    return raw[skip : skip + nbytes]


class Buffer:
    """A range of this process's memory that kernels may use. Keep its owner alive while launches use it.

    writable: a kernel may store there. defined: its bytes have values; if not, they are marked until a kernel
    stores them, and the marks last as long as this object.
    """

    def __init__(
        self, address: int, nbytes: int, writable: bool = True, defined: bool = True, name: str = ""
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.writable = writable
        self.name = name or f"buffer at {address:#x}"
        # Views start and end at multiples of 16, a little outside; only bytes inside are ever touched.
        self._skew = address % 16
        self.storage = self._storage(address - self._skew, -(-(self._skew + nbytes) // 16) * 16, defined)

    def _storage(self, start: int, nbytes: int, defined: bool) -> Bytes:
        data = (
            np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(start)) if nbytes else np.zeros(0, np.uint8)
        )
        return Bytes(data, None if defined else np.full(nbytes, UNDEFINED, np.uint8))

    @classmethod
    def of(cls, array: Array, writable: bool | None = None, defined: bool = True, name: str = "") -> Buffer:
        """The memory that a contiguous array occupies. writable: as the array says, unless given."""
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            raise ValueError("array must be contiguous, got one with gaps")
        flag = array.flags.writeable if writable is None else writable
        return cls(array.ctypes.data, array.nbytes, flag, defined, name)

    def joined(self, other: Buffer) -> Buffer:
        """One buffer for this and an overlapping one that starts no earlier. Raises ValueError if either
        has marks of undefined bytes, which belong to it alone."""
        if self is other:
            return self
        if self.storage.marks is not None or other.storage.marks is not None or isinstance(other, SparseBuffer):
            raise ValueError(f"undefined buffers must not overlap: {self.name} and {other.name} do")
        end = max(self.address + self.nbytes, other.address + other.nbytes)
        return Buffer(self.address, end - self.address, self.writable or other.writable, name=self.name)

    def locate(self, addresses: Array) -> Array:
        """Where addresses inside this buffer lie in its storage, in bytes."""
        return addresses - (self.address - self._skew)


class SparseBuffer(Buffer):
    """Memory at a made-up address that exists only where it was touched.

    The default address lies above anything a process owns and below the windows of shared and local memory.
    Bytes that nobody wrote read as fill; with defined=False they are marked as well.
    """

    PAGE_BYTES = 1 << 16

    def __init__(
        self,
        nbytes: int,
        address: int = 1 << 52,
        writable: bool = True,
        defined: bool = True,
        fill: int = 0,
        name: str = "",
    ) -> None:
        self._pages: dict[int, int] = {}
        self._fill = fill
        super().__init__(address, nbytes, writable, defined, name)

    def _storage(self, start: int, nbytes: int, defined: bool) -> Bytes:
        return Bytes.blank(0, defined)

    def locate(self, addresses: Array) -> Array:
        offsets = super().locate(addresses)
        pages, which = np.unique(offsets // self.PAGE_BYTES, return_inverse=True)
        self._touch([page for page in pages.tolist() if page not in self._pages])
        starts = np.array([self._pages[page] for page in pages.tolist()], np.int64)
        at: Array = starts[which] * self.PAGE_BYTES + offsets % self.PAGE_BYTES
        return at

    def _touch(self, pages: Sequence[int]) -> None:
        if not pages:
            return
        old = self.storage
        grown = Bytes.blank(old.data.size + len(pages) * self.PAGE_BYTES, old.marks is None)
        grown.data[:] = self._fill
        grown.data[: old.data.size] = old.data
        if grown.marks is not None and old.marks is not None:
            grown.marks[: old.marks.size] = old.marks
        for page in pages:
            self._pages[page] = len(self._pages)
        self.storage = grown

    def read(self, offset: int, nbytes: int) -> bytes:
        """The bytes at offset, from the host."""
        at = self.locate(self.address + offset + np.arange(nbytes))
        return self.storage.take(at, 1).tobytes()

    def write(self, offset: int, data: bytes) -> None:
        """Store bytes at offset, from the host."""
        at = self.locate(self.address + offset + np.arange(len(data)))
        self.storage.put(at, np.frombuffer(data, np.uint8))
        self.storage.put_marks(at, 1, None)

    @property
    def touched_bytes(self) -> int:
        return self.storage.data.size


class OutOfBounds(Exception):
    """An access outside every buffer. position: which of the addresses."""

    def __init__(self, position: int, detail: str) -> None:
        super().__init__(detail)
        self.position = position
        self.detail = detail


class GlobalMemory:
    """The buffers of a launch, found by address. Views of one array that overlap are one buffer here."""

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self.buffers: list[Buffer] = []
        for buffer in sorted((each for each in buffers if each.nbytes), key=lambda each: each.address):
            if self.buffers and buffer.address < self.buffers[-1].address + self.buffers[-1].nbytes:
                buffer = self.buffers.pop().joined(buffer)
            self.buffers.append(buffer)
        self._starts = np.array([buffer.address for buffer in self.buffers], np.int64)
        self._ends = np.array([buffer.address + buffer.nbytes for buffer in self.buffers], np.int64)

    def find(self, addresses: Array, nbytes: int | Array) -> list[tuple[Buffer, Array | None]]:
        """The buffers that hold these accesses, each with the positions it holds, or None for all of them.

        Raises OutOfBounds.
        """
        ends = addresses + nbytes
        first = int(np.searchsorted(self._starts, addresses.min(), "right")) - 1
        if first >= 0 and ends.max() <= self._ends[first]:
            return [(self.buffers[first], None)]
        which = np.searchsorted(self._starts, addresses, "right") - 1
        bad = np.ones(len(addresses), bool) if not self.buffers else (which < 0) | (ends > self._ends[which])
        if bad.any():
            position = int(bad.argmax())
            raise OutOfBounds(position, self._describe(int(addresses[position]), int(ends[position])))
        return [(self.buffers[each], np.flatnonzero(which == each)) for each in np.unique(which).tolist()]

    def _describe(self, start: int, end: int) -> str:
        text = f"{end - start} bytes at {start:#x}"
        for buffer in self.buffers:
            if start < buffer.address + buffer.nbytes and end > buffer.address:
                return f"{text}, across the edge of {buffer.name} ({buffer.nbytes} bytes)"
        if not self.buffers:
            return f"{text}, and no buffer was given"
        near = min(self.buffers, key=lambda each: max(each.address - start, start - each.address - each.nbytes))
        if start < near.address:
            return f"{text}, {near.address - start} bytes before {near.name} ({near.nbytes} bytes)"
        return f"{text}, {start - near.address - near.nbytes} bytes past the end of {near.name} ({near.nbytes} bytes)"
