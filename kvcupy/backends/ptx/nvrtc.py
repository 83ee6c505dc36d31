"""NVRTC, NVIDIA's run-time compiler, bound by ctypes from its pip wheel. It needs no driver and no GPU.

The wheels come in two layouts: `nvidia/cuda_nvrtc/lib` and `nvidia/cuda_runtime/include` (CUDA 12), and
`nvidia/cu13/{lib,include}` (CUDA 13). PTX is kept in memory, so that one source is compiled once a process.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from kvcupy.errors import DeviceUnavailable, KVCupyError

__all__ = ["CompileError", "architectures", "compile_cubin", "compile_ptx", "include_folder", "version"]

SOURCE_NAME = "kernel.cu"
"""What the compiler calls a source before its first #line."""


class CompileError(KVCupyError):
    """NVRTC refused a source. The message is its log."""


def _nvidia_folders() -> list[Path]:
    spec = find_spec("nvidia")
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


def _first(patterns: Sequence[str], package: str) -> Path:
    for folder in _nvidia_folders():
        for pattern in patterns:
            for path in sorted(folder.glob(pattern)):
                return path
    raise DeviceUnavailable(f"device ptx needs the package {package}, which is not installed")


@cache
def include_folder() -> Path:
    """The folder that holds cuda_fp16.h."""
    headers = ("cuda_runtime/include/cuda_fp16.h", "cu1[0-9]/include/cuda_fp16.h")
    return _first(headers, "nvidia-cuda-runtime-cu12").parent


@cache
def _library() -> ctypes.CDLL:
    if sys.platform == "win32":
        patterns = ("cuda_nvrtc/bin/nvrtc64_*[0-9]_0.dll", "cu1[0-9]/bin/**/nvrtc64_*[0-9]_0.dll")
    else:
        patterns = ("cuda_nvrtc/lib/libnvrtc.so.*", "cu1[0-9]/lib/libnvrtc.so.*")
    library = ctypes.CDLL(str(_first(patterns, "nvidia-cuda-nvrtc-cu12")))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def version() -> str:
    """The compiler's version, such as "12.9". Raises DeviceUnavailable where its wheel is missing."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def architectures() -> list[str]:
    """What this compiler makes machine code for, such as "sm_80". Raises as `version` does."""
    count = ctypes.c_int()
    _library().nvrtcGetNumSupportedArchs(ctypes.byref(count))
    numbers = (ctypes.c_int * count.value)()
    _library().nvrtcGetSupportedArchs(numbers)
    return [f"sm_{number}" for number in numbers]


class _Program:
    """One source in the compiler's hands, for as long as the `with` lasts."""

    def __init__(self, source: str) -> None:
        self._library = _library()
        self._handle = ctypes.c_void_p()
        self._call("CreateProgram", ctypes.byref(self._handle), source.encode(), SOURCE_NAME.encode(), 0, None, None)

    def __enter__(self) -> _Program:
        return self

    def __exit__(self, *exception: object) -> None:
        self._call("DestroyProgram", ctypes.byref(self._handle))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, f"nvrtc{name}")(*arguments)
        if status:
            raise CompileError(f"nvrtc{name}: {self._library.nvrtcGetErrorString(status).decode()}")

    def compile(self, options: Sequence[str]) -> str:
        """The compiler's log."""
        array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        status = self._library.nvrtcCompileProgram(self._handle, len(options), array)
        log = self.read("ProgramLog").rstrip(b"\0").decode(errors="replace")
        if status:
            raise CompileError(log.strip() or self._library.nvrtcGetErrorString(status).decode())
        return log

    def read(self, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", self._handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", self._handle, buffer)
        return buffer.raw


def _options(arch: str, options: Sequence[str]) -> list[str]:
    return [f"--gpu-architecture={arch}", "--std=c++17", "-lineinfo", f"-I{include_folder()}", *options]


@cache
def _compile_ptx(source: str, arch: str, options: tuple[str, ...]) -> str:
    with _Program(source) as program:
        program.compile(_options(arch, options))
        return program.read("PTX").rstrip(b"\0").decode()


def compile_ptx(source: str, arch: str = "compute_80", options: Sequence[str] = ()) -> str:
    """PTX of a CUDA C++ source, with line information.

    Raises CompileError with the compiler's log, and DeviceUnavailable where a wheel is missing.
    """
    return _compile_ptx(source, arch, tuple(options))


def compile_cubin(source: str, arch: str = "sm_80", options: Sequence[str] = ()) -> tuple[bytes, str]:
    """Machine code of a source, and the log, in which ptxas says registers, spills and shared memory per kernel.

    Nothing is kept: it is large, and nobody asks twice. Raises as `compile_ptx` does.
    """
    with _Program(source) as program:
        log = program.compile(_options(arch, ("--ptxas-options=-v", *options)))
        return program.read("CUBIN"), log
