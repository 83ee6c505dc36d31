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

_OPTIONS = ("-ftz=true",)
"""CuPy compiles everything with it, so the same is run here."""

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
            self._modules[variant] = Module.compile(variant.source(), self.arch, _OPTIONS)
        program = self._modules[variant][kernel]
        values: list[int | float] = []
        buffers: list[Buffer] = []
        for parameter, argument in zip(program.program.kernel.params, arguments, strict=True):
            scalar = isinstance(argument, np.generic)
            width = argument.itemsize if scalar else 8
            if width != parameter.nbytes:
                raise TypeError(f"{parameter.name} must have {parameter.nbytes} bytes, got {argument!r}")
            if argument is None:
                values.append(0)
            elif scalar:
                values.append(argument.item())
            else:
                values.append(argument.address if isinstance(argument, Memory) else self.address(argument))
                buffers.append(self._buffer(argument))
        report = launch(program, grid, block, values, buffers=buffers, seed=self.seed, checks=self.checks)
        if self._recorded is not None:
            self._recorded.append(report)

    def _buffer(self, argument: Array | Memory) -> Buffer:
        """What a kernel may touch when it is given this argument."""
        if isinstance(argument, Memory):
            return self._adopted.get(argument.address) or Buffer(argument.address, argument.nbytes)
        if self._workspace is not None and argument is self._workspace[0]:
            return self._workspace[1]
        steps = [(extent - 1) * stride for extent, stride in zip(argument.shape, argument.strides, strict=True)]
        first = sum(step for step in steps if step < 0)
        last = sum(step for step in steps if step > 0) + argument.itemsize
        nbytes = last - first if argument.size else 0
        return Buffer(self.address(argument) + first, nbytes, bool(argument.flags.writeable))

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
