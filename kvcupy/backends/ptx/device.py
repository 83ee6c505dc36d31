"""The `ptx` device: the CUDA kernels on NumPy arrays, compiled by NVRTC and run by the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvcupy.backends.base import Array, Backend
from kvcupy.backends.kernels import KernelBackend, Memory
from kvcupy.backends.ptx.execute import Module, launch
from kvcupy.backends.ptx.memory import Buffer
from kvcupy.backends.ptx.nvrtc import version
from kvcupy.backends.ptx.report import Report
from kvcupy.backends.source import Variant

__all__ = ["PtxBackend", "create"]

_ALIGNMENT = 128
_LAST_LEVEL_CACHE_BYTES = 50 << 20


def create() -> Backend:
    """The device. Raises DeviceUnavailable without the NVRTC wheel."""
    return PtxBackend()


class PtxBackend(KernelBackend):
    """Runs kernels with every check of the interpreter; a KernelFault names the line of the kernel at fault.

    arch: the architecture whose path is compiled and run. grid: persistent thread blocks of a kernel, as if the
    device held so many. seed: run warps in a random order. checks: False runs faster, with bounds checks alone.
    """

    name = "ptx"

    def __init__(
        self, arch: str = "compute_80", grid: int = 24, seed: int | None = None, checks: bool = True
    ) -> None:
        self.arch = arch
        self.grid = grid
        self.seed = seed
        self.checks = checks
        self._version = version()
        self._modules: dict[Variant, Module] = {}
        self._workspace: tuple[Array, Buffer] | None = None
        self._adopted: dict[int, Buffer] = {}
        self._recorded: list[Report] | None = None

    @contextmanager
    def record(self) -> Iterator[list[Report]]:
        """A list that gets the report of every launch inside the `with`: instructions, sectors, bytes."""
        before, self._recorded = self._recorded, []
        try:
            yield self._recorded
        finally:
            self._recorded = before

    def adopt(self, buffer: Buffer) -> None:
        """Take `Memory` at this buffer's address to mean the buffer: a sparse one, or one with undefined bytes."""
        self._adopted[buffer.address] = buffer

    def describe(self) -> str:
        return f"PTX interpreter, {self.arch}, NVRTC {self._version}"

    # Kernels

    def launch(self, variant: Variant, kernel: str, grid: tuple[int, int], block: int, *arguments: Any) -> None:
        if variant not in self._modules:
            self._modules[variant] = Module.compile(variant.source(), self.arch)
        program = self._modules[variant][kernel]
        values: list[int | float] = []
        buffers: list[Buffer] = []
        ranges: list[tuple[int, int, bool]] = []
        for parameter, argument in zip(program.program.kernel.params, arguments, strict=True):
            width = argument.itemsize if isinstance(argument, np.generic) else 8
            if width != parameter.nbytes:
                raise TypeError(f"{parameter.name} must have {parameter.nbytes} bytes, got {argument!r}")
            if argument is None:
                values.append(0)
            elif isinstance(argument, np.generic):
                values.append(argument.item())
            elif isinstance(argument, Memory) and argument.address in self._adopted:
                values.append(argument.address)
                buffers.append(self._adopted[argument.address])
            elif self._workspace is not None and argument is self._workspace[0]:
                values.append(self.address(argument))
                buffers.append(self._workspace[1])
            else:
                address, start, end, writable = _extent(argument)
                values.append(address)
                ranges.append((start, end, writable))
        buffers += _disjoint(ranges)
        report = launch(program, grid, block, values, buffers=buffers, seed=self.seed, checks=self.checks)
        if self._recorded is not None:
            self._recorded.append(report)

    def persistent_blocks(self, variant: Variant, kernel: str, block: int) -> int:
        return self.grid

    def workspace(self, nbytes: int) -> Array:
        """Marked as undefined: reading what this use of it has not written is a fault."""
        array = self.allocate(nbytes)
        self._workspace = array, Buffer.of(array, defined=False, name="workspace")
        return array

    # Memory

    def allocate(self, nbytes: int) -> Array:
        raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        return raw[start : start + nbytes]

    def asarray(self, array: Any) -> Array:
        return np.asarray(array)

    def tonumpy(self, array: Array) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.empty(shape, dtype)

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def synchronize(self) -> None:
        pass

    def read_bandwidth(self) -> float | None:
        return None

    def last_level_cache_bytes(self) -> int:
        """Of no consequence where nothing is timed: that of an H100, to go through the same motions."""
        return _LAST_LEVEL_CACHE_BYTES


def _extent(argument: Any) -> tuple[int, int, int, bool]:
    """Address of the first element, first and last byte, and whether a kernel may write there."""
    if isinstance(argument, Memory):
        return argument.address, argument.address, argument.address + argument.nbytes, True
    steps = [(extent - 1) * stride for extent, stride in zip(argument.shape, argument.strides, strict=True)]
    address = int(argument.ctypes.data)
    if argument.size == 0:
        return address, address, address, False
    start = address + sum(step for step in steps if step < 0)
    end = address + sum(step for step in steps if step > 0) + argument.itemsize
    return address, start, end, bool(argument.flags.writeable)


def _disjoint(ranges: list[tuple[int, int, bool]]) -> list[Buffer]:
    """Buffers that cover these ranges; arguments that share memory share a buffer."""
    merged: list[tuple[int, int, bool]] = []
    for start, end, writable in sorted(ranges):
        if merged and start < merged[-1][1]:
            first, last, either = merged.pop()
            start, end, writable = first, max(last, end), writable or either
        merged.append((start, end, writable))
    return [Buffer(start, end - start, writable) for start, end, writable in merged]
