"""Devices by name. A device is imported when it is first asked for, and never silently replaced by another."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from kvcupy.backends.base import Backend
from kvcupy.errors import DeviceUnavailable

__all__ = ["DEVICES", "get_backend"]

_MODULES = {"cpu": "kvcupy.backends.cpu"}

DEVICES = ("auto", *_MODULES)
"""Names that `get_backend` takes."""


def get_backend(device: str = "auto") -> Backend:
    """The backend of a device: "cpu", or "auto" for the fastest one that answers here.

    Raises ValueError for an unknown name and DeviceUnavailable, in one line, for a device that cannot run.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    return _load("cpu" if device == "auto" else device)


@cache
def _load(device: str) -> Backend:
    try:
        backend: Backend = import_module(_MODULES[device]).create()
    except ImportError as error:
        raise DeviceUnavailable(f"device {device} needs the package {error.name}, which is not installed") from None
    return backend
