"""As much of CuPy as the `cuda` device uses, over host memory and the PTX interpreter: no GPU needed.

It shows that the device calls CuPy as CuPy wants to be called: argument widths, devices, streams, no silent copies.
An array refuses to become a NumPy array on the quiet, as CuPy's does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from kvcupy.backends.ptx.execute import Module, launch
from kvcupy.backends.ptx.memory import Buffer

_HOST_METHODS = ("astype", "copy", "min", "max", "any", "all", "reshape", "view", "sum")
_HOST_FACTS = ("dtype", "ndim", "shape", "size", "nbytes", "itemsize", "strides", "flags")


class Allocation:
    def __init__(self, nbytes: int) -> None:
        raw = np.empty(nbytes + 512, np.uint8)
        start = -raw.ctypes.data % 512
        self.bytes = raw[start : start + nbytes]
        self.device = current_device
        allocations[self.bytes.ctypes.data] = self


allocations: WeakValueDictionary[int, Allocation] = WeakValueDictionary()
current_device = 0
device_count = 1


class Device(AbstractContextManager["Device"]):
    attributes = {"MultiProcessorCount": 6, "L2CacheSize": 1 << 20}  # noqa: RUF012

    def __init__(self, number: int | None = None) -> None:
        self.id = current_device if number is None else number

    def __enter__(self) -> Device:
        self._before = current_device
        _use(self.id)
        return self

    def __exit__(self, *exception: object) -> None:
        _use(self._before)


def _use(device: int) -> None:
    global current_device
    current_device = device


class ndarray:
    def __init__(self, values: Any, allocation: Allocation) -> None:
        self.values = values
        self.allocation = allocation

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.values, name)
        if name in _HOST_FACTS:
            return value
        if name not in _HOST_METHODS:
            raise AttributeError(f"this stand-in for CuPy has no array.{name}")
        return lambda *a, **k: self._wrap(value(*map(_values, a), **k))

    def _wrap(self, result: Any) -> Any:
        if isinstance(result, np.ndarray) and np.may_share_memory(result, self.allocation.bytes):
            return ndarray(result, self.allocation)
        with self.device:
            return asarray(np.asarray(result))

    def __getitem__(self, key: Any) -> ndarray:
        result: ndarray = self._wrap(self.values[key])
        return result

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("a NumPy array cannot be assigned to a device array")
        self.values[key] = _values(value)

    def __eq__(self, other: object) -> Any:
        return self._wrap(self.values == _values(other))

    def __ne__(self, other: object) -> Any:
        return self._wrap(self.values != _values(other))

    def __bool__(self) -> bool:
        return bool(self.values)

    def __int__(self) -> int:
        return int(self.values)

    def __lt__(self, other: Any) -> Any:
        return self._wrap(self.values < _values(other))

    def __ge__(self, other: Any) -> Any:
        return self._wrap(self.values >= _values(other))

    def __len__(self) -> int:
        return len(self.values)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.allocation.device

    def __array__(self, *arguments: object, **options: object) -> Any:
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        return self._wrap(function(*map(_values, arguments), **options))

    def __array_ufunc__(self, function: Any, method: str, *arguments: Any, **options: Any) -> Any:
        return self._wrap(function(*map(_values, arguments), **options))

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.values.ctypes.data)

    @property
    def device(self) -> Device:
        return Device(self.allocation.device)

    def get(self) -> Any:
        return self.values.copy()


def _values(value: Any) -> Any:
    return value.values if isinstance(value, ndarray) else value


def empty(shape: Any, dtype: Any) -> ndarray:
    count = int(np.prod(shape))
    allocation = Allocation(count * np.dtype(dtype).itemsize)
    return ndarray(allocation.bytes.view(dtype).reshape(shape), allocation)


def asarray(values: Any) -> ndarray:
    result = empty(values.shape, values.dtype)
    result.values[...] = values
    return result


def asnumpy(array: ndarray) -> Any:
    return array.get()


class RawModule:
    def __init__(self, code: str, options: tuple[str, ...] = ()) -> None:
        self._module = Module.compile(code, "compute_80", [option for option in options if "std" not in option])

    def get_function(self, name: str) -> Any:
        kernel = self._module[name]

        def call(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
            global ticks
            ticks += 1
            values = []
            for parameter, argument in zip(kernel.program.kernel.params, arguments, strict=True):
                if isinstance(argument, ndarray):
                    argument = np.uint64(argument.data.ptr)
                # CuPy passes a NumPy scalar's own bytes, and a Python number as 8 bytes.
                assert isinstance(argument, np.generic), f"{name}: {parameter.name} must be a NumPy scalar"
                assert argument.itemsize == parameter.nbytes, f"{name}: {parameter.name} has another width"
                values.append(argument.item())
            here = [each for each in allocations.values() if each.device == current_device]
            launch(kernel, grid, block, values, buffers=[Buffer.of(each.bytes) for each in here])

        call.kernel = SimpleNamespace(ptr=1)  # type: ignore[attr-defined]
        return call


class CUDARuntimeError(RuntimeError):
    pass


def _device_of_address(address: int) -> Any:
    for start, allocation in list(allocations.items()):
        if start <= address < start + max(1, allocation.bytes.nbytes):
            return SimpleNamespace(device=allocation.device)
    raise CUDARuntimeError("not an address of a device")


class Event:
    """Its time is the number of launches and events before it, in milliseconds."""

    def record(self) -> None:
        global ticks
        ticks += 1
        self.time = ticks

    def synchronize(self) -> None:
        pass


ticks = 0


def stream(number: int = 0, capturing: bool = False) -> Any:
    return SimpleNamespace(ptr=number, synchronize=lambda: None, is_capturing=lambda: capturing)


cuda = SimpleNamespace(
    Device=Device,
    Event=Event,
    get_elapsed_time=lambda start, end: float(end.time - start.time),
    get_current_stream=stream,
    nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)),
    driver=SimpleNamespace(occupancyMaxActiveBlocksPerMultiprocessor=lambda function, block, shared: 2),
    runtime=SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDevice=lambda: current_device,
        getDeviceCount=lambda: device_count,
        getDeviceProperties=lambda number: {"name": b"Stand-in", "multiProcessorCount": 6},
        pointerGetAttributes=_device_of_address,
    ),
)
