"""What a launch has to say: the fault that ended it, or what it counted."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from kvcupy.backends.ptx.parse import Line
from kvcupy.errors import KVCupyError

__all__ = ["Counts", "KernelFault", "Report", "UnknownInstruction"]


class UnknownInstruction(KVCupyError):
    """The interpreter cannot execute an instruction of the kernel. The message names it and its source line."""

    def __init__(self, kernel: str, line: Line, text: str) -> None:
        super().__init__(f"{line}: {kernel}: unknown instruction: {text}")
        self.line = line


class KernelFault(KVCupyError):
    """A kernel did what it must not.

    kind: a word or two, such as "shared race". line: where in the CUDA source. block and thread: who, in x, y, z.
    """

    def __init__(
        self,
        kind: str,
        detail: str,
        *,
        kernel: str,
        line: Line,
        block: tuple[int, int, int],
        thread: tuple[int, int, int],
        instruction: str = "",
    ) -> None:
        super().__init__(f"{line}: {kernel}: block {block}, thread {thread}: {kind}: {detail}\n    {instruction}")
        self.kind = kind
        self.detail = detail
        self.kernel = kernel
        self.line = line
        self.block = block
        self.thread = thread


@dataclass
class Counts:
    """What the warps of a launch did. A request is one instruction of one warp.

    instructions: warp instructions issued. useful_bytes: distinct bytes that requests to global memory asked for.
    sectors, lines: distinct 32-byte sectors and 128-byte lines they touched. minimum_sectors: the fewest that could
    hold those bytes. bank_conflicts: extra passes through shared memory beyond those that the width needs.
    """

    instructions: int = 0
    global_loads: int = 0
    global_stores: int = 0
    sectors: int = 0
    lines: int = 0
    useful_bytes: int = 0
    minimum_sectors: int = 0
    shared_requests: int = 0
    bank_conflicts: int = 0

    def add(self, other: Counts) -> None:
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_NAMES = tuple(each.name for each in fields(Counts))


@dataclass(frozen=True)
class Report:
    """What a launch counted. rows: one per executed instruction, with its source line and its class of opcode.

    watched: the requests to the part of global memory that was watched.
    """

    kernel: str
    rows: list[tuple[Line, str, Counts]]
    watched: Counts

    @cached_property
    def total(self) -> Counts:
        total = Counts()
        for _, _, counts in self.rows:
            total.add(counts)
        return total

    @cached_property
    def lines(self) -> dict[Line, Counts]:
        """Per line of the CUDA source."""
        lines: dict[Line, Counts] = {}
        for line, _, counts in self.rows:
            lines.setdefault(line, Counts()).add(counts)
        return lines

    @cached_property
    def classes(self) -> dict[str, int]:
        """Warp instructions per class of opcode: "f32", "global", "tensor", ..."""
        classes: dict[str, int] = {}
        for _, kind, counts in self.rows:
            classes[kind] = classes.get(kind, 0) + counts.instructions
        return classes
