"""The cpu device, operation by operation, against float64 loops and against NumPy."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from reference import attention

from kvcupy.backends import cpu, get_backend
from kvcupy.backends.base import STORAGE_DTYPES, Layer
from kvcupy.spec import LAYOUTS, KVSpec

DTYPES = tuple(STORAGE_DTYPES)

# Inputs are read exactly and all sums are float32: what is left is its rounding, some hundred steps of 2^-24.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture
def backend():
    return get_backend("cpu")


class Pool:
    """One layer whose every byte is NaN until it is written, with a guard of NaN around it."""

    GUARD = 4096

    def __init__(self, backend: Any, spec: KVSpec, num_pages: int) -> None:
        self.spec, self.num_pages = spec, num_pages
        nbytes = num_pages * spec.strides.page
        self.memory = backend.allocate(nbytes + 2 * self.GUARD)
        self.memory[:] = 0xFF  # NaN in each of the dtypes
        self.data = self.memory[self.GUARD : self.GUARD + nbytes]
        self.layer = Layer(spec, num_pages, backend.address(self.data), spec.strides, spec.padding_bytes_per_row)

    def rows(self) -> Any:
        """[page, offset, head, K or V, dim] view of the stored elements."""
        spec, strides = self.spec, self.spec.strides
        return np.ndarray(
            (self.num_pages, spec.page_size, spec.num_kv_heads, 2, spec.head_dim),
            STORAGE_DTYPES[spec.dtype],
            self.data,
            strides=(strides.page, strides.token, strides.head, strides.kv, spec.itemsize),
        )

    def assert_guard_untouched(self) -> None:
        assert (self.memory[: self.GUARD] == 0xFF).all()
        assert (self.memory[-self.GUARD :] == 0xFF).all()


class Case:
    """Random sequences in a pool, written there by NumPy, and what attention over them must give."""

    def __init__(
        self,
        backend: Any,
        spec: KVSpec,
        lengths: list[int],
        group: int,
        *,
        query_lens: list[int] | None = None,
        q_dtype: str = "float32",
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.backend, self.spec, self.lengths = backend, spec, lengths
        self.seq_lens = np.array(lengths, np.int32)
        self.query_lens = None if query_lens is None else np.array(query_lens, np.int32)
        self.scale = float(spec.head_dim**-0.5)
        storage = STORAGE_DTYPES[spec.dtype]
        columns = max(1, *(spec.pages_for(n) for n in lengths)) + 1
        num_pages = sum(spec.pages_for(n) for n in lengths) + 3
        self.pool = Pool(backend, spec, num_pages)
        free = rng.permutation(num_pages).tolist()
        self.page_table = np.full((len(lengths), columns), -1, np.int32)
        self.k, self.v = [], []
        rows = self.pool.rows()
        for sequence, length in enumerate(lengths):
            shape = (length, spec.num_kv_heads, spec.head_dim)
            k, v = (rng.standard_normal(shape).astype(storage) for _ in range(2))
            for page in range(spec.pages_for(length)):
                self.page_table[sequence, page] = free.pop()
                first = page * spec.page_size
                tokens = slice(first, min(first + spec.page_size, length))
                place = rows[self.page_table[sequence, page], : tokens.stop - first]
                place[:, :, 0], place[:, :, 1] = k[tokens], v[tokens]
            self.k.append(k)
            self.v.append(v)
        counts = [1] * len(lengths) if query_lens is None else query_lens
        self.seen = [
            (sequence, max(lengths[sequence] - count + 1 + j, 0))
            for sequence, count in enumerate(counts)
            for j in range(count)
        ]
        shape = (len(self.seen), group * spec.num_kv_heads, spec.head_dim)
        self.q = rng.standard_normal(shape).astype(STORAGE_DTYPES[q_dtype])

    def decode(self) -> tuple[Any, Any]:
        out = np.full(self.q.shape, np.nan, self.q.dtype)
        lse = np.full(self.q.shape[:2], np.nan, np.float32)
        self.backend.decode_attention(
            self.pool.layer, self.q, self.page_table, self.seq_lens, self.query_lens, self.scale, out, lse
        )
        return out, lse

    def expected(self) -> tuple[Any, Any]:
        results = [
            attention(q, self.k[sequence][:tokens], self.v[sequence][:tokens], self.scale)
            for q, (sequence, tokens) in zip(self.q, self.seen, strict=True)
        ]
        return np.stack([out for out, _ in results]), np.stack([lse for _, lse in results])

    def check(self, **tolerance: float) -> None:
        before = self.pool.memory.copy()
        out, lse = self.decode()
        expected_out, expected_lse = self.expected()
        np.testing.assert_allclose(out.astype(np.float64), expected_out, **(tolerance or TOLERANCE))
        np.testing.assert_allclose(lse, expected_lse, **TOLERANCE)
        np.testing.assert_array_equal(self.pool.memory, before)


# --- Decode ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 7, 8, 20, 64, 80, 100, 128, 256, 512])
@pytest.mark.parametrize("seed", [1])
def test_decode_head_dims(backend, head_dim, dtype, seed):
    for align in (1, 16, "128-elements"):
        spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=head_dim, dtype=dtype, row_align=align)
        Case(backend, spec, [37, 0, 1, 130], 3, seed=seed).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16, 71])
@pytest.mark.parametrize("seed", [2])
def test_decode_groups(backend, group, dtype, seed):
    for head_dim in (80, 100):
        spec = KVSpec(num_layers=1, num_kv_heads=3, head_dim=head_dim, dtype=dtype)
        Case(backend, spec, [65, 14], group, seed=seed).check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 256, 100_000])
@pytest.mark.parametrize("seed", [3])
def test_decode_layouts_and_pages(backend, layout, page_size, seed):
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=8, page_size=page_size, layout=layout)
    lengths = [1100, 0, 16] if page_size < 100_000 else [1100, 33]
    Case(backend, spec, lengths, 4, seed=seed).check()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1024, 1025, 2500])
@pytest.mark.parametrize("seed", [4])
def test_decode_lengths_around_blocks_and_splits(backend, length, seed):
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=64, dtype="bfloat16")
    for group in (1, 2, 6):
        Case(backend, spec, [length, 0, length], group, seed=seed).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(5, 9))
def test_decode_query_lens(backend, dtype, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 700, 5).tolist()
    query_lens = [int(rng.integers(0, 6)) for _ in lengths]
    query_lens[0] = lengths[0] + 2  # its first tokens see nothing
    lengths[0], query_lens[0] = 3, 5
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=32, dtype=dtype)
    Case(backend, spec, lengths, 4, query_lens=query_lens, seed=seed).check()


@pytest.mark.parametrize(("q_dtype", "step"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_decode_rounds_out_to_the_dtype_of_q(backend, q_dtype, step):
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=64)
    case = Case(backend, spec, [40, 0, 700], 4, q_dtype=q_dtype, seed=10)
    case.check(rtol=1.01 * step, atol=2e-5)


def test_decode_with_no_rows_and_with_no_columns(backend):
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=64)
    layer = Pool(backend, spec, 1).layer
    for rows in (0, 2):
        q = np.ones((rows, 4, 64), np.float32)
        out, lse = np.full_like(q, np.nan), np.full((rows, 4), np.nan, np.float32)
        table = np.empty((rows, 0), np.int32)
        backend.decode_attention(layer, q, table, np.full(rows, 9, np.int32), None, 0.125, out, lse)
        assert (out == 0).all()
        assert (lse == -np.inf).all()


def test_decode_with_any_strides_and_without_lse(backend):
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=16)
    case = Case(backend, spec, [50, 70], 2, seed=11)
    out, lse = case.decode()
    wide, wide_lse = np.full((2, 8, 16), np.nan, np.float32), np.full((4, 2), np.nan, np.float32)
    page_table = np.repeat(case.page_table, 2, axis=1)[:, ::2]
    page_table.flags.writeable = False
    arguments = (case.pool.layer, case.q, page_table, case.seq_lens, None, case.scale)
    backend.decode_attention(*arguments, wide[:, ::2], wide_lse.T)
    np.testing.assert_array_equal(wide[:, ::2], out)
    np.testing.assert_array_equal(wide_lse.T, lse)
    assert np.isnan(wide[:, 1::2]).all()
    other = np.full_like(out, np.nan)
    backend.decode_attention(*arguments, other, None)
    np.testing.assert_array_equal(other, out)


def test_decode_clamps_lengths_and_skips_pages_outside_the_pool(backend):
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=16, page_size=4)
    case = Case(backend, spec, [12, 12, 12], 2, seed=12)
    case.page_table = np.ascontiguousarray(case.page_table[:, :3])
    case.page_table[1, 1] = case.pool.num_pages
    case.page_table[2, 0] = -5
    case.k[1], case.v[1] = (np.delete(a[1], np.s_[4:8], axis=0) for a in (case.k, case.v))
    case.k[2], case.v[2] = case.k[2][4:], case.v[2][4:]
    case.seen = [(0, 12), (1, 8), (2, 8)]
    case.seq_lens = np.array([2**31 - 1, 1000, 13], np.int32)
    case.check()
    case.seq_lens = np.array([-1, -(2**31), 4], np.int32)
    out, lse = case.decode()
    assert (out == 0).all()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 20])
def test_nan_and_inf_stay_in_the_rows_that_see_them(backend, dtype, head_dim):
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    case = Case(backend, spec, [70, 70, 70], 4, seed=13)
    clean_out, clean_lse = case.decode()
    rows = case.pool.rows()
    page, offset = case.page_table[1, 69 // 16], 69 % 16
    kept = rows[page, offset].copy()

    rows[page, offset, 0, 0, head_dim - 1] = np.nan  # K of kv head 0
    out, lse = case.decode()
    hit = np.zeros((3, 8), bool)
    hit[1, :4] = True
    assert np.isnan(out[hit]).all()
    assert np.isnan(lse[hit]).all()
    np.testing.assert_array_equal(out[~hit], clean_out[~hit])
    np.testing.assert_array_equal(lse[~hit], clean_lse[~hit])

    rows[page, offset] = kept
    rows[page, offset, 0, 1, head_dim - 1] = np.inf  # V of kv head 0
    out, lse = case.decode()
    np.testing.assert_array_equal(lse, clean_lse)
    assert (out[1, :4, -1] == np.inf).all()
    np.testing.assert_array_equal(out[1, :, :-1], clean_out[1, :, :-1])
    np.testing.assert_array_equal(out[[0, 2]], clean_out[[0, 2]])

    rows[page, offset] = kept
    case.q[2, 3, 0] = np.nan
    out, lse = case.decode()
    assert np.isnan(out[2, 3]).all()
    assert np.isnan(lse[2, 3])
    np.testing.assert_array_equal(out[:2], clean_out[:2])


def test_scores_of_minus_infinity(backend):
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=16)
    case = Case(backend, spec, [600], 1, seed=14)
    case.q[:] = np.abs(case.q)
    rows = case.pool.rows()
    whole = case.page_table[0, :37]
    rows[whole, :, :, 0] = -np.inf  # all but the last 8 tokens
    case.k[0][: 37 * 16] = -np.inf
    case.check()
    rows[case.page_table[0, 37], :, :, 0] = -np.inf
    out, lse = case.decode()
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_large_scores_do_not_overflow(backend):
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32")
    case = Case(backend, spec, [300], 4, seed=15)
    case.q *= 300
    out, lse = case.decode()
    expected_out, expected_lse = case.expected()
    # A score of 10^3 is rounded at 2^-24 of itself: weights are good to 10^-4.
    np.testing.assert_allclose(out, expected_out, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


def test_exponential_is_good_to_float32(backend):
    # Two tokens with scores 0 and -x: V of (0, 1) makes out the weight 1 / (1 + e^x).
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=1, page_size=2, dtype="float32")
    pool = Pool(backend, spec, 1)
    pool.rows()[0, :, 0, :, 0] = [[0, 0], [-1, 1]]
    x = np.linspace(0, 80, 4001).astype(np.float32).reshape(-1, 1, 1)
    out = np.full_like(x, np.nan)
    table = np.zeros((len(x), 1), np.int32)
    backend.decode_attention(pool.layer, x, table, np.full(len(x), 2, np.int32), None, 1.0, out, None)
    # x·log2(e) is rounded once, which moves the result by up to x·2^-24: the rest is below 3e-7.
    expected = 1 / (1 + np.exp(x.astype(np.float64)))
    assert (np.abs(out / expected - 1) < 3e-7 + x * 2.0**-23).all()


def test_results_do_not_depend_on_the_number_of_threads(backend, monkeypatch):
    spec = KVSpec(num_layers=1, num_kv_heads=3, head_dim=40)
    case = Case(backend, spec, [1300, 3, 0, 777], 2, query_lens=[2, 1, 1, 3], seed=16)
    expected_out, expected_lse = case.decode()
    for threads in (1, 2, 3, 97):  # also more than there are units
        monkeypatch.setattr(cpu, "_threads", lambda threads=threads: threads)
        out, lse = case.decode()
        np.testing.assert_array_equal(out, expected_out)
        np.testing.assert_array_equal(lse, expected_lse)


# --- Threads and processes ---


def test_two_python_threads_decode_at_once(backend):
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=64)
    cases = [Case(backend, spec, [900, 100 + i], 4, seed=20 + i) for i in range(2)]
    expected = [case.decode() for case in cases]
    failures: list[Any] = []

    def work(case: Case, wanted: Any) -> None:
        try:
            for _ in range(50):
                for got, want in zip(case.decode(), wanted, strict=True):
                    np.testing.assert_array_equal(got, want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(cases, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_a_forked_child_decodes(backend):
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=64)
    case = Case(backend, spec, [900, 100], 4, seed=30)
    expected = case.decode()
    pid = _fork()
    if pid == 0:
        try:
            same = all(np.array_equal(a, b) for a, b in zip(case.decode(), expected, strict=True))
            os._exit(0 if same and backend.read_bandwidth() > 0 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is what is tested
        return os.fork()


def test_import_is_lazy():
    code = (
        "import sys, threading, kvcupy, kvcupy.backends; "
        "assert not {'numba', 'kvcupy.backends.cpu'} & set(sys.modules); "
        "import kvcupy.backends.cpu as cpu; backend = cpu.create(); "
        "assert threading.active_count() == 1; "
        "assert not any(f.signatures for f in vars(cpu.kernels).values() if hasattr(f, 'signatures'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- Append and gather ---


def _random_bits(rng: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Every bit pattern, NaN payloads and negative zeros included."""
    storage = STORAGE_DTYPES[dtype]
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * storage.itemsize), np.uint8).view(storage)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "align"), [(1, 1), (20, 16), (80, "128-elements"), (128, 16), (100, 64)])
def test_append_and_gather_move_every_bit(backend, layout, dtype, head_dim, align):
    rng = np.random.default_rng(40)
    spec = KVSpec(
        num_layers=1,
        num_kv_heads=3,
        head_dim=head_dim,
        page_size=5,
        dtype=dtype,
        layout=layout,
        row_align=align,
    )
    pool = Pool(backend, spec, 7)
    k, v = (_random_bits(rng, (20, 3, head_dim), dtype) for _ in range(2))
    slots = rng.permutation(35)[:20].astype(np.int64)
    slots[[2, 3, 4]] = -1, 35, 2**62
    backend.append(pool.layer, k, v, slots)

    expected = np.full_like(pool.data, 0xFF)
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < 35:
            for head in range(3):
                for kv, values in enumerate((k, v)):
                    start = spec.strides.offset(slot // 5, head, slot % 5, kv)
                    row = values[token, head].tobytes() + bytes(spec.padding_bytes_per_row)
                    expected[start : start + spec.row_bytes] = np.frombuffer(row, np.uint8)
    np.testing.assert_array_equal(pool.data, expected)
    pool.assert_guard_untouched()

    k_back, v_back = (_random_bits(rng, k.shape, dtype) for _ in range(2))
    backend.gather(pool.layer, slots, k_back, v_back)
    stored = (slots >= 0) & (slots < 35)
    for back, values in ((k_back, k), (v_back, v)):
        np.testing.assert_array_equal(back[stored].view(np.uint8), values[stored].view(np.uint8))
        assert not back[~stored].view(np.uint8).any()


@pytest.mark.parametrize("tokens", [9, 3000])
def test_append_from_any_strides(backend, tokens):
    rng = np.random.default_rng(41)
    spec = KVSpec(num_layers=1, num_kv_heads=4, head_dim=64, page_size=16)
    kv = _random_bits(rng, (4, 2, tokens, 64), "float16")
    k, v = kv[:, 0].transpose(1, 0, 2)[::-1], kv[:, 1].transpose(1, 0, 2)[:, ::-1]
    pool = Pool(backend, spec, -(-tokens // 16))
    slots = rng.permutation(pool.num_pages * 16)[:tokens].astype(np.int64)
    backend.append(pool.layer, k, v, slots)
    stored = pool.rows()[slots // 16, slots % 16].view(np.uint16)
    np.testing.assert_array_equal(stored[:, :, 0], k.view(np.uint16))
    np.testing.assert_array_equal(stored[:, :, 1], v.view(np.uint16))
    back = np.zeros((2, 4, tokens, 64), np.float16).transpose(0, 2, 1, 3)[:, ::-1]
    backend.gather(pool.layer, slots, back[0], back[1])
    np.testing.assert_array_equal(back[0].view(np.uint16), k.view(np.uint16))
    np.testing.assert_array_equal(back[1].view(np.uint16), v.view(np.uint16))


def test_of_two_tokens_for_one_slot_the_later_stays(backend):
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=128, page_size=16)
    pool = Pool(backend, spec, 2)
    k = np.arange(2000, dtype=np.float16)[:, None, None] + np.zeros((1, 2, 128), np.float16)
    for _ in range(20):
        backend.append(pool.layer, k, -k, np.full(2000, 21, np.int64))
        assert (pool.rows()[1, 5, :, 0] == 1999).all()
        assert (pool.rows()[1, 5, :, 1] == -1999).all()


def test_append_then_decode(backend):
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=48, dtype="bfloat16", layout="hnd")
    case = Case(backend, spec, [100, 31], 5, seed=42)
    case.pool.memory[:] = 0xFF
    for sequence, length in enumerate(case.lengths):
        tokens = np.arange(length)
        slots = case.page_table[sequence, tokens // 16].astype(np.int64) * 16 + tokens % 16
        backend.append(case.pool.layer, case.k[sequence], case.v[sequence], slots)
    case.check()


# --- Pages and states ---


def test_copy_pages_in_order(backend):
    rng = np.random.default_rng(50)
    data = rng.integers(0, 256, (3, 6, 40), np.uint8)
    expected = data.copy()
    sources, destinations = np.array([0, 1, -1, 2, 6]), np.array([1, 2, 3, -1, 0])
    expected[:, 1] = expected[:, 0]
    expected[:, 2] = expected[:, 1]
    backend.copy_pages(data, sources, destinations)
    np.testing.assert_array_equal(data, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_states_is_attention_over_the_union(backend, dtype):
    rng = np.random.default_rng(51)
    q, k, v = rng.standard_normal((6, 32)), rng.standard_normal((90, 6, 32)), rng.standard_normal((90, 6, 32))
    storage = STORAGE_DTYPES[dtype]
    parts = []
    for tokens in (slice(0, 40), slice(40, 90)):
        out, lse = attention(q, k[tokens], v[tokens], 0.2)
        parts += [out.astype(storage), lse.astype(np.float32)]
    out, lse = np.full((6, 32), np.nan, storage), np.full(6, np.nan, np.float32)
    backend.merge_states(*parts, out, lse)
    expected_out, expected_lse = attention(q, k, v, 0.2)
    step = float(ml_dtypes.finfo(storage).eps)  # each part was rounded once, the result again
    np.testing.assert_allclose(out.astype(np.float64), expected_out, rtol=2 * step, atol=2 * step)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)


def test_merge_with_an_empty_state_is_exact(backend):
    values = np.random.default_rng(52).standard_normal((4, 8)).astype(np.float32)
    lse_values = np.array([2.0, -100.0, -np.inf, 1e4], np.float32)
    values[2] = 0
    empty, empty_lse = np.zeros_like(values), np.full(4, -np.inf, np.float32)
    for states in ((values, lse_values, empty, empty_lse), (empty, empty_lse, values, lse_values)):
        out, lse = np.full_like(values, np.nan), np.full(4, np.nan, np.float32)
        backend.merge_states(*states, out, lse)
        np.testing.assert_array_equal(out, values)
        np.testing.assert_array_equal(lse, lse_values)


# --- The device ---


@pytest.mark.parametrize("nbytes", [0, 1, 4097, 5 << 20])
def test_allocate(backend, nbytes):
    memory = backend.allocate(nbytes)
    assert memory.dtype == np.uint8
    assert memory.shape == (nbytes,)
    assert nbytes == 0 or backend.address(memory) % 128 == 0
    memory[:] = 7
    assert (memory == 7).all()


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 70])
def test_allocate_without_room(backend, nbytes):
    with pytest.raises(MemoryError):
        backend.allocate(nbytes)


def test_the_device_describes_itself(backend):
    assert "threads" in backend.describe()
    assert "\n" not in backend.describe()
    assert backend.last_level_cache_bytes() >= 1 << 20
    assert backend.synchronize() is None
    array = np.arange(3)
    assert backend.asarray(array) is array


def test_read_bandwidth_is_a_memory_bandwidth(backend):
    assert 1e9 < backend.read_bandwidth() < 1e13
