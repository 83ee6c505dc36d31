"""The `cuda` device: the kernels as CuPy raw modules, on the caller's current stream. Nothing happens at import."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import numpy as np

from kvcupy.backends.base import DLPACK_CUDA, Array, Backend, Cost
from kvcupy.backends.kernels import KernelBackend, Memory
from kvcupy.backends.source import Variant
from kvcupy.errors import DeviceUnavailable

__all__ = ["CudaBackend", "create"]

_OPTIONS = ("-std=c++17",)
_BANDWIDTH_BYTES = 1 << 30
_HOLD = 'extern "C" __global__ void hold(long long n) { long long start = clock64(); while (clock64() - start < n); }'
_HOLD_CYCLES = 1_000_000


def create() -> Backend:
    """The device. Raises DeviceUnavailable with what is missing: CuPy, a driver and GPU, or NVRTC."""
    try:
        import cupy
    except ImportError as error:
        raise DeviceUnavailable(
            f"device cuda needs the package cupy-cuda12x or cupy-cuda13x ({error.msg.splitlines()[0]})"
        ) from None
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceUnavailable(f"device cuda found no GPU that answers: {error}") from None
    if devices == 0:
        raise DeviceUnavailable("device cuda found no GPU")
    try:
        cupy.cuda.nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError):
        raise DeviceUnavailable("device cuda needs the package nvidia-cuda-nvrtc, which is not installed") from None
    return CudaBackend(cupy, int(cupy.cuda.runtime.getDevice()))


class CudaBackend(KernelBackend):
    """One GPU. Arrays are CuPy's; DLPack and CUDA-array-interface arrays are taken as they are, host arrays are
    copied to this GPU. Launches go to the caller's current stream of this GPU, whichever GPU is current."""

    name = "cuda"

    def __init__(self, cupy: Any, number: int) -> None:
        self._cupy = cupy
        self._number = number
        self._siblings = {number: self}
        self._several = cupy.cuda.runtime.getDeviceCount() > 1
        self._modules: dict[Variant, Any] = {}
        self._grids: dict[tuple[Variant, str], int] = {}
        self._workspaces: dict[tuple[int, int], Array] = {}

    def on(self, number: int | None = None) -> Backend:
        if number is None:
            number = int(self._cupy.cuda.runtime.getDevice())
        if number not in self._siblings:
            sibling = CudaBackend(self._cupy, number)
            sibling._siblings = self._siblings
            self._siblings[number] = sibling
        return self._siblings[number]

    def describe(self) -> str:
        properties = self._cupy.cuda.runtime.getDeviceProperties(self._number)
        return f"{properties['name'].decode()}, {properties['multiProcessorCount']} multiprocessors"

    def current(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._cupy.cuda.Device(self._number)
        return context

    def capturing(self) -> bool:
        return bool(self._cupy.cuda.get_current_stream().is_capturing())

    # Kernels

    def launch(self, variant: Variant, kernel: str, grid: tuple[int, int], block: int, *arguments: Any) -> None:
        if self._several:
            self._require_one_device(arguments)
        with self.current():
            self._function(variant, kernel)(grid, (block,), tuple(map(_argument, arguments)))

    def persistent_blocks(self, variant: Variant, kernel: str, block: int) -> int:
        key = variant, kernel
        if key not in self._grids:
            with self.current():
                function = self._function(variant, kernel).kernel.ptr
                blocks = self._cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(function, block, 0)
            self._grids[key] = self._attribute("MultiProcessorCount") * max(1, blocks)
        return self._grids[key]

    def workspace(self, nbytes: int) -> Array:
        """One per stream, since launches on one stream follow each other, and kept for good, since a captured graph
        may use it again at any time."""
        with self.current():
            key = self._cupy.cuda.get_current_stream().ptr, nbytes
        if key not in self._workspaces:
            self._workspaces[key] = self.allocate(nbytes)
        return self._workspaces[key]

    def _function(self, variant: Variant, kernel: str) -> Any:
        if variant not in self._modules:
            self._modules[variant] = self._cupy.RawModule(code=variant.source(), options=_OPTIONS)
        return self._modules[variant].get_function(kernel)

    def _attribute(self, name: str) -> int:
        return int(self._cupy.cuda.Device(self._number).attributes[name])

    def _require_one_device(self, arguments: tuple[Any, ...]) -> None:
        for argument in arguments:
            if isinstance(argument, Memory):
                device = self._cupy.cuda.runtime.pointerGetAttributes(argument.address).device
            elif isinstance(argument, self._cupy.ndarray):
                device = argument.device.id
            else:
                continue
            if device != self._number:
                raise ValueError(f"arrays and pool must be on one GPU, got GPU {self._number} and GPU {device}")

    # Memory

    def allocate(self, nbytes: int) -> Array:
        with self.current():
            return self._cupy.empty(nbytes, np.uint8)

    def holds(self, array: Any) -> bool:
        if hasattr(array, "__dlpack_device__"):
            return array.__dlpack_device__()[0] in DLPACK_CUDA
        return hasattr(array, "__cuda_array_interface__")

    def asarray(self, array: Any) -> Array:
        if isinstance(array, self._cupy.ndarray):
            return array
        # DLPack first: it knows bfloat16, which the CUDA array interface does not.
        if hasattr(array, "__dlpack_device__") and array.__dlpack_device__()[0] in DLPACK_CUDA:
            return self._cupy.from_dlpack(array)
        if hasattr(array, "__cuda_array_interface__"):
            return self._cupy.asarray(array)
        with self.current():
            return self._cupy.asarray(np.asarray(array))

    def tonumpy(self, array: Array) -> np.ndarray[Any, Any]:
        host: np.ndarray[Any, Any] = self._cupy.asnumpy(array)
        return host

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        with self.current():
            return self._cupy.empty(shape, dtype)

    def address(self, array: Array) -> int:
        return int(array.data.ptr)

    def synchronize(self) -> None:
        with self.current():
            self._cupy.cuda.get_current_stream().synchronize()

    def measure(self, calls: Iterable[Callable[[], object]]) -> list[Cost]:
        """By events on the stream. The GPU is held back, about half a millisecond a call, until the host is ahead:
        what counts is how long the GPU is busy, not how fast Python launches."""
        cuda, calls = self._cupy.cuda, list(calls)
        with self.current():
            hold = self._cupy.RawModule(code=_HOLD).get_function("hold")
            hold((1,), (1,), (np.int64(_HOLD_CYCLES * len(calls)),))
            marks = [cuda.Event()]
            marks[0].record()
            for call in calls:
                call()
                marks.append(cuda.Event())
                marks[-1].record()
            marks[-1].synchronize()
            return [Cost(seconds=cuda.get_elapsed_time(start, end) / 1e3) for start, end in pairwise(marks)]

    def read_bandwidth(self) -> float | None:
        cupy = self._cupy
        with self.current():
            values = cupy.zeros(_BANDWIDTH_BYTES // 4, np.float32)
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            best_ms = float("inf")
            for _ in range(8):
                start.record()
                values.sum()
                end.record()
                end.synchronize()
                best_ms = min(best_ms, cupy.cuda.get_elapsed_time(start, end))
        return float(_BANDWIDTH_BYTES / (best_ms / 1e3))

    def last_level_cache_bytes(self) -> int:
        return self._attribute("L2CacheSize")


def _argument(argument: Any) -> Any:
    if argument is None:
        return np.uint64(0)
    return np.uint64(argument.address) if isinstance(argument, Memory) else argument
