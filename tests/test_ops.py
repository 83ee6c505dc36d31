"""append, gather, decode_attention and merge_states on every device, against float64."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from problems import Array, Problem, assert_close, assert_same, host, make_problem, on_device, poisoned_pool

from kvcupy import KVSpec, LayerPool, Strides, append, decode_attention, gather, merge_states
from kvcupy.backends.base import STORAGE_DTYPES
from kvcupy.spec import LAYOUTS, ROW_ALIGNS

HEAD_DIMS = [1, 8, 20, 32, 40, 64, 72, 80, 96, 100, 112, 120, 125, 128, 160, 192, 256, 511, 512]


def small_spec(**changes: Any) -> KVSpec:
    return KVSpec(**{"num_layers": 1, "num_kv_heads": 2, "head_dim": 32, "page_size": 4, **changes})


def decode(problem: Problem, q: Array, **options: Any) -> Any:
    """decode_attention into an output full of NaN, with lse."""
    out = problem.pool.backend.asarray(np.full_like(q, np.nan))
    result, lse = decode_attention(
        q, problem.pool, problem.page_table, problem.seq_lens, out=out, return_lse=True, **options
    )
    assert result is out
    return host(out), host(lse)


def check(problem: Problem, q: Array, dtype: str = "float32", query_lens: list[int] | None = None) -> None:
    out, lse = decode(problem, q, query_lens=query_lens)
    expected_out, expected_lse = problem.expected(q, query_lens)
    assert_close(out, expected_out, dtype)
    assert_close(lse, expected_lse, "float32")


# Against float64


@pytest.mark.parametrize("seed", range(60))
def test_decode_of_random_shapes(device: str, seed: int) -> None:
    if device == "ptx" and seed % 2:
        pytest.skip("every other shape, to save time")
    rng = np.random.default_rng(seed)
    spec = small_spec(
        num_kv_heads=int(rng.integers(1, 5)),
        head_dim=int(rng.choice(HEAD_DIMS)),
        page_size=int(rng.choice([1, 2, 3, 7, 16, 32, 100, 256])),
        dtype=str(rng.choice(list(STORAGE_DTYPES))),
        layout=str(rng.choice(list(LAYOUTS))),
        row_align=ROW_ALIGNS[rng.integers(len(ROW_ALIGNS))],
    )
    lengths = [int(n) for n in rng.choice([0, 1, 2, 15, 16, 17, 63, 300, 700], size=rng.integers(1, 5))]
    group, dtype = int(rng.integers(1, 17)), str(rng.choice(list(STORAGE_DTYPES)))
    query_lens = [int(rng.integers(0, min(5, max(n, 1)) + 1)) for n in lengths] if rng.random() < 0.4 else None
    problem = make_problem(spec, lengths, device, seed)
    count = sum(query_lens) if query_lens is not None else len(lengths)
    check(problem, problem.queries(count, group, dtype), dtype, query_lens)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", list(STORAGE_DTYPES))
def test_bug_B30_every_head_dim(device: str, head_dim: int, dtype: str) -> None:
    problem = make_problem(small_spec(head_dim=head_dim, dtype=dtype), [5, 0, 17], device, head_dim)
    check(problem, problem.queries(3, 3, dtype), dtype)


@pytest.mark.parametrize("heads", [(28, 4), (40, 8), (14, 2), (9, 3), (24, 4), (32, 2), (71, 1), (8, 8)])
def test_bug_B28_any_group(device: str, heads: tuple[int, int]) -> None:
    problem = make_problem(small_spec(num_kv_heads=heads[1]), [21, 6], device)
    check(problem, problem.queries(2, heads[0] // heads[1]))


@pytest.mark.parametrize("heads", [(10, 4), (2, 4), (0, 4)])
def test_bug_B28_heads_that_do_not_divide(device: str, heads: tuple[int, int]) -> None:
    problem = make_problem(small_spec(num_kv_heads=heads[1]), [3], device)
    with pytest.raises(ValueError, match=f"multiple of the pool's {heads[1]} KV heads as its heads, got {heads[0]}"):
        decode(problem, np.zeros((1, heads[0], 32), np.float32))


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("page_size", [1, 3, 256, 3000])
def test_long_sequences_in_every_layout(device: str, layout: str, page_size: int) -> None:
    problem = make_problem(small_spec(layout=layout, page_size=page_size), [2900, 1025, 511], device)
    check(problem, problem.queries(3, 5))


def test_query_lens_are_causal(device: str) -> None:
    problem = make_problem(small_spec(), [9, 0, 30, 7], device)
    query_lens = [9, 2, 3, 0]
    check(problem, problem.queries(14, 2), query_lens=query_lens)


@pytest.mark.parametrize("page_size", [16, 1])
def test_bug_B13_tile_tails(device: str, page_size: int) -> None:
    lengths = [1, 15, 16, 17, 31, 33, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1025]
    spec = small_spec(num_kv_heads=1, page_size=page_size, dtype="float32")
    problem = make_problem(spec, lengths, device)
    for row, length in enumerate(lengths):
        v = np.broadcast_to(np.arange(length, dtype=np.float32)[:, None, None], (length, 1, 32))
        append(problem.keys[row], v, problem.pool, problem.slots(row))
    out, lse = decode(problem, np.zeros((len(lengths), 2, 32), np.float32))
    expected = (np.array(lengths) - 1) / 2
    np.testing.assert_allclose(out, np.broadcast_to(expected[:, None, None], out.shape), atol=1e-3)
    np.testing.assert_allclose(lse, np.broadcast_to(np.log(lengths)[:, None], lse.shape), atol=1e-5)


# What must not leak in


@pytest.mark.parametrize("dtype", list(STORAGE_DTYPES))
def test_bug_B11_nan_past_the_end(device: str, dtype: str) -> None:
    problem = make_problem(small_spec(dtype=dtype, row_align=128), [13], device)
    check(problem, problem.queries(1, 4, dtype), dtype)


@pytest.mark.parametrize("lengths", [[0, 5, 0, 17], [0, 0, 0], [0]])
def test_bug_B08_sequences_without_tokens(device: str, lengths: list[int]) -> None:
    problem = make_problem(small_spec(), lengths, device)
    q = problem.queries(len(lengths), 2)
    out, lse = decode(problem, q)
    for row, length in enumerate(lengths):
        if length == 0:
            assert (out[row] == 0).all()
            assert (lse[row] == -np.inf).all()
    check(problem, q)


def test_an_empty_batch(device: str) -> None:
    problem = make_problem(small_spec(), [3], device)
    out = decode_attention(
        np.zeros((0, 2, 32), np.float16), problem.pool, np.zeros((0, 1), np.int32), np.zeros(0, np.int32)
    )
    assert out.shape == (0, 2, 32)


def test_nan_stays_in_its_own_sequence_and_head(device: str) -> None:
    problem = make_problem(small_spec(dtype="float32"), [9, 9], device)
    k, v = problem.keys[0].copy(), problem.values[0]
    k[4, 1, 7] = np.nan
    append(k, v, problem.pool, problem.slots(0))
    q = problem.queries(2, 2)
    out, _ = decode(problem, q)
    expected, _ = problem.expected(q)
    assert np.isnan(out[0, 2:]).all()
    assert_close(out[0, :2], expected[0, :2], "float32")
    assert_close(out[1], expected[1], "float32")


def test_unchecked_calls_stay_inside_the_pool(device: str) -> None:
    """With check=False a bad page id is skipped and a length is clamped to what the row can hold."""
    problem = make_problem(small_spec(page_size=4), [12], device)
    table = problem.page_table[:, :3].copy()
    table[0, 1] = problem.pool.num_pages
    kept = np.r_[0:4, 8:12]
    problem.keys[0], problem.values[0] = problem.keys[0][kept], problem.values[0][kept]
    q = problem.queries(1, 3)
    out = decode_attention(q, problem.pool, table, np.array([2**31 - 1], np.int32), check=False)
    problem.seq_lens = np.array([8], np.int32)
    assert_close(out, problem.expected(q)[0], "float32")
    before = problem.pool.array.copy()
    append(*np.ones((2, 4, 2, 32), np.float16), problem.pool, [-5, -1, problem.pool.num_slots, 2**62], check=False)
    assert_same(problem.pool.array, before)


@pytest.mark.parametrize("query_lens", [[0, 0], [1, 0], [0, 1], [5, 5], [-3, 2], [100_000, 100_000], [2**30, 2**30]])
def test_unchecked_query_lens_stay_inside_q(device: str, query_lens: list[int]) -> None:
    """Unless they add up, what they mean is undefined; but a row they do give is right, and no memory is touched."""
    problem = make_problem(small_spec(page_size=4), [12, 7], device)
    q = problem.queries(2, 3)
    before = host(problem.pool.array).copy()
    out = decode_attention(
        on_device(device, q), problem.pool, problem.page_table, problem.seq_lens, query_lens=query_lens, check=False
    )
    if query_lens == [1, 0]:
        assert_close(host(out)[0], problem.expected(q)[0][0], "float32")
    np.testing.assert_array_equal(host(problem.pool.array), before)


def unaligned(array: Array) -> Array:
    """The same values, one byte off."""
    buffer = np.empty(array.nbytes + 1, np.uint8)
    view = buffer[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def test_unaligned_arrays_equal_their_copies(device: str) -> None:
    if device == "cuda":
        pytest.skip("CuPy makes no unaligned arrays")
    problem = make_problem(small_spec(), [9], device)
    append(unaligned(problem.keys[0]), unaligned(problem.values[0]), problem.pool, unaligned(problem.slots(0)))
    q, table, lengths = problem.queries(1, 2), problem.page_table, problem.seq_lens
    out = unaligned(np.full_like(q, np.nan))
    decode_attention(unaligned(q), problem.pool, unaligned(table), unaligned(lengths), out=out)
    assert_close(out, problem.expected(q)[0], "float32")
    with pytest.raises(ValueError, match="data must start at a multiple of 2 bytes for float16"):
        LayerPool.wrap(small_spec(), unaligned(np.zeros((3, 2, 4, 2, 32), np.float16)), device=device)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_are_rounded_to_nearest_even(device: str, dtype: str) -> None:
    """The result over one token is its V, rounded to q's type: ties and all."""
    spec = small_spec(num_kv_heads=1, head_dim=256, dtype="float32", page_size=1)
    pool = poisoned_pool(spec, 1, device)[0]
    half = STORAGE_DTYPES[dtype]
    exact = np.arange(0x3C00, 0x3C00 + 255, dtype=np.uint16).view(half).astype(np.float32)
    v = np.append((exact[1:] + exact[:-1]) / 2, [1.0, -1.0]).astype(np.float32).reshape(1, 1, 256)
    append(np.ones_like(v), v, pool, [0])
    out = decode_attention(np.ones((1, 1, 256), half), pool, [[0]], [1])
    np.testing.assert_array_equal(host(out).view(np.uint16), v.astype(half).view(np.uint16))


@pytest.mark.parametrize("head_dim", [1, 20, 100])
def test_padding_that_others_wrote_is_not_read(device: str, head_dim: int) -> None:
    """A wrapped pool's rows may end in anything; nothing of it reaches a result."""
    problem = make_problem(small_spec(head_dim=head_dim, dtype="float16", row_align=64), [11, 3], device)
    spec = problem.pool.spec
    memory = host(problem.pool.array).reshape(-1, spec.row_bytes).copy()
    memory[:, head_dim * 2 :] = 0xFF
    problem.pool.array[...] = on_device(device, memory.reshape(problem.pool.array.shape))
    check(problem, problem.queries(2, 3))


class OnlyDLPack:
    """An array of a library that shares memory by DLPack and nothing else."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_dlpack_arrays_go_in(device: str) -> None:
    problem = make_problem(small_spec(), [9], device)
    k, v, slots = (OnlyDLPack(array) for array in (problem.values[0], problem.keys[0], problem.slots(0)))
    append(k, v, problem.pool, slots)
    q = problem.queries(1, 2)
    out = decode_attention(OnlyDLPack(q), problem.pool, problem.page_table, OnlyDLPack(problem.seq_lens))
    problem.keys, problem.values = problem.values, problem.keys
    assert_close(host(out), problem.expected(q)[0], "float32")


# append and gather


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("row_align", ROW_ALIGNS)
@pytest.mark.parametrize("dtype", list(STORAGE_DTYPES))
def test_append_writes_its_slots_and_zero_padding_alone(
    device: str, layout: str, row_align: int | str, dtype: str
) -> None:
    spec = small_spec(head_dim=5, layout=layout, row_align=row_align, dtype=dtype)
    pool = poisoned_pool(spec, 6, device)[0]
    rng = np.random.default_rng(1)
    slots = rng.permutation(24)[:7]
    slots[3] = -1
    k, v = (rng.standard_normal((7, 2, 5)).astype(STORAGE_DTYPES[dtype]) for _ in range(2))
    expected = host(pool.array).copy()
    for token, slot in enumerate(slots):
        for head in range(2):
            for kv, source in enumerate((k, v)):
                offset = spec.strides.offset(slot // 4, head, slot % 4, kv)
                row = source[token, head].tobytes() + bytes(spec.padding_bytes_per_row)
                if slot >= 0:
                    expected.reshape(-1)[offset : offset + spec.row_bytes] = np.frombuffer(row, np.uint8)
    append(k, v, pool, slots)
    assert_same(pool.array, expected)
    kept = slots >= 0
    for got, want in zip(gather(pool, slots[kept]), (k, v), strict=True):
        assert got.dtype == STORAGE_DTYPES[dtype]
        assert_same(got, want[kept])


def test_bug_B06_slot_minus_one_is_skipped(device: str) -> None:
    spec = small_spec(dtype="float32", num_kv_heads=1, head_dim=8, page_size=4)
    pool = poisoned_pool(spec, 4, device)[0]
    everywhere = np.arange(16)
    append(*np.full((2, 16, 1, 8), 7, np.float32), pool, everywhere)
    append(*np.ones((2, 3, 1, 8), np.float32), pool, [-1, 5, -1])
    for stored in gather(pool, everywhere):
        assert_same(stored[:, 0, 0], np.where(everywhere == 5, 1, 7))


@pytest.mark.parametrize("slots", [[0, 24], [0, -2], [2**40, 0]])
def test_append_refuses_slots_outside_the_pool(device: str, slots: list[int]) -> None:
    pool = poisoned_pool(small_spec(), 6, device)[0]
    with pytest.raises(ValueError, match=r"slot_mapping must be -1 or 0 to 23 \(6 pages of 4\), got"):
        append(*np.ones((2, 2, 2, 32), np.float16), pool, slots)
    assert (pool.array == 0xFF).all()


@pytest.mark.parametrize("source", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", list(STORAGE_DTYPES))
def test_append_rounds_to_the_stored_type(device: str, source: Any, dtype: str) -> None:
    pool = poisoned_pool(small_spec(dtype=dtype), 2, device)[0]
    k, v = (np.random.default_rng(2).standard_normal((2, 5, 2, 32)) * 1e4).astype(source)
    with np.errstate(over="ignore"):
        expected = k.astype(STORAGE_DTYPES[dtype])
    append(k, v, pool, np.arange(5))
    assert_same(gather(pool, np.arange(5))[0], expected)


def test_bfloat16_travels_as_uint16(device: str) -> None:
    problem = make_problem(small_spec(dtype="bfloat16"), [6], device)
    append(problem.keys[0].view(np.uint16), problem.values[0].view(np.uint16), problem.pool, problem.slots(0))
    q = problem.queries(1, 2, "bfloat16")
    bits = decode_attention(q.view(np.uint16), problem.pool, problem.page_table, problem.seq_lens)
    assert bits.dtype == np.uint16
    assert_close(host(bits).view(ml_dtypes.bfloat16), problem.expected(q)[0], "bfloat16")


def test_bug_B32_strided_inputs_equal_their_copies(device: str) -> None:
    problem = make_problem(small_spec(), [11, 4], device)
    rng = np.random.default_rng(3)
    big = rng.standard_normal((11, 4, 64)).astype(np.float16)
    variants = [
        big[:, ::2, :32],
        big[:, ::2, ::2],
        big[::-1, :2, 32:],
        np.asfortranarray(big[:, :2, :32]),
        big[:, :2, :32].transpose(1, 0, 2).copy().transpose(1, 0, 2),
    ]
    for variant in variants:
        append(variant, variant[::-1], problem.pool, problem.slots(0))
        k, v = map(host, gather(problem.pool, problem.slots(0)))
        assert_same(k, variant)
        assert_same(v, variant[::-1])
    problem.keys[0], problem.values[0] = k, v
    base = problem.rng.standard_normal((2, 32, 4)).astype(np.float32)
    q = base.transpose(0, 2, 1)
    assert_close(decode(problem, q)[0], problem.expected(q)[0], "float32")
    buffer = on_device(device, np.full((2, 4, 40), 9, np.float32))
    out = buffer[:, :, :32]
    assert decode_attention(q, problem.pool, problem.page_table, problem.seq_lens, out=out) is out
    assert_close(out, problem.expected(q)[0], "float32")
    assert (buffer[:, :, 32:] == 9).all()
    fortran = np.asfortranarray(problem.page_table)
    assert_same(decode_attention(q, problem.pool, fortran, problem.seq_lens), out)


# Memory that the caller owns


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_bug_B26_one_layer_of_an_interleaved_buffer(device: str, layout: str) -> None:
    """Strides, not shapes, say where a row lies: neighbouring layers keep every byte."""
    spec = small_spec(layout=layout, dtype="float32", num_kv_heads=3)
    sizes = {"head": 3, "token": 4, "kv": 2}
    shape = (5, 3, *(sizes[axis] for axis in LAYOUTS[layout]), 40)
    buffer = on_device(device, np.full(shape, np.nan, np.float32))
    pool = LayerPool.wrap(spec, buffer[:, 1], device=device)
    assert pool.num_pages == 5
    k, v = np.random.default_rng(4).standard_normal((2, 6, 3, 32)).astype(np.float32)
    slots = np.array([0, 3, 4, 7, 18, 19])
    append(k, v, pool, slots)
    for got, want in zip(gather(pool, slots), (k, v), strict=True):
        assert_same(got, want)
    buffer = host(buffer)
    assert np.isnan(buffer[:, [0, 2]]).all()
    order = [LAYOUTS[layout].index(axis) for axis in ("token", "head", "kv")]
    stored = np.moveaxis(buffer[:, 1], [1 + axis for axis in order], [1, 2, 3]).reshape(20, 3, 2, 40)
    assert_same(stored[slots, :, 0, :32], k)
    assert (stored[slots, :, :, 32:] == 0).all()


def test_wrap_by_strides(device: str) -> None:
    """vLLM's [2, pages, page_size, heads, head_dim]: layout nhd with the K and V planes apart."""
    spec = small_spec(layout="nhd", dtype="float16")
    buffer = on_device(device, np.full((2, 6, 4, 2, 32), np.nan, np.float16))
    page = 4 * 2 * 32 * 2
    pool = LayerPool.wrap(spec, buffer, strides=Strides(page=page, head=64, token=128, kv=6 * page), device=device)
    assert pool.num_pages == 6
    k, v = np.random.default_rng(5).standard_normal((2, 3, 2, 32)).astype(np.float16)
    append(k, v, pool, [1, 23, 8])
    buffer = host(buffer)
    assert_same(buffer[0].reshape(24, 2, 32)[[1, 23, 8]], k)
    assert_same(buffer[1].reshape(24, 2, 32)[[1, 23, 8]], v)
    assert np.isnan(buffer).sum() == buffer.size - k.size * 2


def test_wrap_refuses_what_does_not_fit(device: str) -> None:
    spec = small_spec()

    def wrap(data: Any, strides: Strides | None = None) -> Any:
        return LayerPool.wrap(spec, data, strides=strides, device=device)

    good = on_device(device, np.zeros((3, 2, 4, 2, 32), np.float16))
    wrap(good)
    with pytest.raises(ValueError, match=re.escape("[pages, head 2, token 4, kv 2, head_dim 32 or more]")):
        wrap(good[:, :, :3])
    with pytest.raises(ValueError, match="head_dim 32 or more"):
        wrap(good[..., :31])
    with pytest.raises(
        TypeError, match="data must have elements of float16, as the spec stores float16, got float32"
    ):
        wrap(good.astype(np.float32))
    with pytest.raises(ValueError, match="contiguous last axis"):
        wrap(on_device(device, np.zeros((3, 2, 4, 2, 64), np.float16))[..., ::2])
    with pytest.raises(ValueError, match=r"strides\.page must be at least \d+ bytes, or rows overlap; got 0"):
        wrap(np.broadcast_to(good[:1], good.shape))
    with pytest.raises(ValueError, match="at least one page"):
        wrap(good[:0])
    with pytest.raises(ValueError, match="at least one page"):
        wrap(good[0, 0, 0], Strides(1024, 512, 128, 64))
    with pytest.raises(TypeError, match=r"strides must be kvcupy\.Strides, got \(1024,"):
        wrap(good, (1024, 512, 128, 64))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"strides\.page must be a whole number, got 1024\.0"):
        Strides(1024.0, 512, 128, 64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows overlap"):
        wrap(good, Strides(1024, 512, 64, 64))
    with pytest.raises(ValueError, match="must be one of float32, float16, bfloat16 to be stored"):
        LayerPool.wrap(small_spec(dtype="int8"), good, device=device)
    if device == "cuda":
        with pytest.raises(TypeError, match=r"data must lie in the memory of device cuda, got numpy\.ndarray"):
            wrap(host(good))
        return
    frozen = good.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="pool must be writable"):
        append(*np.ones((2, 1, 2, 32), np.float16), wrap(frozen), [0])


# Arguments


def test_bug_B03_lengths_that_the_table_cannot_hold(device: str) -> None:
    problem = make_problem(small_spec(page_size=16), [48, 48], device)
    q = problem.queries(2, 1)
    table = problem.page_table[:, :3]
    decode_attention(q, problem.pool, table, [48, 48])
    with pytest.raises(ValueError, match=r"seq_lens must be 0 to 48, .*3 pages of 16 holds; row 1 has 49"):
        decode_attention(q, problem.pool, table, [48, 49])
    with pytest.raises(ValueError, match="row 0 has -1"):
        decode_attention(q, problem.pool, table, [-1, 48])


def test_page_ids_outside_the_pool(device: str) -> None:
    problem = make_problem(small_spec(page_size=16), [48, 20], device)
    for bad in (-1, problem.pool.num_pages):
        table = problem.page_table.copy()
        table[1, 1] = bad
        with pytest.raises(ValueError, match=f"row 1 has {bad} at column 1"):
            decode_attention(problem.queries(2, 1), problem.pool, table, problem.seq_lens)


def test_bug_B31_scales(device: str) -> None:
    problem = make_problem(small_spec(), [7], device)
    q = problem.queries(1, 2)
    given: list[Any] = [0.125, np.float32(0.125), np.float64(0.125), Fraction(1, 8), np.array(0.125)]
    results = [decode(problem, q, scale=scale)[0] for scale in given]
    for result in results[1:]:
        assert_same(result, results[0])
    assert_close(results[0], problem.expected(q, scale=0.125)[0], "float32")
    assert_same(decode(problem, q, scale=1)[0], decode(problem, q, scale=1.0)[0])
    for integers in ([7], np.int64([7]), np.uint8([7])):
        problem.seq_lens = integers  # type: ignore[assignment]
        assert_same(decode(problem, q, scale=0.125)[0], results[0])
    for bad in ("1", True, 1j, None.__class__, np.ones(2)):
        with pytest.raises(TypeError, match="scale must be a real number"):
            decode(problem, q, scale=bad)
    for bad in (np.nan, np.inf, 10**400, -1e39):
        with pytest.raises(ValueError, match="scale must be finite"):
            decode(problem, q, scale=bad)
    problem.seq_lens = np.array([True])
    with pytest.raises(TypeError, match="seq_lens must be whole numbers, got bool"):
        decode(problem, q)


def test_bad_arguments_are_named(device: str) -> None:
    problem = make_problem(small_spec(), [3, 9], device)
    pool, table, lengths = problem.pool, problem.page_table, problem.seq_lens
    q, k = problem.queries(2, 2), np.ones((3, 2, 32), np.float16)
    before, near = pool.array.copy(), on_device(device, q)
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "q must have shape", lambda: decode_attention(q[0], pool, table, lengths)),
        (ValueError, "q must have shape", lambda: decode_attention(q[..., :31], pool, table, lengths)),
        (TypeError, "q must be float32", lambda: decode_attention(q.astype(int), pool, table, lengths)),
        (TypeError, "q must be float32", lambda: decode_attention(q.astype(np.uint16), pool, table, lengths)),
        (ValueError, "one token for each of 2 seq", lambda: decode_attention(q[:1], pool, table, lengths)),
        (ValueError, r"page_table must have shape", lambda: decode_attention(q, pool, table[0], lengths)),
        (TypeError, "page_table must be whole", lambda: decode_attention(q, pool, table * 1.0, lengths)),
        (ValueError, r"seq_lens must have shape \[2\]", lambda: decode_attention(q, pool, table, lengths[:1])),
        (ValueError, "seq_lens must fit int32", lambda: decode_attention(q, pool, table, [3, 2**31])),
        (ValueError, "sum to q's 2", lambda: decode_attention(q, pool, table, lengths, query_lens=[2, 1])),
        (ValueError, "values from -1", lambda: decode_attention(q, pool, table, lengths, query_lens=[3, -1])),
        (
            ValueError,
            "row 0 has 4 query tokens of 3",
            lambda: decode_attention(np.repeat(q, 2, 0), pool, table, lengths, query_lens=[4, 0]),
        ),
        (ValueError, "out must be float32", lambda: decode_attention(q, pool, table, lengths, out=near[:1])),
        (
            ValueError,
            "out must be float32",
            lambda: decode_attention(q, pool, table, lengths, out=near.astype(np.float16)),
        ),
        (ValueError, "k and v must have one shape", lambda: append(k, k[:2], pool, [0, 1, 2])),
        (ValueError, r"k must have shape \[tokens, 2, 32\]", lambda: append(k[:, :1], k, pool, [0, 1, 2])),
        (ValueError, "v must have shape", lambda: append(k, k[0], pool, [0, 1, 2])),
        (TypeError, "k must be floating point", lambda: append(k.astype(int), k, pool, [0, 1, 2])),
        (ValueError, "a token for each of 2 slots, got 3", lambda: append(k, k, pool, [0, 1])),
        (ValueError, "slot_mapping must have shape", lambda: append(k, k, pool, [[0, 1, 2]])),
        (TypeError, "slot_mapping must be whole", lambda: append(k, k, pool, [0.0, 1.0, 2.0])),
        (ValueError, "slots must be 0 to", lambda: gather(pool, [-1])),
    ]
    for error, words, call in cases:
        with pytest.raises(error, match=words):
            call()
    assert_same(pool.array, before)


# merge_states


def test_bug_B09_merging_nothing(device: str) -> None:
    zero, value = np.zeros((1, 8), np.float32), np.arange(8, dtype=np.float32)[None]
    none, two = np.array([-np.inf], np.float32), np.array([2.0], np.float32)
    out, lse = merge_states(zero, none, zero, none, device=device)
    assert ((out == 0).all(), lse[0]) == (True, -np.inf)
    for arguments in ((zero, none, value, two), (value, two, zero, none)):
        out, lse = merge_states(*arguments, device=device)
        assert_same(out, value)
        assert lse[0] == 2.0
    junk = np.full((1, 8), np.nan, np.float32)
    for arguments in ((junk, none, value, two), (value, two, junk, none)):
        assert_same(merge_states(*arguments, device=device)[0], value)


@pytest.mark.parametrize("dtype", list(STORAGE_DTYPES))
def test_merging_two_halves_is_the_whole(device: str, dtype: str) -> None:
    problem = make_problem(small_spec(page_size=4), [40, 9, 4], device)
    q = problem.queries(3, 3, dtype)
    lengths = np.array([16, 8, 4], np.int32)
    first = decode_attention(q, problem.pool, problem.page_table, lengths, return_lse=True)
    rest = np.zeros((3, 7), np.int32)
    for row, length in enumerate(lengths):
        pages = problem.page_table[row, length // 4 : -(-int(problem.seq_lens[row]) // 4)]
        rest[row, : len(pages)] = pages
    second = decode_attention(q, problem.pool, rest, problem.seq_lens - lengths, return_lse=True)
    out, lse = merge_states(*first, *second, device=device)
    expected_out, expected_lse = problem.expected(q)
    assert out.dtype == q.dtype
    assert_close(out, expected_out, dtype)
    assert_close(lse, expected_lse, "float32")


def test_merge_refuses_what_does_not_match() -> None:
    out, lse = np.zeros((2, 8), np.float32), np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="out_a and out_b must have one shape"):
        merge_states(out, lse, out[:1], lse)
    with pytest.raises(ValueError, match=r"lse_b must have shape \[2\], got \[1\]"):
        merge_states(out, lse, out, lse[:1])
    with pytest.raises(TypeError, match="out_a and out_b must share one of"):
        merge_states(out, lse, out.astype(np.float16), lse)
