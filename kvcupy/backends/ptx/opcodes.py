"""Which module executes which instruction, and what class of work it counts as."""

from __future__ import annotations

import numpy as np

from kvcupy.backends.ptx import access, async_copy, atomics, bitwise, convert, floating, integer, tensor, warp
from kvcupy.backends.ptx.assemble import Assembler, Op, Read, Step, Unsupported, check_defined
from kvcupy.backends.ptx.chunk import Chunk, Lanes
from kvcupy.backends.ptx.parse import Imm, Instruction, Sym
from kvcupy.backends.ptx.types import Array
from kvcupy.backends.ptx.warp import bits_per_warp

__all__ = ["build"]

_STEPS = {**access.BUILD, **atomics.BUILD, **async_copy.BUILD, **warp.BUILD, **tensor.BUILD}
_VALUES = {**bitwise.BUILD, **convert.BUILD, **integer.BUILD}
_NOTHING = frozenset(["prefetch", "prefetchu", "applypriority", "discard", "nanosleep", "griddepcontrol"])
_WARP = frozenset(["shfl", "vote", "redux", "match", "activemask"])


def _is_float(ins: Instruction) -> bool:
    kind = ins.parts[-1]
    return ins.parts[0] in floating.BUILD and (kind[0] == "f" or kind.startswith("bf"))


def _category(ins: Instruction) -> str:
    """The class an instruction counts as."""
    base = ins.parts[0]
    if base in ("ld", "ldu", "st", "atom", "red"):
        return ins.one_of("global", "shared", "local", "const", "param") or "generic"
    if base in ("cp", "ldmatrix", "mma"):
        return {"cp": "async copy", "ldmatrix": "shared", "mma": "tensor"}[base]
    if base in _WARP:
        return "warp"
    if base in ("bra", "ret", "exit", "bar", "barrier"):
        return "control"
    if base in ("mov", "cvta", "selp", "setp", "set"):
        return "move" if base in ("mov", "cvta", "selp") else "compare"
    if base == "cvt":
        return "convert"
    if _is_float(ins):
        return ins.parts[-1]
    return "integer"


def build(assembler: Assembler, ins: Instruction) -> Op:
    """Raises Unsupported, or what taking a wrong operand apart raises."""
    base = ins.parts[0]
    op = Op(ins, _category(ins))
    if base == "bra":
        (label,) = ins.operands
        assert isinstance(label, Sym)
        op.kind, op.target = "branch", assembler.kernel.labels[label.name]
    elif base in ("ret", "exit"):
        op.kind = "exit"
    elif base == "bar" and ins.has("warp"):
        op.kind, op.run, op.members = "sync", _sync_warp, assembler.read(ins.operands[0], "b32")
    elif base in ("bar", "barrier"):
        _barrier(assembler, ins, op)
    elif base in ("membar", "fence"):
        op.run = _fence(assembler, ins)
    elif base in _NOTHING:
        op.run = _nothing
    elif base == "trap":
        op.run = _trap(ins)
    elif base in _STEPS:
        op.run = _STEPS[base](assembler, ins)
        if ins.has("sync"):
            op.kind, op.members = "sync", _members(assembler, ins)
    elif _is_float(ins):
        op.run = assembler.value(floating.BUILD[base](ins))
    elif base in _VALUES:
        op.run = assembler.value(_VALUES[base](ins))
    else:
        raise Unsupported
    return op


def _members(assembler: Assembler, ins: Instruction) -> Read:
    """The lanes a warp instruction needs: its last operand, or, for tensor cores, all of them."""
    everyone = Imm(0xFFFFFFFF)
    return assembler.read(everyone if ins.has("aligned") else ins.operands[-1], "b32")


def _nothing(chunk: Chunk, lanes: Lanes) -> None:
    """Hints to caches and schedulers."""


def _fence(assembler: Assembler, ins: Instruction) -> Step:
    """All threads here see one memory; but whether a block passed a fence decides what its atomics order."""
    if not ins.has("gl", "gpu", "sys"):
        return _nothing
    position = assembler.position
    return lambda chunk, lanes: chunk.launch.order.fence(chunk.block_of[lanes.ids], position)


def _trap(ins: Instruction) -> Step:
    def step(chunk: Chunk, lanes: Lanes) -> None:
        raise chunk.fault(ins, int(lanes.ids[0]), "trap", "the kernel gave up")

    return step


def _sync_warp(chunk: Chunk, lanes: Lanes) -> None:
    if chunk.shared_races is not None:
        chunk.shared_races.sync_warp(lanes.ids)


def _barrier(assembler: Assembler, ins: Instruction, op: Op) -> None:
    """bar.sync and bar.red. A reduction happens when the barrier lets its lanes go."""
    operands = list(ins.operands)
    if ins.has("arrive") or not operands:
        raise Unsupported
    op.kind = "barrier"
    if not ins.has("red"):
        number, *count = operands
        op.barrier = assembler.read(number, "u32"), assembler.read(count[0], "u32") if count else None
        return
    destination, number, *count, predicate = operands
    op.barrier = assembler.read(number, "u32"), assembler.read(count[0], "u32") if count else None
    mode = ins.one_of("popc", "and", "or")
    read, read_marks = assembler.read(predicate, "pred"), assembler.read_marks(predicate, "pred")
    write = assembler.write(destination, ins.parts[-1])
    clear = assembler.write_marks(destination, ins.parts[-1])

    def reduce(chunk: Chunk, lanes: Lanes) -> None:
        check_defined(chunk, lanes, read_marks(chunk, lanes), ins, "as a condition")
        blocks = chunk.slot_of[lanes.ids]
        yes, here = (_per_block(chunk, lanes, truth) for truth in (read(chunk, lanes), True))
        result = {"popc": yes, "and": yes == here, "or": yes != 0}[mode or ""]
        write(chunk, lanes, result[blocks])
        clear(chunk, lanes, None)

    op.run = reduce


def _per_block(chunk: Chunk, lanes: Lanes, truth: Array | bool) -> Array:
    """How many lanes of each block say yes."""
    per_warp = np.bitwise_count(bits_per_warp(chunk, lanes, truth)).astype(np.int64)
    counts: Array = per_warp.reshape(-1, chunk.warps_per_block).sum(axis=1)
    return counts
