"""A small paged decode attention, as a whole: against float64, in every order of the warps, on every architecture.

The kernel splits each sequence over blocks, copies tiles of K and V into shared memory asynchronously, two deep
(compute capability 8.0 and up; plain loads below), and a second kernel merges the parts.
"""

from functools import cache

import numpy as np
import pytest

from kvcupy.backends.ptx import Buffer, Module, launch

SOURCE = """#line 1 "paged.cu"
#include <cuda_fp16.h>
constexpr int D = 64, GROUP = 4, PAGE = 16, WARPS = 4, TILE = 16;

__device__ void copy16(void* to, const void* from, bool ok) {
#if __CUDA_ARCH__ >= 800
  unsigned at = (unsigned)__cvta_generic_to_shared(to);
  int length = ok ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(length) : "memory");
#else
  *(uint4*)to = ok ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
#endif
}
__device__ void commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int N> __device__ void wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
#endif
}

// One block per kv head, sequence and split; one warp per query head of the group; a lane has two dims.
extern "C" __global__ void __launch_bounds__(128)
decode(const __half* __restrict__ q, const __half* __restrict__ pool, const int* __restrict__ table,
       const int* __restrict__ lens, float* parts, float2* states, int kv_heads, int max_pages, int splits,
       float scale) {
  __shared__ __align__(16) __half tiles[2][2][TILE][D];  // [stage][K or V][token][dim]
  const int h = blockIdx.x, b = blockIdx.y, s = blockIdx.z, t = threadIdx.x, lane = t & 31, g = t >> 5;
  const int len = lens[b];
  const int per = ((len + splits - 1) / splits + TILE - 1) / TILE * TILE;
  const int first = s * per, last = min(len, first + per);
  const size_t head = ((size_t)b * kv_heads + h) * GROUP + g;
  const float2 query = __half22float2(((const __half2*)(q + head * D))[lane]);
  float m = -1e30f, l = 0.f;
  float2 acc = make_float2(0.f, 0.f);
  auto fetch = [&](int start, int stage) {
    for (int c = t; c < 2 * TILE * (D / 8); c += 32 * WARPS) {
      const int dim = c % (D / 8) * 8, token = c / (D / 8) % TILE, which = c / (D / 8) / TILE;
      const bool ok = start + token < last;
      const int at = ok ? start + token : first;
      const int page = first < last ? table[(size_t)b * max_pages + at / PAGE] : 0;
      const size_t row = (((size_t)page * kv_heads + h) * PAGE + at % PAGE) * 2 + which;
      copy16(&tiles[stage][which][token][dim], pool + row * D + dim, ok);
    }
    commit();
  };
  fetch(first, 0);
  int stage = 0;
  for (int start = first; start < last; start += TILE, stage ^= 1) {
    if (start + TILE < last) { fetch(start + TILE, stage ^ 1); wait<1>(); } else wait<0>();
    __syncthreads();
    for (int token = 0; token < TILE && start + token < last; token++) {
      const float2 k = __half22float2(((const __half2*)tiles[stage][0][token])[lane]);
      const float2 v = __half22float2(((const __half2*)tiles[stage][1][token])[lane]);
      float score = fmaf(query.x, k.x, query.y * k.y);
      for (int x = 16; x; x >>= 1) score += __shfl_xor_sync(~0u, score, x);
      score *= scale;
      const float top = fmaxf(m, score), keep = exp2f(m - top), p = exp2f(score - top);
      m = top; l = fmaf(l, keep, p);
      acc.x = fmaf(acc.x, keep, p * v.x); acc.y = fmaf(acc.y, keep, p * v.y);
    }
    __syncthreads();
  }
  wait<0>();
  ((float2*)(parts + (head * splits + s) * D))[lane] = acc;
  if (lane == 0) states[head * splits + s] = make_float2(m, l);
}

extern "C" __global__ void merge(const float* parts, const float2* states, __half* out, int splits) {
  const size_t head = blockIdx.x;
  float m = -1e30f, l = 0.f, acc = 0.f;
  for (int s = 0; s < splits; s++) m = fmaxf(m, states[head * splits + s].x);
  for (int s = 0; s < splits; s++) {
    const float c = exp2f(states[head * splits + s].x - m);
    l = fmaf(c, states[head * splits + s].y, l);
    acc = fmaf(c, parts[(head * splits + s) * D + threadIdx.x], acc);
  }
  out[head * D + threadIdx.x] = __float2half(l > 0.f ? acc / l : 0.f);
}
"""
D, GROUP, PAGE = 64, 4, 16


def problem(rng, kv_heads, lens, spare_pages=3):
    """A pool full of NaN but for the tokens stored, and a shuffled page table."""
    batch, max_pages = len(lens), -(-max(lens) // PAGE)
    order = rng.permutation(batch * max_pages + spare_pages).astype(np.int32)
    table = order[: batch * max_pages].reshape(batch, max_pages)
    pool = np.full((len(order), kv_heads, PAGE, 2, D), np.nan, np.float16)
    q = rng.standard_normal((batch, kv_heads, GROUP, D)).astype(np.float16)
    want = np.zeros(q.shape)
    for b, length in enumerate(lens):
        kv = rng.standard_normal((length, kv_heads, 2, D)).astype(np.float16)
        for token in range(length):
            pool[table[b, token // PAGE], :, token % PAGE] = kv[token]
        if length:
            k, v = kv[:, :, 0].astype(np.float64), kv[:, :, 1].astype(np.float64)
            scores = np.einsum("hgd,thd->hgt", q[b].astype(np.float64), k) / np.sqrt(D)
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            want[b] = np.einsum("hgt,thd->hgd", weights / weights.sum(axis=2, keepdims=True), v)
    return q, pool, table, np.array(lens, np.int32), want


compiled = cache(Module.compile)


def decode(inputs, splits, arch, **options):
    q, pool, table, lens, _ = inputs
    batch, kv_heads = q.shape[:2]
    module = compiled(SOURCE, arch)
    parts = np.zeros((q.size // D, splits, D), np.float32)
    states = np.zeros((q.size // D, splits, 2), np.float32)
    out = np.zeros_like(q)
    fresh = {id(array): Buffer.of(array, defined=False) for array in (parts, states, out)}
    buffers = [*fresh.values(), *(Buffer.of(array, writable=False) for array in (q, pool, table, lens))]
    scale = np.log2(np.e) / np.sqrt(D)
    address = [array.ctypes.data for array in (q, pool, table, lens, parts, states)]
    report = launch(
        module["decode"],
        (kv_heads, batch, splits),
        128,
        [*address, kv_heads, table.shape[1], splits, scale],
        buffers=buffers,
        **options,
    )
    args = [parts.ctypes.data, states.ctypes.data, out.ctypes.data, splits]
    launch(module["merge"], q.size // D, D, args, buffers=buffers, **options)
    return out, report


@pytest.mark.parametrize("arch", ["compute_70", "compute_80", "compute_90"])
def test_against_float64(run, rng, arch):
    inputs = problem(rng, 2, [75, 1, 0, 16, 33])
    out, report = decode(inputs, 2, arch)
    np.testing.assert_allclose(out.astype(np.float64), inputs[4], atol=2e-3)
    assert report.classes.get("async copy", 0) > 0 or arch == "compute_70"


def test_every_order_of_warps_gives_the_same_bits(run, rng):
    inputs = problem(rng, 1, [37, 20])
    first, _ = decode(inputs, 1, "compute_80")
    for seed in range(20):
        out, _ = decode(inputs, 1, "compute_80", seed=seed)
        np.testing.assert_array_equal(out, first)


def test_every_byte_of_the_cache_is_read_once(run, rng):
    inputs = problem(rng, 2, [128, 64])
    _, report = decode(inputs, 1, "compute_80")
    (pool_line,) = [counts for line, counts in report.lines.items() if line.number == 8]
    assert pool_line.useful_bytes == (128 + 64) * 2 * 2 * D * 2
    assert pool_line.minimum_sectors == pool_line.useful_bytes // 32


def test_without_checks_the_result_is_the_same(run, rng):
    inputs = problem(rng, 2, [50, 9])
    checked, _ = decode(inputs, 2, "compute_80")
    unchecked, _ = decode(inputs, 2, "compute_80", checks=False)
    np.testing.assert_array_equal(checked, unchecked)
