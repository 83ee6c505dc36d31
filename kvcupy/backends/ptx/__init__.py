"""Runs CUDA kernels without a GPU, and checks them: an interpreter of the PTX that NVRTC emits.

The way of a kernel: `nvrtc` compiles CUDA C++ to PTX text. `parse` takes the text apart into instructions.
`assemble` turns each into a closure over NumPy arrays, `program` puts them together. What they do is said by
family: `integer`, `floating` (with `rounding`), `bitwise` and `convert` for values, `access`, `atomics` and
`async_copy` for memory, `warp` and `tensor` for lanes that work together; `opcodes` is the index. `execute` runs a
program over chunks of thread blocks, whose state is in `chunk`: a register is one array with a lane per thread.
`memory` holds the bytes, and marks on those without a value; `checks` finds races; `traffic` counts sectors and
bank conflicts; `report` is what comes out, a `Report` or a `KernelFault`.

    module = Module.compile(source)
    report = launch(module["axpy"], grid=4, block=128, args=[y.ctypes.data, x.ctypes.data, 2.0, 500],
                    buffers=[Buffer.of(y), Buffer.of(x, writable=False)])

Nothing here says anything about time.
"""

from kvcupy.backends.ptx.execute import Kernel, Module, launch
from kvcupy.backends.ptx.memory import Buffer, SparseBuffer
from kvcupy.backends.ptx.nvrtc import CompileError, compile_cubin, compile_ptx
from kvcupy.backends.ptx.report import Counts, KernelFault, Report, UnknownInstruction

__all__ = [
    "Buffer",
    "CompileError",
    "Counts",
    "Kernel",
    "KernelFault",
    "Module",
    "Report",
    "SparseBuffer",
    "UnknownInstruction",
    "compile_cubin",
    "compile_ptx",
    "launch",
]
