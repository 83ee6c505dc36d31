"""The CUDA kernels beyond what every device is tested for: addresses, plans, shares, warp orders, compilation."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import Array, Problem, assert_close, make_problem, poisoned_pool

import kvcupy
from kvcupy import DeviceUnavailable, KVSpec, append, decode_attention, gather
from kvcupy.backends.base import STORAGE_DTYPES, Layer
from kvcupy.backends.kernels import Memory
from kvcupy.backends.plan import DecodePlan, decode_variant, widest
from kvcupy.backends.source import (
    CopyPagesVariant,
    DecodeVariant,
)
from kvcupy.pool import LayerPool
from kvcupy.spec import LAYOUTS, ROW_ALIGNS

try:
    from kvcupy.backends.ptx.device import PtxBackend

    PtxBackend()
except DeviceUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

from kvcupy.backends.ptx.memory import SparseBuffer


def on(backend: PtxBackend, pool: LayerPool) -> LayerPool:
    """The same memory, seen by another backend."""
    return LayerPool(backend, pool.layer, pool.array)


# Addresses


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_bug_B01_pools_beyond_32_bits(layout: str) -> None:
    """Tokens in a page 8 GiB from the start give what they give in page 0 of a small pool."""
    backend = PtxBackend(grid=8)
    spec = KVSpec(num_layers=1, num_kv_heads=8, head_dim=128, page_size=16, layout=layout)
    num_pages = 131_080
    last_row = spec.strides.offset(num_pages - 1, 7, 5, 1)
    assert last_row > 2**31 * spec.itemsize
    memory = SparseBuffer(num_pages * spec.strides.page, fill=0xFF, name="pool")
    backend.adopt(memory)
    far = LayerPool(backend, Layer(spec, num_pages, memory.address, spec.strides, 0), None)
    near = on(backend, poisoned_pool(spec, 4, "ptx")[0])
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 6, 8, 128)).astype(np.float16)
    q = rng.standard_normal((1, 16, 128)).astype(np.float32)
    results = []
    for pool, page in ((near, 0), (far, num_pages - 1)):
        slots = page * 16 + np.arange(6)
        append(k, v, pool, slots)
        results.append((*gather(pool, slots), *decode_attention(q, pool, [[page]], [6], return_lse=True)))
    assert memory.read(last_row, 256) == v[5, 7].tobytes()
    assert np.isfinite(results[0][2]).all()
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
    assert memory.touched_bytes < 1 << 22


def test_bug_B01_pages_are_copied_beyond_32_bits() -> None:
    """From the last page of the second layer to one in the middle, both more than 4 GiB from the start."""
    num_pages, page_stride, moved = 70_000, 65_536, (69_999, 40_000)
    backend = PtxBackend()
    memory = SparseBuffer(2 * num_pages * page_stride, fill=0xFF, name="pool")
    backend.adopt(memory)
    content = np.random.default_rng(0).integers(0, 256, (2, page_stride), np.uint8)
    for layer in range(2):
        memory.write((layer * num_pages + moved[0]) * page_stride, content[layer])
    sources, destinations = (np.array([page]) for page in moved)
    sizes = np.int64(page_stride), np.int32(num_pages)
    pool = Memory(memory.address, memory.nbytes)
    arguments = (pool, *sizes, sources, destinations, np.int32(1))
    backend.launch(CopyPagesVariant(16), "copy_pages", (page_stride // 16 // 256, 2), 256, *arguments)
    for layer in range(2):
        read = memory.read((layer * num_pages + moved[1]) * page_stride, page_stride)
        assert bytes(read) == content[layer].tobytes()
    assert memory.touched_bytes <= 4 * page_stride + 4 * SparseBuffer.PAGE_BYTES


@pytest.mark.parametrize("dtype", list(STORAGE_DTYPES))
def test_append_is_the_same_on_every_device(dtype: str) -> None:
    rng = np.random.default_rng(1)
    for layout in LAYOUTS:
        for row_align in ROW_ALIGNS:
            head_dim = int(rng.integers(1, 100))
            spec = KVSpec(
                num_layers=1, num_kv_heads=3, head_dim=head_dim, dtype=dtype, layout=layout, row_align=row_align
            )
            k, v = rng.standard_normal((2, 20, 3, head_dim)).astype(np.float32)
            slots = rng.permutation(48)[:20]
            arrays = []
            for device in ("cpu", "ptx"):
                pool = poisoned_pool(spec, 3, device)[0]
                append(k, v, pool, slots)
                arrays.append(pool.array)
            np.testing.assert_array_equal(*arrays)


# Plans


def test_widest_access() -> None:
    assert widest(0, 32, 256) == 16
    assert widest(48, 40) == 8
    assert widest(64, 2) == 2
    assert widest(3) == 1
    assert widest(4096, limit=128) == 128


def decode_of(**changes: Any) -> DecodeVariant:
    shape = {"kv": "float16", "q": "float16", "head_dim": 128, "page_size": 16, "rows": 4}
    return decode_variant(**{**shape, "load_bytes": 16, "q_load_bytes": 16, **changes})


def test_decode_variants_fit_registers_and_rows() -> None:
    llama = decode_of()
    assert (llama.rows, llama.lanes, llama.chunk, llama.threads) == (4, 16, 32, 128)
    for rows in range(1, 100):
        for head_dim in (1, 64, 125, 128, 512):
            for kv, width in (("float16", 16), ("float32", 16), ("bfloat16", 2)):
                variant = decode_of(rows=rows, head_dim=head_dim, kv=kv, load_bytes=width)
                vector = width // STORAGE_DTYPES[kv].itemsize
                elements = -(-head_dim // (vector * variant.lanes)) * vector
                assert variant.rows * elements <= 64
                assert variant.lanes * elements >= head_dim
                passes = -(-rows // variant.rows)
                assert passes * (variant.rows - 1) < rows <= passes * variant.rows
                assert variant.chunk % (variant.threads // variant.lanes) == 0


def test_plan_sizes() -> None:
    plan = DecodePlan(decode_of(), grid=10)
    # Per block and row: 16 bytes of where to, and two parts of a maximum, a sum and 128 elements.
    assert plan.workspace_bytes == 10 * 4 * (16 + 2 * (4 + 4 + 512))
    assert (plan.block, plan.merge_grid, plan.merge_block) == (128, (10, 4), 128)
    assert DecodePlan(decode_of(head_dim=40), 1).merge_block == 64
    assert plan.units(length=0, num_kv_heads=8, rows=4) == 8
    assert plan.units(length=33, num_kv_heads=8, rows=12) == 8 * 3 * 2
    assert plan.shares(95) == [10] * 9 + [5]
    assert plan.shares(3) == [1] * 3 + [0] * 7
    for total in range(200):
        assert sum(plan.shares(total)) == total


# Shares


@pytest.mark.parametrize("seed", range(5))
def test_shares_read_every_row_once(seed: int) -> None:
    """Whatever the number of thread blocks, each row of K and V is read once per pass, and the result is right."""
    rng = np.random.default_rng(seed)
    spec = KVSpec(num_layers=1, num_kv_heads=int(rng.integers(1, 4)), head_dim=64, page_size=int(rng.choice([3, 16])))
    lengths = [int(n) for n in rng.choice([0, 1, 31, 32, 33, 64, 200], size=rng.integers(1, 9))]
    problem = make_problem(spec, lengths, "ptx", seed)
    group = int(rng.integers(1, 12))
    q = problem.queries(len(lengths), group, "float32")
    out, lse = problem.expected(q)
    source = (Path(kvcupy.__file__).parent / "cuda/decode_attention.cu").read_text().splitlines()
    load = next(number for number, line in enumerate(source, 1) if "reinterpret_cast<const Load*>" in line)
    for grid in (1, 3, 16, 70):
        backend = PtxBackend(grid=grid)
        pool = on(backend, problem.pool)
        with backend.record() as reports:
            got = decode_attention(q, pool, problem.page_table, problem.seq_lens, return_lse=True)
        assert_close(got[0], out, "float32")
        assert_close(got[1], lse, "float32")
        rows = backend.decode_plan(pool.layer, q, len(lengths)).variant.rows
        lines = reports[0].lines.items()
        read = sum(counts.useful_bytes for line, counts in lines if f"decode_attention.cu:{load}" in str(line))
        assert read == 2 * sum(lengths) * spec.num_kv_heads * 128 * -(-group // rows)


@pytest.fixture(scope="module")
def shuffled() -> Problem:
    return make_problem(KVSpec(num_layers=1, num_kv_heads=2, head_dim=40, page_size=8), [70, 0, 33], "ptx")


def results_of_every_kernel(problem: Problem, backend: PtxBackend) -> list[Array]:
    """What each kernel makes of one problem, with every check of the interpreter on."""
    spec = problem.pool.spec
    pool = on(backend, problem.pool)
    q = np.random.default_rng(1).standard_normal((5, 10, 40)).astype(np.float32)
    options: Any = {"query_lens": [3, 1, 1], "return_lse": True}
    results = list(decode_attention(q, pool, problem.page_table, problem.seq_lens, **options))
    half = problem.seq_lens // 2
    other = decode_attention(q, pool, problem.page_table, half, **options)
    rows = [array.reshape(50, -1) if array.ndim == 3 else array.reshape(50) for array in (*results, *other)]
    results += [np.full((50, 40), np.nan, np.float32), np.full(50, np.nan, np.float32)]
    backend.merge_states(*rows, *results[2:])
    target = on(backend, poisoned_pool(spec, pool.num_pages, "ptx")[0])
    slots = problem.slots(0)
    append(problem.keys[0], problem.values[0], target, slots)
    results += gather(target, slots)
    data = problem.pool.array.reshape(1, pool.num_pages, -1).copy()
    backend.copy_pages(data, np.array([0, 2, 0]), np.array([1, 3, 2]))
    return [*results, data]


@pytest.fixture(scope="module", params=[("compute_80", 20), ("compute_70", 3), ("compute_90", 3)], ids=lambda p: p[0])
def in_order(request: pytest.FixtureRequest, shuffled: Problem) -> tuple[PtxBackend, int, list[Array]]:
    """A backend, how many orders to try on it, and the results of its own order."""
    arch, orders = request.param
    backend = PtxBackend(arch, grid=5)
    return backend, orders, results_of_every_kernel(shuffled, backend)


def test_warps_in_any_order_give_the_same_bits(
    shuffled: Problem, in_order: tuple[PtxBackend, int, list[Array]]
) -> None:
    """No kernel raises a fault in any order of its warps, nor does a result depend on it."""
    backend, orders, expected = in_order
    for seed in range(orders):
        in_random_order = copy.copy(backend)  # its kernels are compiled
        in_random_order.seed = seed
        for one, other in zip(results_of_every_kernel(shuffled, in_random_order), expected, strict=True):
            np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8), err_msg=f"seed {seed}")


def test_many_sequences() -> None:
    """More sequences than a block has threads, so that finding one's share takes several steps."""
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, page_size=8)
    lengths = [int(n) for n in np.random.default_rng(5).integers(0, 20, 300)]
    problem = make_problem(spec, lengths, "ptx")
    backend = PtxBackend(grid=40)
    query_lens = [min(length, index % 4) for index, length in enumerate(lengths)]
    q = problem.queries(sum(query_lens), 2)
    out, lse = decode_attention(
        q, on(backend, problem.pool), problem.page_table, lengths, query_lens=query_lens, return_lse=True
    )
    expected_out, expected_lse = problem.expected(q, query_lens)
    assert_close(out, expected_out, "float32")
    assert_close(lse, expected_lse, "float32")


def test_query_tokens_do_not_see_nan_after_them() -> None:
    """Query tokens of a sequence share a pass, yet NaN in a later token's V stays out of the earlier ones."""
    problem = make_problem(KVSpec(num_layers=1, num_kv_heads=1, head_dim=32, dtype="float32"), [40], "ptx")
    problem.values[0][38] = np.nan
    append(problem.keys[0], problem.values[0], problem.pool, problem.slots(0))
    q = problem.queries(4, 2)
    out = decode_attention(q, problem.pool, problem.page_table, problem.seq_lens, query_lens=[4])
    expected, _ = problem.expected(q, [4])
    assert np.isnan(out[2:]).all()
    assert_close(out[:2], expected[:2], "float32")


@pytest.mark.parametrize("query_lens", [[-1, 5], [2**31 - 1, 2**31 - 1], [0, 0], [3, 0], [1, 9]])
def test_unchecked_query_lens_stay_inside(query_lens: list[int]) -> None:
    problem = make_problem(KVSpec(num_layers=1, num_kv_heads=2, head_dim=16, page_size=4), [9, 5], "ptx")
    q = problem.queries(4, 3)
    decode_attention(q, problem.pool, problem.page_table, problem.seq_lens, query_lens=query_lens, check=False)


@pytest.mark.parametrize("arch", ["compute_70", "compute_80", "compute_90"])
def test_every_architecture_path(arch: str) -> None:
    problem = make_problem(KVSpec(num_layers=1, num_kv_heads=2, head_dim=80, page_size=4), [70, 5], "ptx")
    backend = PtxBackend(arch)
    q = problem.queries(2, 3, "bfloat16")
    out, lse = decode_attention(q, on(backend, problem.pool), problem.page_table, [70, 5], return_lse=True)
    expected_out, expected_lse = problem.expected(q)
    assert_close(out, expected_out, "bfloat16")
    assert_close(lse, expected_lse, "float32")


def test_arguments_have_the_width_of_their_parameters() -> None:
    with pytest.raises(TypeError, match="must have 8 bytes, got"):
        PtxBackend().launch(CopyPagesVariant(16), "copy_pages", (1, 1), 32, None, np.int32(5), *[None] * 4)
