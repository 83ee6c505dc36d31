"""What the compiler makes of the kernels, without a GPU: registers, spills, occupancy, instructions."""

from kvcupy.inspect.machine_code import DISASSEMBLER, Code, Disassembler, compile_all, compile_code
from kvcupy.inspect.matrix import Inspected, Shape, inspected, random_shapes, shapes
from kvcupy.inspect.occupancy import ARCHITECTURES, Multiprocessor

__all__ = [
    "ARCHITECTURES",
    "DISASSEMBLER",
    "Code",
    "Disassembler",
    "Inspected",
    "Multiprocessor",
    "Shape",
    "compile_all",
    "compile_code",
    "inspected",
    "random_shapes",
    "shapes",
]
