"""Memory for pages: a pool of all layers that kvcupy allocates, or one layer that the caller owns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvcupy.backends import Backend, backend_of, get_backend
from kvcupy.backends.base import STORAGE_DTYPES, Array, Layer, require_stored
from kvcupy.spec import LAYOUTS, KVSpec, Strides, whole_number


class Unique:
    """An object whose kernels know memory by its address: a copy would write into the original's."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it holds device memory by address; "
            "make a new one from its spec, and fork sequences to copy them"
        )


class LayerPool(Unique):
    """The pages of one layer, as the functional operations take them.

    Made by indexing a `KVPool`, or by `wrap` over memory that the caller owns.
    """

    def __init__(self, backend: Backend, layer: Layer, array: Array, writable: bool = True) -> None:
        self.backend = backend
        self.layer = layer
        self.array = array  # keeps the memory alive
        self.writable = writable

    def __repr__(self) -> str:
        return f"LayerPool({self.num_pages} pages on {self.backend.name}, {self.spec})"

    @property
    def spec(self) -> KVSpec:
        return self.layer.spec

    @property
    def num_pages(self) -> int:
        return self.layer.num_pages

    @property
    def num_slots(self) -> int:
        """Token slots: num_pages · page_size."""
        return self.layer.num_pages * self.layer.spec.page_size

    @classmethod
    def wrap(cls, spec: KVSpec, data: Any, *, strides: Strides | None = None, device: str | None = None) -> LayerPool:
        """A layer over memory that the caller owns; nothing is copied, and append writes into it.

        data: without `strides`, an array with one axis for the page, then the axes of spec.layout, then
            head_dim elements (more, and they are padding that append zeroes). Any strides do, so a view of one
            layer in a larger array works. With `strides` in bytes, a contiguous array whose first byte is
            page 0's; the number of pages is how many fit. vLLM's [2, pages, page_size, heads, head_dim] is layout
            "nhd" with kv = pages · page_size · heads · head_dim · itemsize.
            The element type is the one that spec.dtype stores; bfloat16 also as uint16.
        device: where the array lies; found out from its type if not given.

        Raises ValueError or TypeError if the array does not fit the spec, or if rows would overlap.
        """
        require_stored(spec.dtype, "to be stored")
        backend = backend_of(data) if device is None else get_backend(device)
        array = backend.in_place("data", data)
        _require_element_type(spec, array, raw_allowed=strides is not None)
        sizes = {"head": spec.num_kv_heads, "token": spec.page_size, "kv": 2}
        if strides is None:
            axes = ("page", *LAYOUTS[spec.layout])
            shape = tuple(sizes[axis] for axis in axes[1:])
            if array.ndim != 5 or array.shape[1:-1] != shape or array.shape[-1] < spec.head_dim:
                names = ", ".join(f"{axis} {sizes[axis]}" for axis in axes[1:])
                raise ValueError(
                    f"data must have shape [pages, {names}, head_dim {spec.head_dim} or more] "
                    f"for layout {spec.layout}, got {list(array.shape)}"
                )
            if array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
                raise ValueError("data must have the elements of a row side by side (a contiguous last axis)")
            num_pages = int(array.shape[0])
            strides = Strides(**dict(zip(axes, array.strides[:-1], strict=True)))
            row_bytes = int(array.shape[-1]) * spec.itemsize
        else:
            if not isinstance(strides, Strides):
                raise TypeError(f"strides must be kvcupy.Strides, got {strides!r}")
            if not array.flags.c_contiguous:
                raise ValueError("data must be contiguous when strides are given")
            row_bytes = spec.row_bytes
            page_extent = strides.offset(0, spec.num_kv_heads - 1, spec.page_size - 1, 1) + row_bytes
            fits = strides.page > 0 and array.nbytes >= page_extent
            num_pages = (array.nbytes - page_extent) // strides.page + 1 if fits else 0
        if num_pages == 0:
            raise ValueError(f"data must hold at least one page, got shape {list(array.shape)}")
        if backend.address(array) % spec.itemsize:
            raise ValueError(f"data must start at a multiple of {spec.itemsize} bytes for {spec.dtype}")
        _require_disjoint_rows(strides, {"page": num_pages, **sizes}, row_bytes, spec.itemsize)
        padding = row_bytes - spec.head_dim * spec.itemsize
        layer = Layer(spec, num_pages, backend.address(array), strides, padding)
        return cls(backend, layer, array, writable=bool(getattr(array.flags, "writeable", True)))


def _require_element_type(spec: KVSpec, array: Array, raw_allowed: bool) -> None:
    allowed = [STORAGE_DTYPES[spec.dtype]]
    if spec.dtype == "bfloat16":
        allowed.append(np.dtype(np.uint16))
    if raw_allowed:
        allowed.append(np.dtype(np.uint8))
    if array.dtype not in allowed:
        names = " or ".join(map(str, allowed))
        raise TypeError(f"data must have elements of {names}, as the spec stores {spec.dtype}, got {array.dtype}")


def _require_disjoint_rows(strides: Strides, sizes: dict[str, int], row_bytes: int, itemsize: int) -> None:
    """No two rows may share a byte, or append would overwrite one token with another."""
    steps = sorted((getattr(strides, axis), size, axis) for axis, size in sizes.items() if size > 1)
    extent = row_bytes
    for step, size, axis in steps:
        if step < extent:
            raise ValueError(f"strides.{axis} must be at least {extent} bytes, or rows overlap; got {step}")
        if step % itemsize:
            raise ValueError(f"strides.{axis} must be a multiple of {itemsize} bytes, got {step}")
        extent = step * size


class KVPool(Unique):
    """All layers of a cache in one allocation: layer l at l · layer_stride bytes, each a view.

    Give num_pages, or memory as bytes or text ("8GiB"): then as many pages as fit, never a byte more.
    The memory is undefined until append writes it. Raises MemoryError if the device has no room.

    pool[layer] is the layer as a `LayerPool`.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_pages: int | None = None,
        *,
        memory: int | str | None = None,
        device: str = "auto",
    ) -> None:
        require_stored(spec.dtype, "to be stored")
        if (num_pages is None) == (memory is None):
            raise ValueError("give either num_pages or memory")
        if memory is not None:
            num_pages = spec.pool_pages(memory)
        self.spec = spec
        self.num_pages = whole_number("num_pages", num_pages, 1)
        self.backend = get_backend(device)
        page_stride = spec.strides.page
        try:
            memory_of_all = self.backend.allocate(spec.num_layers * self.num_pages * page_stride)
        except MemoryError:
            size = self.num_pages * spec.page_bytes
            raise MemoryError(
                f"no room on device {self.backend.name} for a pool of {self.num_pages} pages, {size / 2**30:.3g} GiB"
            ) from None
        self.data = memory_of_all.reshape(spec.num_layers, self.num_pages, page_stride)

    @property
    def nbytes(self) -> int:
        """Bytes allocated: num_pages · spec.page_bytes."""
        return int(self.data.nbytes)

    def __len__(self) -> int:
        return self.spec.num_layers

    def __getitem__(self, layer: int) -> LayerPool:
        try:
            layer = whole_number("layer", layer, 0, self.spec.num_layers - 1)
        except ValueError as error:
            raise IndexError(str(error)) from None
        array = self.data[layer]
        spec = self.spec
        view = Layer(spec, self.num_pages, self.backend.address(array), spec.strides, spec.padding_bytes_per_row)
        return LayerPool(self.backend, view, array)

    def __iter__(self) -> Iterator[LayerPool]:
        return (self[layer] for layer in range(len(self)))
