"""Devices by name. A device is imported when it is first asked for, and never silently replaced by another."""

from __future__ import annotations

from functools import cache
from importlib import import_module

import numpy as np

from kvcupy.backends.base import DLPACK_CUDA, Backend
from kvcupy.errors import DeviceUnavailable

__all__ = ["DEVICES", "Backend", "backend_of", "get_backend"]

_MODULES = {
    "cpu": "kvcupy.backends.cpu",
    "cuda": "kvcupy.backends.cuda",
    "ptx": "kvcupy.backends.ptx.device",
}

DEVICES = ("auto", *_MODULES)
"""Names that `get_backend` takes."""


def get_backend(device: str = "auto") -> Backend:
    """The backend of a device by name; "auto" is "cuda" where a GPU answers, else "cpu".

    Raises ValueError for an unknown name and DeviceUnavailable, in one line, for a device that cannot run.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    if device != "auto":
        return _load(device).on()
    try:
        return _load("cuda").on()
    except DeviceUnavailable:
        return _load("cpu")


def backend_of(array: object) -> Backend:
    """The backend in whose memory an array lies: "cuda", or "cpu" for host memory, which "ptx" shares."""
    if isinstance(array, np.ndarray):
        return _load("cpu")
    if hasattr(array, "__dlpack_device__"):
        kind, number = array.__dlpack_device__()
        return _load("cuda").on(int(number)) if kind in DLPACK_CUDA else _load("cpu")
    return _load("cuda").on() if hasattr(array, "__cuda_array_interface__") else _load("cpu")


@cache
def _load(device: str) -> Backend:
    try:
        backend: Backend = import_module(_MODULES[device]).create()
    except ImportError as error:
        raise DeviceUnavailable(f"device {device} needs the package {error.name}, which is not installed") from None
    return backend
