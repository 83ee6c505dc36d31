"""What a launch has to say: the fault that ended it, or what it counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

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
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass
class Report:
    """Counts of a launch, in all, per source line, and warp instructions per class of opcode."""

    kernel: str
    total: Counts = field(default_factory=Counts)
    lines: dict[Line, Counts] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, kernel: str, instructions: Iterable[tuple[Line, str, Counts]]) -> Report:
        """Sum over the instructions of a kernel, each with its line, its class and its counts."""
        report = cls(kernel)
        for line, kind, counts in instructions:
            if counts.instructions:
                report.total.add(counts)
                report.lines.setdefault(line, Counts()).add(counts)
                report.classes[kind] = report.classes.get(kind, 0) + counts.instructions
        return report
