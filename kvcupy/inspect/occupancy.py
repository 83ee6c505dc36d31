"""Occupancy: the share of a multiprocessor's warp slots that one kernel can fill.

The limits are those of the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; the
arithmetic, its granularities and the reserved shared memory are those of `cuda_occupancy.h` in the CUDA runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["ARCHITECTURES", "Multiprocessor"]

_REGISTERS = 65536
_REGISTERS_PER_ALLOCATION = 256  # for a warp
_PARTITIONS = 4  # each with its own quarter of the registers


@dataclass(frozen=True)
class Multiprocessor:
    """What the thread blocks that live on one multiprocessor share.

    warps, blocks: how many it holds at most.
    shared_bytes: shared memory for all blocks; reserved_bytes: what each block takes of it for the system.
    shared_step: each block's shared memory is rounded up to a multiple of this, in bytes.
    """

    warps: int
    blocks: int
    shared_bytes: int
    reserved_bytes: int
    shared_step: int

    def resident_blocks(self, registers: int, shared_bytes: int, threads: int) -> int:
        """Blocks that it holds at once, of `threads` threads with `registers` each and shared_bytes per block.

        >>> ARCHITECTURES["sm_70"].resident_blocks(37, 0, 320)
        4
        """
        warps = _ceil_div(threads, 32)
        warp_registers = _round_up(32 * registers, _REGISTERS_PER_ALLOCATION)
        register_warps = _REGISTERS // _PARTITIONS // warp_registers * _PARTITIONS
        block_shared = _round_up(shared_bytes + self.reserved_bytes, self.shared_step)
        limits = [self.blocks, self.warps // warps, register_warps // warps]
        if block_shared:
            limits.append(self.shared_bytes // block_shared)
        return min(limits)

    def occupancy(self, registers: int, shared_bytes: int, threads: int) -> float:
        """Resident warps over the most there can be, 0 to 1.

        37 registers in blocks of 320 threads on compute capability 7.0: 4 blocks of 10 warps, of 64.

        >>> ARCHITECTURES["sm_70"].occupancy(37, 0, 320)
        0.625
        """
        return self.resident_blocks(registers, shared_bytes, threads) * _ceil_div(threads, 32) / self.warps


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return _ceil_div(a, b) * b


def _with(warps: int, blocks: int, shared_kib: int, reserved_bytes: int, shared_step: int) -> Multiprocessor:
    return Multiprocessor(warps, blocks, shared_kib << 10, reserved_bytes, shared_step)


# Columns: warps, blocks, shared memory in KiB, reserved bytes of each block, step of shared memory.
ARCHITECTURES: Mapping[str, Multiprocessor] = MappingProxyType(
    {
        "sm_70": _with(64, 32, 96, 0, 256),
        "sm_75": _with(32, 16, 64, 0, 256),
        "sm_80": _with(64, 32, 164, 1024, 128),
        "sm_86": _with(48, 16, 100, 1024, 128),
        "sm_89": _with(48, 24, 100, 1024, 128),
        "sm_90": _with(64, 32, 228, 1024, 128),
        "sm_100": _with(64, 32, 228, 1024, 128),
        "sm_120": _with(48, 24, 100, 1024, 128),
    }
)
"""The architectures that the kernels are compiled for, and one multiprocessor of each."""
