"""Running a kernel: launches, chunks, and which lanes go next.

A chunk of blocks runs in one thread of Python. Always the lanes with the lowest instruction number go on together;
since a branch joins again further down, that brings diverged lanes back together by itself. A lane stops at a
barrier until its block is there, and at a warp instruction until the lanes that its mask names are there.

With a seed, blocks come in random order, and in each block one warp at a time runs, until it is stopped or, half of
the time, for a random number of instructions. Checks do not depend on that order, but a wrong result may.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvcupy.backends.ptx.assemble import Op, check_defined
from kvcupy.backends.ptx.chunk import Chunk, Lanes, Launch
from kvcupy.backends.ptx.memory import Buffer, GlobalMemory
from kvcupy.backends.ptx.nvrtc import compile_ptx
from kvcupy.backends.ptx.parse import Param, parse
from kvcupy.backends.ptx.program import Program, assemble
from kvcupy.backends.ptx.report import Counts, Report
from kvcupy.backends.ptx.types import Array, dtype_of, width_of
from kvcupy.backends.ptx.warp import bits_per_warp

__all__ = ["Kernel", "Module", "launch"]

LANES = 1 << 15
"""Threads that run together: enough to make NumPy worth its calls, few enough to stay in the cache."""

MAX_THREADS = 1024

_IDLE = 1 << 40
_EVERYONE = np.uint32(0xFFFFFFFF)


class Module:
    """The kernels of one PTX module, and its global and constant variables."""

    def __init__(self, ptx: str) -> None:
        parsed = parse(ptx)
        self._kernels = parsed.kernels
        self._loaded: dict[str, Kernel] = {}
        self.buffers: list[Buffer] = []
        self._keep: list[Array] = []
        self._symbols: dict[str, int] = {}
        for variable in parsed.variables:
            data = np.zeros(variable.nbytes + 32, np.uint8)
            start = -data.ctypes.data % max(16, variable.align)
            if variable.data is not None:
                data[start : start + variable.nbytes] = np.frombuffer(variable.data, np.uint8)
            address = data.ctypes.data + start
            self._keep.append(data)
            self._symbols[variable.name] = address
            self.buffers.append(Buffer(address, variable.nbytes, variable.space == "global", name=variable.name))

    @classmethod
    def compile(cls, source: str, arch: str = "compute_80", options: Sequence[str] = ()) -> Module:
        """The kernels (extern "C") of a CUDA C++ source. Raises as `compile_ptx` does."""
        return cls(compile_ptx(source, arch, options))

    @property
    def names(self) -> list[str]:
        return list(self._kernels)

    def __getitem__(self, name: str) -> Kernel:
        """Raises KeyError, and UnknownInstruction if the interpreter cannot run that kernel."""
        if name not in self._loaded:
            self._loaded[name] = Kernel(assemble(self._kernels[name], self._symbols), self.buffers)
        return self._loaded[name]


class Kernel:
    """One kernel, ready to be launched."""

    def __init__(self, program: Program, buffers: Sequence[Buffer] = ()) -> None:
        self.program = program
        self.name = program.name
        self.buffers = buffers
        """The variables of its module."""


def launch(
    kernel: Kernel,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    args: Sequence[Any],
    shared_bytes: int = 0,
    *,
    buffers: Iterable[Buffer] = (),
    seed: int | None = None,
    checks: bool = True,
    watch: tuple[int, int] | None = None,
) -> Report:
    """Run a kernel to its end.

    grid, block: one to three numbers. args: an int (an address, for a pointer), a float, or the bytes of a struct per
    parameter. shared_bytes: dynamic shared memory. buffers: all the global memory that the kernel may touch.
    seed: run warps in a random order. checks: without, only bounds and alignment are checked and nothing is counted.
    watch: first address and end of a part of global memory; what goes there is counted once more, apart.

    Raises KernelFault, with the line of the CUDA source, for whatever the kernel does wrong.
    """
    grid3, block3 = _three("grid", grid), _three("block", block)
    if np.prod(block3) > MAX_THREADS:
        raise ValueError(f"block must have at most {MAX_THREADS} threads, got {block3}")
    program = kernel.program
    state = Launch(
        program=program,
        grid=grid3,
        block=block3,
        params=_pack(program.kernel.params, args),
        dynamic_shared_bytes=shared_bytes,
        memory=GlobalMemory([*buffers, *kernel.buffers]),
        checks=checks,
        counts=[Counts() for _ in program.ops],
        watch=watch,
        watched=Counts(),
    )
    rng = None if seed is None else np.random.default_rng(seed)
    order = np.arange(state.blocks) if rng is None else rng.permutation(state.blocks)
    per_chunk = max(1, LANES // (-(-state.threads // 32) * 32))
    with np.errstate(all="ignore"):
        for start in range(0, state.blocks, per_chunk):
            _Scheduler(Chunk(state, order[start : start + per_chunk]), rng).run()
    executed = [(op, counts) for op, counts in zip(program.ops, state.counts, strict=True) if counts.instructions]
    rows = [(op.instruction.line, op.category, counts) for op, counts in executed]
    return Report(program.name, rows, state.watched)


def _three(name: str, sizes: int | tuple[int, ...]) -> tuple[int, int, int]:
    given = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    if not 1 <= len(given) <= 3 or any(size < 1 for size in given):
        raise ValueError(f"{name} must be one to three numbers of at least 1, got {sizes!r}")
    x, y, z = (*given, 1, 1)[:3]
    return int(x), int(y), int(z)


def _pack(params: Sequence[Param], args: Sequence[Any]) -> Array:
    if len(params) != len(args):
        raise TypeError(f"args must be {len(params)} values, got {len(args)}")
    end = max((param.offset + param.nbytes for param in params), default=0)
    packed = np.zeros(end + 16, np.uint8)
    for number, (param, arg) in enumerate(zip(params, args, strict=True)):
        data = _encode(number, param, arg)
        packed[param.offset : param.offset + param.nbytes] = np.frombuffer(data, np.uint8)
    return packed


def _encode(number: int, param: Param, arg: Any) -> bytes:
    if param.type == "bytes":
        data = bytes(arg) if isinstance(arg, bytes | bytearray | memoryview) else np.asarray(arg).tobytes()
        if len(data) != param.nbytes:
            raise TypeError(f"args[{number}] must be {param.nbytes} bytes, got {len(data)}")
        return data
    if param.type.lstrip("b")[0] == "f":
        return np.asarray(float(arg)).astype(dtype_of(param.type)).tobytes()
    if not isinstance(arg, int | np.integer | np.bool_):
        raise TypeError(f"args[{number}] must be an int, got {type(arg).__name__}")
    bits = width_of(param.type)
    if not -(1 << bits - 1) <= int(arg) < 1 << bits:
        raise ValueError(f"args[{number}] must fit in {bits} bits, got {arg}")
    return (int(arg) % (1 << bits)).to_bytes(bits // 8, "little")


class _Scheduler:
    """Advances the lanes of one chunk until all have exited.

    at: the next instruction of each lane. runnable: the same, or _IDLE for a lane that waits or has exited.
    """

    def __init__(self, chunk: Chunk, rng: np.random.Generator | None) -> None:
        self.chunk = chunk
        self.rng = rng
        self.ops = chunk.launch.program.ops
        self.at = np.zeros(chunk.size, np.int64)
        self.alive = chunk.exists.copy()
        self.living = int(self.alive.sum())
        self.runnable = np.where(self.alive, 0, _IDLE)
        self.in_barrier = np.zeros(chunk.size, bool)
        self.in_sync = np.zeros(chunk.size, bool)
        self.chosen = np.ones(chunk.size, bool)
        self.budget = _IDLE
        if rng is not None:
            self.chosen[:] = False

    def run(self) -> None:
        while self.living:
            candidates = self.runnable if self.rng is None else np.where(self.chosen, self.runnable, _IDLE)
            lowest = int(candidates.min())
            if lowest < _IDLE:
                here = candidates == lowest
                limit = int(np.where(here, _IDLE, candidates).min())
                self._advance(Lanes(np.flatnonzero(here), self.chunk.size), lowest, limit)
            elif self.rng is not None and (self.runnable < _IDLE).any():
                self._choose_warps(self.rng)
            elif not (self._retry_syncs() or self._release_barriers()):
                raise self._deadlock()

    def _choose_warps(self, rng: np.random.Generator) -> None:
        """In each block, one of the warps that can go on."""
        chunk = self.chunk
        ready = (self.runnable < _IDLE).reshape(-1, 32).any(axis=1).reshape(-1, chunk.warps_per_block)
        luck = np.where(ready, rng.random(ready.shape), -1.0)
        warp = luck.argmax(axis=1)
        chosen = np.zeros(ready.shape, bool)
        chosen[np.arange(len(warp)), warp] = True
        self.chosen = np.repeat(chosen.reshape(-1), 32)
        self.budget = int(rng.integers(1, 64)) if rng.random() < 0.5 else _IDLE

    def _park(self, lanes: Lanes, at: int) -> None:
        self.at[lanes.index] = at
        self.runnable[lanes.index] = at

    def _advance(self, lanes: Lanes, at: int, limit: int) -> None:
        """Run lanes from instruction `at` until they part, stop, or catch up with lanes further down at `limit`."""
        chunk, ops = self.chunk, self.ops
        counts = chunk.counts
        warps = lanes.warps
        stop = self.budget if self.rng is not None else _IDLE
        while True:
            op = ops[at]
            counts[at].instructions += warps
            if op.kind == "step":
                if op.guard is None:
                    assert op.run is not None
                    op.run(chunk, lanes)
                else:
                    self._guarded(op, lanes)
                at += 1
            elif op.kind == "branch":
                went = self._branch(op, lanes, at)
                if went is None:
                    return
                at = went
            elif op.kind == "exit":
                if self._exit(op, lanes, at):
                    return
                at += 1
            elif op.kind == "barrier":
                if not self._arrive(op, lanes, at):
                    return
                at += 1
            else:
                if not self._sync(op, lanes, at):
                    return
                at += 1
            stop -= 1
            if at >= limit:
                self._park(lanes, at)
                return
            if stop <= 0:
                self._park(lanes, at)
                self.chosen[:] = False
                return

    def _condition(self, op: Op, lanes: Lanes) -> Array:
        assert op.guard is not None and op.guard_marks is not None
        if self.chunk.marks:
            check_defined(self.chunk, lanes, op.guard_marks(self.chunk, lanes), op.instruction, "as a condition")
        return op.guard(self.chunk, lanes)

    def _guarded(self, op: Op, lanes: Lanes) -> None:
        condition = self._condition(op, lanes)
        assert op.run is not None
        if condition.all():
            op.run(self.chunk, lanes)
        elif condition.any():
            op.run(self.chunk, lanes.select(condition))

    def _branch(self, op: Op, lanes: Lanes, at: int) -> int | None:
        """Where all the lanes went, or None if they parted."""
        if op.guard is None:
            return op.target
        condition = self._condition(op, lanes)
        if condition.all():
            return op.target
        if not condition.any():
            return at + 1
        taken, others = lanes.select(condition), lanes.select(~condition)
        self._park(others, at + 1)
        self._park(taken, op.target)
        # A lane with nothing left to do has exited, and no barrier waits for it.
        for part, where in ((taken, op.target), (others, at + 1)):
            if self.ops[where].kind == "exit" and self.ops[where].guard is None:
                self.chunk.counts[where].instructions += part.warps
                self._exit(self.ops[where], part, where)
        return None

    def _exit(self, op: Op, lanes: Lanes, at: int) -> bool:
        """Whether all the lanes are gone; the others went on if not."""
        gone = lanes
        if op.guard is not None:
            condition = self._condition(op, lanes)
            if not condition.any():
                return False
            gone = lanes.select(condition)
            if gone.count < lanes.count:
                self._park(lanes.select(~condition), at + 1)
        self.alive[gone.index] = False
        self.runnable[gone.index] = _IDLE
        self.living -= gone.count
        if self.in_barrier.any():
            self._check_barrier_left(gone)
        if self.in_sync.any():
            self._check_warp_left(gone)
        return True

    def _check_warp_left(self, gone: Lanes) -> None:
        """A lane that another one's mask names must not run past the place and end."""
        waiting = Lanes(np.flatnonzero(self.in_sync))
        ended = bits_per_warp(self.chunk, gone, True)[waiting.ids >> 5]
        for at in np.unique(self.at[waiting.ids]).tolist():
            op = self.ops[at]
            assert op.members is not None
            here = waiting.select(self.at[waiting.ids] == at)
            named = op.members(self.chunk, here) & ended[self.at[waiting.ids] == at]
            if named.any():
                raise self._warp_fault(int(here.ids[named.argmax()]))

    def _warp_fault(self, lane: int) -> Exception:
        instruction = self.ops[int(self.at[lane])].instruction
        return self.chunk.fault(
            instruction, lane, "warp not complete", "a lane that its member mask names never comes here"
        )

    def _check_barrier_left(self, gone: Lanes) -> None:
        """Lanes of one warp come to a barrier together, or not at all."""
        waiting: Array = self.in_barrier.reshape(-1, 32).max(axis=1)
        bad = waiting[gone.ids >> 5]
        if bad.any():
            warp = int(gone.ids[bad.argmax()]) >> 5
            lane = 32 * warp + int(self.in_barrier[32 * warp : 32 * warp + 32].argmax())
            other = self.chunk.thread_name(int(gone.ids[bad.argmax()]))
            raise self._barrier_fault(lane, f"{other} of the same warp ended without reaching it")

    def _barrier_fault(self, lane: int, detail: str) -> Exception:
        instruction = self.ops[int(self.at[lane])].instruction
        return self.chunk.fault(instruction, lane, "barrier not reached by all", detail)

    def _arrive(self, op: Op, lanes: Lanes, at: int) -> bool:
        """Whether the barrier opened at once, because all living threads of the chunk are here."""
        assert op.barrier is not None
        if op.guard is not None:
            condition = self._condition(op, lanes)
            if not condition.any():
                return True
            if not condition.all():
                self._park(lanes.select(~condition), at + 1)
                lanes = lanes.select(condition)
        elif lanes.count == self.living and op.barrier[1] is None:
            self._open(op, lanes)
            return True
        self._park(lanes, at)
        self.runnable[lanes.index] = _IDLE
        self.in_barrier[lanes.index] = True
        return False

    def _open(self, op: Op, lanes: Lanes) -> None:
        if op.run is not None:
            op.run(self.chunk, lanes)
        if self.chunk.shared_races is not None:
            self.chunk.shared_races.sync_block(lanes.ids)

    def _release_barriers(self) -> bool:
        """Let the lanes go whose barrier is complete. Nothing else can run at this point."""
        chunk = self.chunk
        ids = np.flatnonzero(self.in_barrier)
        if not len(ids):
            return False
        at = self.at[ids]
        number, wanted = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64)
        for where in np.unique(at).tolist():
            here = at == where
            barrier = self.ops[where].barrier
            assert barrier is not None
            lanes = Lanes(ids[here])
            number[here] = barrier[0](chunk, lanes)
            if barrier[1] is not None:
                wanted[here] = barrier[1](chunk, lanes)
        block = chunk.slot_of[ids]
        key = block * 16 + number
        arrived = np.bincount(key)[key]
        living = np.bincount(chunk.slot_of[self.alive])[block]
        complete = arrived == np.where(wanted == 0, living, wanted)
        self._check_same_barrier(ids[complete & (wanted == 0)], key[complete & (wanted == 0)])
        if not complete.any():
            return False
        for where in np.unique(at[complete]).tolist():
            lanes = Lanes(ids[complete & (at == where)])
            self.in_barrier[lanes.index] = False
            self._park(lanes, where + 1)
            self._open(self.ops[where], lanes)
        return True

    def _check_same_barrier(self, ids: Array, key: Array) -> None:
        """A barrier for the whole block must be one place in the kernel."""
        if not len(ids):
            return
        order = np.argsort(key, kind="stable")
        ids, key = ids[order], key[order]
        differs = (key[1:] == key[:-1]) & (self.at[ids[1:]] != self.at[ids[:-1]])
        if differs.any():
            one, other = int(ids[differs.argmax()]), int(ids[differs.argmax() + 1])
            line = self.ops[int(self.at[other])].instruction.line
            raise self._barrier_fault(one, f"{self.chunk.thread_name(other)} waits at another one, at {line}")

    def _sync(self, op: Op, lanes: Lanes, at: int) -> bool:
        """Run a warp instruction for lanes whose partners are here; whether that was all and nobody waited for it."""
        assert op.members is not None and op.run is not None
        if op.guard is not None:
            condition = self._condition(op, lanes)
            if not condition.all():
                self._park(lanes.select(~condition), at + 1)
                if condition.any():
                    self._sync_waiting(op, lanes.select(condition), at)
                return False
        if lanes.count == 32 * lanes.warps or lanes.count == self.living:
            members = op.members(self.chunk, lanes)
            self._check_member(op, lanes, members)
            op.run(self.chunk, lanes)
            return True
        self._sync_waiting(op, lanes, at)
        return False

    def _check_member(self, op: Op, lanes: Lanes, members: Array) -> None:
        if (members == _EVERYONE).all():
            return
        outside = (members >> (lanes.ids & 31).astype(np.uint32) & np.uint32(1)) == 0
        if outside.any():
            lane = int(lanes.ids[outside.argmax()])
            raise self.chunk.fault(
                op.instruction, lane, "wrong member mask", "the mask does not name the lane itself"
            )

    def _sync_waiting(self, op: Op, lanes: Lanes | None, at: int) -> bool:
        """Gather lanes with those that wait at the same place, and run the ones that are complete."""
        chunk = self.chunk
        here = self.in_sync & (self.at == at)
        if lanes is not None:
            here[lanes.index] = True
        every = Lanes(np.flatnonzero(here))
        assert op.members is not None and op.run is not None
        members = np.broadcast_to(op.members(chunk, every), every.count)
        self._check_member(op, every, members)
        living = Lanes(np.flatnonzero(self.alive))
        warp = every.ids >> 5
        needed = members & bits_per_warp(chunk, living, True)[warp]
        ready = needed & ~bits_per_warp(chunk, every, True)[warp] == 0
        waiting, going = every.select(~ready), every.select(ready)
        self._park(waiting, at)
        self.runnable[waiting.index] = _IDLE
        self.in_sync[waiting.index] = True
        if not going.count:
            return False
        self.in_sync[going.index] = False
        self._park(going, at + 1)
        op.run(chunk, going)
        return True

    def _retry_syncs(self) -> bool:
        """Lanes that others waited for may have exited."""
        places = np.unique(self.at[self.in_sync]).tolist()
        went = [self._sync_waiting(self.ops[at], None, at) for at in places]
        return any(went)

    def _deadlock(self) -> Exception:
        """Nothing can go on any more."""
        if self.in_sync.any():
            return self._warp_fault(int(self.in_sync.argmax()))
        lane = int(self.in_barrier.argmax())
        waiting_here = int((self.in_barrier & (self.chunk.slot_of == self.chunk.slot_of[lane])).sum())
        return self._barrier_fault(lane, f"{waiting_here} of {self.chunk.launch.threads} threads wait there for ever")
