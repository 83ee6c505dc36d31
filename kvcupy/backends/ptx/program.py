"""A kernel as a program: its instructions assembled one by one, its variables laid out, and what they all need.

Registers that some path reads before it writes them are found here once, so that no lane has to remember at run time
which of its registers were ever written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcupy.backends.ptx.assemble import Assembler, Op, Read, Unsupported
from kvcupy.backends.ptx.opcodes import build
from kvcupy.backends.ptx.parse import Instruction, Kernel, Reg, Variable
from kvcupy.backends.ptx.report import UnknownInstruction
from kvcupy.backends.ptx.types import DType

__all__ = ["Program", "assemble"]


@dataclass
class Program:
    """A kernel ready to run."""

    name: str
    kernel: Kernel
    ops: list[Op]
    slots: list[tuple[tuple[int, int] | str, DType]]
    shared_bytes: int
    local_bytes: int
    param_bytes: int
    unassigned: list[Reg]
    """Registers that some path reads before it writes them."""


def assemble(kernel: Kernel, symbols: dict[str, int]) -> Program:
    """Raises UnknownInstruction."""
    symbols = dict(symbols)
    shared_bytes = _lay_out([each for each in kernel.variables if each.space == "shared"], symbols)
    shared_bytes = -(-shared_bytes // 16) * 16
    local_bytes = _lay_out([each for each in kernel.variables if each.space == "local"], symbols)
    symbols.update(dict.fromkeys(kernel.dynamic_shared, shared_bytes))
    symbols.update({param.name: param.offset for param in kernel.params})
    assembler = Assembler(kernel, symbols)
    for instruction in kernel.instructions:
        if instruction.parts[0] == "call":  # named first: the instructions around it make no sense without it
            raise UnknownInstruction(kernel.name, instruction.line, instruction.text)
    ops = []
    for assembler.position, instruction in enumerate(kernel.instructions):
        assembler.reads, assembler.writes = set(), set()
        try:
            op = build(assembler, instruction)
            if instruction.guard is not None:
                op.guard = _guard(assembler, instruction)
                op.guard_marks = assembler.read_marks(instruction.guard.predicate, "pred")
        except (Unsupported, KeyError, IndexError, ValueError):
            raise UnknownInstruction(kernel.name, instruction.line, instruction.text) from None
        op.reads, op.writes = frozenset(assembler.reads), frozenset(assembler.writes)
        ops.append(op)
    last = max(kernel.params, key=lambda param: param.offset, default=None)
    return Program(
        name=kernel.name,
        kernel=kernel,
        ops=ops,
        slots=assembler.slots,
        shared_bytes=shared_bytes,
        local_bytes=local_bytes,
        param_bytes=last.offset + last.nbytes if last else 0,
        unassigned=_unassigned(kernel, ops),
    )


def _guard(assembler: Assembler, instruction: Instruction) -> Read:
    guard = instruction.guard
    assert guard is not None
    read = assembler.read(guard.predicate, "pred")
    return (lambda chunk, lanes: ~read(chunk, lanes)) if guard.negated else read


def _lay_out(variables: Sequence[Variable], symbols: dict[str, int]) -> int:
    offset = 0
    for variable in variables:
        offset = -(-offset // variable.align) * variable.align
        symbols[variable.name] = offset
        offset += variable.nbytes
    return offset


def _unassigned(kernel: Kernel, ops: Sequence[Op]) -> list[Reg]:
    """Registers that may be read before they are written, found by going over all paths: sets are bits of an int."""
    everything = (1 << len(kernel.registers)) - 1
    assigned = [everything] * (len(ops) + 1)
    pending = [0] if ops else []
    if ops:
        assigned[0] = 0
    missing = 0
    while pending:
        at = pending.pop()
        op = ops[at]
        before = assigned[at]
        missing |= _bits(op.reads) & ~before
        after = before if op.guard else before | _bits(op.writes)
        successors = [] if op.kind == "exit" and not op.guard else [at + 1]
        if op.kind == "branch":
            successors = [op.target] if not op.guard else [at + 1, op.target]
        for successor in successors:
            met = assigned[successor] & after
            if successor < len(ops) and met != assigned[successor]:
                assigned[successor] = met
                pending.append(successor)
    return [register for register in kernel.registers if missing >> register.index & 1]


def _bits(indices: frozenset[int]) -> int:
    return sum(1 << index for index in indices)
