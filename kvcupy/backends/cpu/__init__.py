"""The `cpu` device: Numba-compiled loops over NumPy arrays, on all cores."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import platform
import subprocess
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numba
import numpy as np

from kvcupy.backends.base import Array, Backend, Layer, host_array
from kvcupy.backends.cpu import kernels
from kvcupy.spec import parse_bytes

_SMALL_BYTES = 256 << 10  # below this, waking the threads costs more than they save
_DEFAULT_CACHE_BYTES = 32 << 20

# Between parallel calls libgomp's threads spin by default, and steal the cores from whoever else runs: on a busy
# machine a call took ten times as long. It reads this wish once, when Numba's thread pool loads it.
_wish = os.environ.get("OMP_WAIT_POLICY")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
with contextlib.suppress(ImportError):  # a Numba without OpenMP has other thread pools
    import_module("numba.np.ufunc.omppool")
if _wish is None:
    del os.environ["OMP_WAIT_POLICY"]

# Numba's threads neither take two callers at once nor survive a fork: parallel calls hold one lock, and in a
# forked child the same shares run one after another, with the same results.
_lock = threading.Lock()
_forked = False


def _after_fork() -> None:
    global _lock, _forked
    _lock = threading.Lock()
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def create() -> Backend:
    """The device. Nothing is compiled and no thread started before its first operation."""
    return CpuBackend()


class CpuBackend(Backend):
    name = "cpu"

    def __init__(self) -> None:
        self._workspace = np.empty(0, np.float32)

    def describe(self) -> str:
        config: Any = numba.config
        return f"{_cpu_model()}, {config.NUMBA_NUM_THREADS} threads"

    def allocate(self, nbytes: int) -> Array:
        """Anonymous pages, zero until written; huge ones where the system has them."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        try:
            if hasattr(mmap, "MAP_PRIVATE"):
                memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                memory = mmap.mmap(-1, nbytes)
        except (OSError, OverflowError):
            raise MemoryError(f"no room for {nbytes} bytes") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel built without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, np.uint8)

    def asarray(self, array: Any) -> Array:
        return host_array(array)

    def tonumpy(self, array: Array) -> Array:
        return array

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.empty(shape, dtype)

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def append(self, layer: Layer, k: Array, v: Array, slots: Array) -> None:
        row_bytes = layer.spec.head_dim * layer.spec.itemsize
        arguments = (
            _rows(layer),
            _inputs(k, v),
            _as_kernels_take(slots, np.int64),
            row_bytes,
            layer.row_padding,
        )
        with _lock:
            _run(_threads_for(k), kernels.append, kernels.append_share, *arguments)

    def gather(self, layer: Layer, slots: Array, k: Array, v: Array) -> None:
        row_bytes = layer.spec.head_dim * layer.spec.itemsize
        arguments = (_rows(layer), _inputs(k, v), _as_kernels_take(slots, np.int64), row_bytes)
        with _lock:
            _run(_threads_for(k), kernels.gather, kernels.gather_share, *arguments)

    def decode_attention(
        self,
        layer: Layer,
        q: Array,
        page_table: Array,
        seq_lens: Array,
        query_lens: Array | None,
        scale: float,
        out: Array,
        lse: Array | None,
    ) -> None:
        rows, q_heads, head_dim = q.shape
        heads = layer.spec.num_kv_heads
        page_table = _as_kernels_take(page_table, np.int32)
        work = _work(page_table, seq_lens, query_lens, rows, layer.spec.page_size, heads)
        # Scores in base 2: exp2 is cheaper than exp.
        scaled = np.ascontiguousarray(q, np.float32) * np.float32(scale * np.log2(np.e))
        direct = out.dtype == np.float32 and out.flags.carray
        result = out if direct else np.empty(q.shape, np.float32)
        direct_lse = lse is not None and lse.flags.carray
        result_lse = lse if direct_lse else np.empty((rows, q_heads), np.float32)
        group = q_heads // heads
        with _lock:
            threads = _threads()
            addresses = np.empty((threads, 2 * kernels.SPLIT + kernels.LIST_TAIL), np.int64)
            padded_dim = -(-head_dim // kernels.MAX_LANES) * kernels.MAX_LANES
            units = int(work.units[-1])
            shapes = ((threads, group, kernels.BLOCK), (units, group, padded_dim), (units, group, 2))
            element = kernels.ELEMENTS[layer.spec.dtype]
            arguments = (_rows(layer), work, scaled, page_table, addresses, *self._scratch(*shapes))
            if threads == 1:
                kernels.decode_share(0, 1, element, *arguments)
                kernels.merge_share(0, 1, *arguments[:2], *arguments[6:], result, result_lse)
            else:
                kernels.decode(threads, element, *arguments, result, result_lse)
        if not direct:
            with np.errstate(over="ignore"):
                out[...] = result
        if lse is not None and not direct_lse:
            lse[...] = result_lse

    def _scratch(self, *shapes: tuple[int, ...]) -> list[Array]:
        """float32 arrays of undefined content in a workspace that is kept and grows."""
        total = sum(map(math.prod, shapes))
        if total > self._workspace.size:
            self._workspace = np.empty(total, np.float32)
        arrays, start = [], 0
        for shape in shapes:
            stop = start + math.prod(shape)
            arrays.append(self._workspace[start:stop].reshape(shape))
            start = stop
        return arrays

    def copy_pages(self, data: Array, sources: Array, destinations: Array) -> None:
        pages = range(data.shape[1])
        for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
            if source in pages and destination in pages:
                data[:, destination] = data[:, source]

    def merge_states(self, out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, out: Array, lse: Array) -> None:
        peak = np.maximum(lse_a, lse_b)
        shift = np.where(peak == -np.inf, np.float32(0), peak)
        weight_a, weight_b = np.exp(lse_a - shift), np.exp(lse_b - shift)
        total = weight_a + weight_b
        divisor = np.where(total == 0, np.float32(1), total)
        share_a, share_b = (weight_a / divisor)[:, None], (weight_b / divisor)[:, None]
        # What an empty set brings is not looked at: it may be NaN.
        merged = sum(
            np.where(share == 0, np.float32(0), share * part.astype(np.float32))
            for share, part in ((share_a, out_a), (share_b, out_b))
        )
        out[...] = merged
        lse[...] = np.where(total == 0, -np.inf, shift + np.log(divisor))

    def synchronize(self) -> None:
        pass

    def read_bandwidth(self) -> float:
        words = self.allocate(1 << 30).view(np.int64)
        seconds = []
        with _lock:
            threads = _threads()
            # Memory that was never written would be one page of zeros, read from the cache.
            _run(threads, kernels.fill, kernels.fill_share, words)
            for _ in range(9):  # the first compiles
                start = time.perf_counter()
                _run(threads, kernels.sum_words, kernels.sum_share, words)
                seconds.append(time.perf_counter() - start)
        return float(words.nbytes / min(seconds))

    def last_level_cache_bytes(self) -> int:
        sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        return max((parse_bytes(path.read_text().strip() + "iB") for path in sizes), default=_DEFAULT_CACHE_BYTES)


def _threads() -> int:
    return 1 if _forked else int(numba.get_num_threads())


def _threads_for(k: Array) -> int:
    return _threads() if k.nbytes > _SMALL_BYTES else 1


def _run(threads: int, parallel: Any, share: Any, *arguments: Any) -> None:
    """All shares of a kernel: in parallel, or as one share where that is one thread's work."""
    if threads == 1:
        share(0, 1, *arguments)
    else:
        parallel(threads, *arguments)


def _as_kernels_take(array: Any, dtype: Any) -> Array:
    # Numba would compile anew for an array that is read-only or not contiguous.
    return np.require(array, dtype, ["C", "A", "W"])


def _rows(layer: Layer) -> kernels.Rows:
    spec, strides = layer.spec, layer.strides
    return kernels.Rows(
        layer.data,
        strides.page,
        strides.head,
        strides.token,
        strides.kv,
        layer.num_pages,
        spec.page_size,
        spec.num_kv_heads,
        spec.head_dim,
    )


def _inputs(k: Array, v: Array) -> Array:
    """Address, token stride and head stride in bytes, of K and of V."""
    return np.array([[a.ctypes.data, *a.strides[:2]] for a in (k, v)], np.int64)


def _work(page_table: Array, seq_lens: Any, query_lens: Any, rows: int, page_size: int, heads: int) -> kernels.Work:
    """Each query token as a row of its own: the sequence it reads, and how many tokens of it.

    Rows that unchecked query_lens leave over read nothing; what they count beyond the rows is cut off.
    """
    tokens = np.minimum(_as_kernels_take(seq_lens, np.int64), page_table.shape[1] * page_size)
    sequences = np.arange(len(tokens), dtype=np.int64)
    if query_lens is not None:
        wanted = np.clip(_as_kernels_take(query_lens, np.int64), 0, rows)
        ends = np.minimum(np.cumsum(wanted), rows)
        sequences = np.repeat(sequences, np.diff(ends, prepend=0))
        used = len(sequences)
        sequences = np.concatenate([sequences, np.zeros(rows - used, np.int64)])
        last = np.cumsum(wanted)[sequences]  # not cut off: a row keeps its distance from its sequence's last
        tokens = tokens[sequences] - last + 1 + np.arange(rows)
        tokens[used:] = 0
    tokens = np.maximum(tokens, 0)
    units = np.zeros(len(tokens) + 1, np.int64)
    positions = np.zeros(len(tokens) + 1, np.int64)
    np.cumsum(-(-tokens // kernels.SPLIT) * heads, out=units[1:])
    np.cumsum(tokens * heads, out=positions[1:])
    return kernels.Work(sequences, tokens, units, positions)


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        if platform.system() == "Darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True).stdout.strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
