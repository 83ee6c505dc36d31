"""One fixture: run a small CUDA kernel in the interpreter, on NumPy arrays."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcupy.backends.ptx import Buffer, Module, Report, launch
from kvcupy.backends.ptx.nvrtc import compile_ptx
from kvcupy.errors import DeviceUnavailable

Run = Callable[..., Report]


@pytest.fixture(scope="session")
def run() -> Run:
    """run(source, grid, block, *args): the kernel `k` of a source, with arrays as pointers.

    shared, seed, checks: as in `launch`. define: macros. undefined: arrays whose bytes start without a value.
    readonly: arrays that may not be written.
    """
    try:
        compile_ptx("")
    except DeviceUnavailable as missing:
        pytest.skip(str(missing))
    modules: dict[Any, Module] = {}

    def execute(
        source: str,
        grid: Any,
        block: Any,
        *args: Any,
        shared: int = 0,
        arch: str = "compute_80",
        define: tuple[str, ...] = (),
        undefined: tuple[Any, ...] = (),
        readonly: tuple[Any, ...] = (),
        **options: Any,
    ) -> Report:
        key = (source, arch, define)
        if key not in modules:
            modules[key] = Module.compile(source, arch, [f"-D{name}" for name in define])
        buffers = [
            Buffer.of(
                arg,
                writable=not any(arg is each for each in readonly),
                defined=not any(arg is each for each in undefined),
            )
            for arg in args
            if isinstance(arg, np.ndarray)
        ]
        values = [arg.ctypes.data if isinstance(arg, np.ndarray) else arg for arg in args]
        return launch(modules[key]["k"], grid, block, values, shared, buffers=buffers, **options)

    return execute
