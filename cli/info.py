"""`kvcupy info`: versions, devices, and what `--device auto` takes here."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from textwrap import fill
from typing import Annotated

import typer

from kvcupy import DeviceUnavailable, __version__
from kvcupy.backends import DEVICES, get_backend
from kvcupy.simulate.gpus import GPUS
from kvcupy.simulate.models import MODELS

PACKAGES = ("numpy", "ml_dtypes", "numba", "llvmlite", "cupy-cuda12x", "cupy-cuda13x")


def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False) -> None:
    """Versions, devices, and which of them `auto` would choose and why."""
    versions = {"kvcupy": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    devices = {}
    for name in DEVICES:
        if name != "auto":
            try:
                devices[name] = {"available": True, "description": get_backend(name).describe()}
            except DeviceUnavailable as error:
                devices[name] = {"available": False, "description": str(error)}
    chosen = get_backend("auto").name
    reason = "the fastest device that answers here" if len(devices) > 1 else "the only device of this version"
    if as_json:
        report = {
            "schema": "kvcupy.info/1",
            "device": None,
            "gpu": None,
            "modelled": False,
            "versions": versions,
            "devices": devices,
            "auto": {"device": chosen, "reason": reason},
            "models": sorted(MODELS),
            "gpus": sorted(GPUS),
        }
        print(json.dumps(report, indent=2))
        return
    for name, number in versions.items():
        print(f"{name} {number}")
    for name, device in devices.items():
        print(f"{name}: {device['description']}")
    print(f"auto takes {chosen}: {reason}")
    supported = (name for name, model in MODELS.items() if not model.unsupported)
    for title, names in (("models", supported), ("gpus", GPUS)):
        print(fill(f"{title}: {', '.join(sorted(names))}", 80, subsequent_indent="  ", break_on_hyphens=False))
