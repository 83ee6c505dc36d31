"""The state of a chunk: a number of thread blocks that run together, one lane per thread.

A register is one array with an element per lane. Blocks are padded to whole warps; lanes that stand for no thread
count as exited from the start. `Lanes` is a set of lanes that execute one instruction together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvcupy.backends.ptx.checks import BlockOrder, GlobalRaces, SharedRaces
from kvcupy.backends.ptx.memory import Buffer, Bytes, GlobalMemory
from kvcupy.backends.ptx.parse import Instruction
from kvcupy.backends.ptx.report import Counts, KernelFault
from kvcupy.backends.ptx.types import Array, DType, storage_of

if TYPE_CHECKING:
    from kvcupy.backends.ptx.program import Program

__all__ = ["Chunk", "Copy", "Lanes", "Launch"]

Dim3 = tuple[int, int, int]


class Lanes:
    """Lanes of a chunk in ascending order. index selects them from a register, as a slice where that is possible."""

    __slots__ = ("_warp_ids", "count", "ids", "index")

    def __init__(self, ids: Array, full: int = -1) -> None:
        self.ids = ids
        self.count = len(ids)
        self._warp_ids: Array | None = None
        self.index: slice | Array
        if self.count == full:
            self.index = slice(None)
        elif self.count and int(ids[-1]) - int(ids[0]) + 1 == self.count:
            self.index = slice(int(ids[0]), int(ids[-1]) + 1)
        else:
            self.index = ids

    def select(self, chosen: Array) -> Lanes:
        return Lanes(self.ids[chosen])

    @property
    def warp_ids(self) -> Array:
        """The warps that have a lane here."""
        if self._warp_ids is None:
            warps = self.ids >> 5
            first = np.ones(self.count, bool)
            np.not_equal(warps[1:], warps[:-1], out=first[1:])
            self._warp_ids = warps[first]
        return self._warp_ids

    @property
    def warps(self) -> int:
        return len(self.warp_ids)


@dataclass
class Launch:
    """What all chunks of a launch share."""

    program: Program
    grid: Dim3
    block: Dim3
    params: Array
    dynamic_shared_bytes: int
    memory: GlobalMemory
    checks: bool
    counts: list[Counts]
    watch: tuple[int, int] | None
    watched: Counts
    order: BlockOrder = field(default_factory=BlockOrder)
    races: dict[int, GlobalRaces] = field(default_factory=dict)
    """Per buffer, by its address; empty where nothing can race."""

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    def races_of(self, buffer: Buffer) -> GlobalRaces | None:
        """None for what cannot race: memory that nobody may write, or a launch of one block."""
        if not (self.checks and buffer.writable and self.blocks > 1):
            return None
        if buffer.address not in self.races:
            self.races[buffer.address] = GlobalRaces(self.order, buffer.address)
        return self.races[buffer.address]


@dataclass
class Copy:
    """An asynchronous copy under way: per lane, where it goes, what arrives, and the group it belongs to."""

    ids: Array
    at: Array
    values: Array
    marks: Array | None
    groups: Array
    instruction: Instruction
    position: int

    def part(self, chosen: Array) -> Copy:
        marks = None if self.marks is None else self.marks[chosen]
        return Copy(
            self.ids[chosen],
            self.at[chosen],
            self.values[chosen],
            marks,
            self.groups[chosen],
            self.instruction,
            self.position,
        )


class Chunk:
    """Registers, shared and local memory of some blocks of a launch, and the marks on registers.

    marks: for each register with undefined bits in some lane, a mask per lane. Absent means all defined.
    """

    def __init__(self, launch: Launch, blocks: Array) -> None:
        program = launch.program
        self.launch = launch
        self.checks = launch.checks
        self.counts = launch.counts
        self.warps_per_block = -(-launch.threads // 32)
        self.lanes_per_block = 32 * self.warps_per_block
        self.size = self.lanes_per_block * len(blocks)
        ids = np.arange(self.size)
        self.slot_of = ids // self.lanes_per_block
        self.thread_of = ids % self.lanes_per_block
        self.block_of = blocks[self.slot_of]
        self.exists = self.thread_of < launch.threads

        self.shared_bytes = program.shared_bytes + launch.dynamic_shared_bytes
        self.shared_stride = -(-self.shared_bytes // 16) * 16
        self.shared = Bytes.blank(self.shared_stride * len(blocks), defined=not self.checks)
        self.shared_start = self.slot_of * self.shared_stride
        self.shared_races = SharedRaces(self.shared_stride * len(blocks), self.size) if self.checks else None
        self.local_stride = -(-program.local_bytes // 16) * 16
        self.local = Bytes.blank(self.local_stride * self.size, defined=not self.checks)

        self.copies: list[Copy] = []
        self.copy_group = np.zeros(self.size, np.int64)
        self.in_flight = Bytes.blank(self.shared.data.size // 4, defined=True)

        self._registers: dict[int, Array] = {}
        self.views = [self._view(source, dtype) for source, dtype in program.slots]
        self.marks: dict[int, Array] = {}
        if self.checks:
            for register in program.unassigned:
                storage = storage_of(register.bits)
                whole = True if register.bits == 1 else (1 << register.bits) - 1
                self.marks[register.index] = np.full(self.size, whole, storage)

    def _view(self, source: tuple[int, int] | str, dtype: DType) -> Array:
        if isinstance(source, str):
            return self._special(source).astype(dtype)
        index, bits = source
        if index not in self._registers:
            self._registers[index] = np.zeros(self.size, storage_of(bits))
        register = self._registers[index]
        if dtype.itemsize == register.itemsize:
            return register.view(dtype)
        return register.view(dtype)[:: register.itemsize // dtype.itemsize]

    def _special(self, name: str) -> Array:
        launch = self.launch
        lane = np.arange(self.size) & 31
        stem, _, axis = name.partition(".")
        if axis:
            at = "xyz".index(axis)
            sizes = launch.block if stem in ("%tid", "%ntid") else launch.grid
            if stem in ("%ntid", "%nctaid"):
                return np.full(self.size, sizes[at])
            linear = self.thread_of if stem == "%tid" else self.block_of
            return linear // int(np.prod(sizes[:at], dtype=np.int64)) % sizes[at]
        constants = {
            "%nwarpid": self.warps_per_block,
            "%nsmid": 1,
            "%smid": 0,
            "%gridid": 0,
            "WARP_SZ": 32,
            "%dynamic_smem_size": launch.dynamic_shared_bytes,
            "%total_smem_size": self.shared_bytes,
        }
        if name in constants:
            return np.full(self.size, constants[name])
        below = (1 << lane) - 1
        every = (1 << 32) - 1
        return {
            "%laneid": lane,
            "%warpid": self.thread_of >> 5,
            "%lanemask_eq": 1 << lane,
            "%lanemask_lt": below,
            "%lanemask_le": below | (1 << lane),
            "%lanemask_gt": every & ~(below | (1 << lane)),
            "%lanemask_ge": every & ~below,
        }[name]

    def fault(self, instruction: Instruction, lane: int, kind: str, detail: str) -> KernelFault:
        launch = self.launch
        return KernelFault(
            kind,
            detail,
            kernel=launch.program.name,
            line=instruction.line,
            block=_unravel(int(self.block_of[lane]), launch.grid),
            thread=_unravel(int(self.thread_of[lane]), launch.block),
            instruction=instruction.text,
        )

    def thread_name(self, lane: int) -> str:
        return f"thread {_unravel(int(self.thread_of[lane]), self.launch.block)}"

    def block_name(self, block: int) -> str:
        return f"block {_unravel(block, self.launch.grid)}"


def _unravel(linear: int, sizes: Dim3) -> Dim3:
    return linear % sizes[0], linear // sizes[0] % sizes[1], linear // (sizes[0] * sizes[1])
