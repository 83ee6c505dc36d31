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


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh numbers in every run; the seed is shown when a test fails."""
    seed = int(np.random.SeedSequence().entropy) % 2**32
    print(f"seed {seed}")
    return np.random.default_rng(seed)


_C_TYPES = {
    "u2": ("unsigned short", "h"),
    "i2": ("short", "h"),
    "u4": ("unsigned", "r"),
    "i4": ("int", "r"),
    "u8": ("unsigned long long", "l"),
    "i8": ("long long", "l"),
    "f4": ("float", "f"),
    "f8": ("double", "d"),
}


@pytest.fixture
def apply(run: Run) -> Callable[..., Any]:
    """apply("add.s32 %0, %1, %2;", np.int32, a, b): one PTX instruction on the elements of arrays.

    16-bit floats travel as uint16 or, two to an element, as uint32.
    """

    def execute(code: str, result: Any, *arrays: Any, arch: str = "compute_80") -> Any:
        out = np.zeros(len(arrays[0]), result)
        types = [_C_TYPES[np.dtype(array.dtype).str[1:]] for array in (out, *arrays)]
        names = "abcd"[: len(arrays)]
        parameters = ", ".join(f"const {kind}* {name}" for (kind, _), name in zip(types[1:], names, strict=True))
        inputs = ", ".join(f'"{letter}"({name}[i])' for (_, letter), name in zip(types[1:], names, strict=True))
        source = f"""
        extern "C" __global__ void k({types[0][0]}* out, {parameters}, int n) {{
          int i = blockIdx.x * blockDim.x + threadIdx.x;
          if (i >= n) return;
          {types[0][0]} r;
          asm volatile("{code}" : "={types[0][1]}"(r) : {inputs});
          out[i] = r;
        }}"""
        run(source, -(-len(out) // 96), 96, out, *arrays, len(out), undefined=(out,), arch=arch)
        return out

    return execute
