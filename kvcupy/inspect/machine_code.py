"""From a variant to machine code, and what that says: ptxas's figures, and the instructions themselves.

NVRTC compiles, so no driver and no GPU is needed; `nvdisasm`, where its package is installed, lists instructions.
"""

from __future__ import annotations

import multiprocessing
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from kvcupy.backends.ptx.nvrtc import CompileError, compile_cubin
from kvcupy.backends.source import Variant

__all__ = ["DISASSEMBLER", "Code", "Disassembler", "compile_all", "compile_code", "parse_log", "parse_sass"]

DISASSEMBLER = "nvidia-cuda-nvdisasm"
"""The package that lists instructions. It knows sm_75 and up."""

_FUNCTION = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_SECTION = re.compile(r"\s*\.section\s+\.text\.(\w+)")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_LOADS = {"LD", "LDG", "LDGSTS"}
_LOAD_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_LOAD_BYTES_PLAIN = 4


@dataclass(frozen=True)
class Code:
    """What one kernel of a variant takes on one architecture.

    registers: of a thread. spill_bytes: of a thread, stored to and loaded from local memory, added up.
    shared_bytes: of a block, static.
    instructions: SASS instructions of the whole kernel, without the padding at its end.
    widest_load_bytes: the widest load from global memory. Both None where nothing lists instructions.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    instructions: int | None = None
    widest_load_bytes: int | None = None


def parse_log(log: str) -> dict[str, Code]:
    """The kernels in what `ptxas -v` prints."""
    _, *parts = _FUNCTION.split(log)
    codes = {}
    for kernel, text in zip(parts[::2], parts[1::2], strict=True):
        registers, spills, shared = _REGISTERS.search(text), _SPILLS.search(text), _SHARED.search(text)
        if registers is None or spills is None:
            raise CompileError(f"ptxas says nothing of the registers of {kernel}: {text.strip()}")
        codes[kernel] = Code(
            registers=int(registers[1]),
            spill_bytes=int(spills[1]) + int(spills[2]),
            shared_bytes=int(shared[1]) if shared else 0,
        )
    return codes


def parse_sass(listing: str) -> dict[str, tuple[int, int]]:
    """Instructions and widest load in bytes (0: it loads nothing) of each kernel in what `nvdisasm -c` prints."""
    kernels: dict[str, tuple[int, int]] = {}
    kernel = ""
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            kernel = section[1]
            kernels[kernel] = 0, 0
        elif instruction := _INSTRUCTION.match(line):
            name, *modifiers = instruction[1].split(".")
            count, widest = kernels[kernel]
            if name in _LOADS:
                widths = [_LOAD_BYTES[each] for each in modifiers if each in _LOAD_BYTES]
                widest = max(widest, *widths or [_LOAD_BYTES_PLAIN])
            kernels[kernel] = count + (name != "NOP"), widest
    return kernels


@dataclass(frozen=True)
class Disassembler:
    """The program `nvdisasm`."""

    path: str

    @classmethod
    def find(cls) -> Disassembler | None:
        """The one of the package, or else of an installed toolkit; None where there is neither."""
        try:
            files = metadata.files(DISASSEMBLER) or []
        except metadata.PackageNotFoundError:
            files = []
        path = next((str(file.locate()) for file in files if file.stem == "nvdisasm"), shutil.which("nvdisasm"))
        return cls(path) if path else None

    def list(self, cubin: bytes) -> str:
        """The instructions of a cubin, kernel by kernel."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "kernel.cubin")
            file.write_bytes(cubin)
            run = subprocess.run([self.path, "-c", str(file)], capture_output=True, text=True)
        if run.returncode:
            raise CompileError(f"nvdisasm: {run.stderr.strip() or run.returncode}")
        return run.stdout


def compile_code(variant: Variant, arch: str, disassembler: Disassembler | None = None) -> dict[str, Code]:
    """The kernels of a variant on an architecture such as "sm_80".

    Raises CompileError with the compiler's log, and DeviceUnavailable where the compiler's package is missing.
    """
    cubin, log = compile_cubin(variant.source(), arch)
    codes = parse_log(log)
    if disassembler is None or arch == "sm_70":
        return codes
    sass = parse_sass(disassembler.list(cubin))
    return {
        kernel: Code(code.registers, code.spill_bytes, code.shared_bytes, *sass[kernel])
        for kernel, code in codes.items()
    }


def compile_all(
    jobs: Iterable[tuple[Variant, str]], disassembler: Disassembler | None = None
) -> Iterator[dict[str, Code]]:
    """`compile_code` of each (variant, architecture), in order, on all cores.

    In processes of their own, since NVRTC compiles one source at a time in a process.
    """
    variants, archs = zip(*jobs, strict=True)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(partial(compile_code, disassembler=disassembler), variants, archs)
