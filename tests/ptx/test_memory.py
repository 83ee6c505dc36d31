"""Loads, stores, atomics, asynchronous copies, and the kinds of memory."""

import numpy as np
import pytest

from kvcupy.backends.ptx import Buffer, KernelFault, Module, SparseBuffer, launch


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("unsigned char", np.uint8),
        ("signed char", np.int8),
        ("short", np.int16),
        ("unsigned short", np.uint16),
        ("int", np.int32),
        ("long long", np.int64),
    ],
)
def test_every_width_extends_by_sign(run, rng, kind, dtype):
    source = f"""
    extern "C" __global__ void k(long long* wide, {kind}* narrow, const {kind}* x) {{
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      wide[i] = x[i]; narrow[i] = ({kind})(wide[i] * 3 + 1);
    }}"""
    info = np.iinfo(dtype)
    x = rng.integers(info.min, info.max, 192, dtype=dtype, endpoint=True)
    wide, narrow = np.zeros(192, np.int64), np.zeros(192, dtype)
    run(source, 3, 64, wide, narrow, x, undefined=(wide, narrow), readonly=(x,))
    np.testing.assert_array_equal(wide, x.astype(np.int64))
    np.testing.assert_array_equal(narrow, (x.astype(np.int64) * 3 + 1).astype(dtype))


@pytest.mark.parametrize("kind", ["float2", "float4", "uint4", "double2", "uchar4", "ushort2", "longlong2"])
def test_vectors(run, rng, kind):
    source = f"""
    extern "C" __global__ void k({kind}* y, const {kind}* __restrict__ x) {{
      extern __shared__ __align__(16) unsigned char raw[];
      {kind}* s = ({kind}*)raw;
      int t = threadIdx.x;
      s[t] = x[blockIdx.x * blockDim.x + t];
      __syncthreads();
      y[blockIdx.x * blockDim.x + t] = s[(t + 5) % blockDim.x];
    }}"""
    nbytes = {"float2": 8, "uchar4": 4, "ushort2": 4}.get(kind, 16)
    x = rng.integers(0, 256, (2, 64, nbytes)).astype(np.uint8)
    y = np.zeros_like(x)
    run(source, 2, 64, y, x, shared=64 * nbytes, undefined=(y,), readonly=(x,))
    np.testing.assert_array_equal(y, x[:, (np.arange(64) + 5) % 64])


def test_cache_hints(run, rng):
    source = """
    extern "C" __global__ void k(float4* y, const float4* x) {
      int t = threadIdx.x; float4 v;
      unsigned long long policy;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.f32 {%0,%1,%2,%3}, [%4], %5;"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(x + t), "l"(policy));
      float4 w = __ldcs(x + t), u = __ldg(x + t);
      v.x += w.x + u.x;
      __stcs(y + t, v);
    }"""
    x = rng.standard_normal((32, 4)).astype(np.float32)
    y = np.zeros_like(x)
    run(source, 1, 32, y, x, undefined=(y,), readonly=(x,))
    want = x.copy()
    want[:, 0] += x[:, 0] + x[:, 0]
    np.testing.assert_array_equal(y, want)


def test_generic_addresses_and_local_memory(run, rng):
    """One pointer that some lanes aim at global, some at shared and some at their own local memory."""
    source = """
    extern "C" __global__ void k(int* y, const int* x) {
      __shared__ int s[64];
      int own[16];
      int t = threadIdx.x;
      s[t] = x[t] + 1000;
      for (int j = 0; j < 16; j++) own[j] = x[t] * 10 + j;
      __syncthreads();
      const int* from = t % 3 == 0 ? x + t : t % 3 == 1 ? s + (63 - t) : own + (x[t] & 15);
      y[t] = *from;
      own[x[t] & 15] = -1;
      y[t] += own[(x[t] + 1) & 15];
    }"""
    x = rng.integers(0, 1000, 64).astype(np.int32)
    y = np.zeros_like(x)
    run(source, 1, 64, y, x, undefined=(y,))
    t = np.arange(64)
    want = np.choose(t % 3, [x, x[::-1] + 1000, x * 10 + (x & 15)]) + x * 10 + ((x + 1) & 15)
    np.testing.assert_array_equal(y, want)


def test_constants_globals_and_structs(run, rng):
    source = """
    struct Layout { int a; long long b; float c[3]; short d; };
    __constant__ int table[5] = {3, 1, 4, 1, 5};
    __device__ unsigned counter = 40;
    __device__ const float fixed[2] = {0.5f, 2.5f};
    extern "C" __global__ void k(double* y, Layout layout, unsigned char small, float f, double d, bool flag) {
      int t = threadIdx.x;
      y[t] = layout.a + layout.b * 1e-3 + layout.c[t % 3] + layout.d + table[t % 5] + fixed[t & 1];
      y[t] += small + f + d + flag;
      atomicAdd(&counter, 1u);
      __syncthreads();
      y[t] += counter;
    }"""
    layout = np.zeros(1, np.dtype([("a", "i4"), ("b", "i8"), ("c", "f4", 3), ("d", "i2")], align=True))
    layout["a"], layout["b"], layout["c"], layout["d"] = -5, 2**40, [0.25, 0.5, 0.75], -7
    y = np.zeros(32)
    run(source, 1, 32, y, layout.tobytes(), 200, 0.125, 1e-9, True, undefined=(y,))
    t = np.arange(32)
    want = -5 + 2**40 * 1e-3 + layout["c"][0].astype(np.float64)[t % 3] - 7 + np.array([3, 1, 4, 1, 5])[t % 5]
    want += np.array([0.5, 2.5])[t & 1] + 200 + 0.125 + 1e-9 + 1 + 72
    np.testing.assert_allclose(y, want, rtol=1e-12)


@pytest.mark.parametrize("space", ["shared", "global"])
@pytest.mark.parametrize("name", ["Add", "Min", "Max", "And", "Or", "Xor", "Exch", "Inc", "Dec", "CAS"])
def test_atomics(run, rng, name, space):
    """All lanes on few addresses: the end is right, and the old values are those of some order."""
    call = {"Inc": "(p, 50u)", "Dec": "(p, 50u)", "CAS": "(p, 7u, v)"}.get(name, "(p, v)")
    place = "s" if space == "shared" else "cells"
    source = f"""
    extern "C" __global__ void k(unsigned* old, unsigned* cells, const unsigned* x) {{
      __shared__ unsigned s[4];
      int t = threadIdx.x;
      if (t < 4) s[t] = cells[t];
      __syncthreads();
      unsigned v = x[t]; unsigned* p = {place} + t % 3;
      old[t] = atomic{name}{call};
      __syncthreads();
      if ({int(space == "shared")} && t < 4) cells[t] = s[t];
    }}"""
    functions = {
        "Add": lambda o, v: (o + v) % 2**32,
        "Min": min,
        "Max": max,
        "And": lambda o, v: o & v,
        "Or": lambda o, v: o | v,
        "Xor": lambda o, v: o ^ v,
        "Exch": lambda o, v: v,
        "Inc": lambda o, v: 0 if o >= 50 else o + 1,
        "Dec": lambda o, v: 50 if o == 0 or o > 50 else o - 1,
        "CAS": lambda o, v: v if o == 7 else o,
    }
    start = np.array([7, 60, 2**31, 9], np.uint32)
    x = rng.integers(0, 2**32, 64, dtype=np.uint32)
    cells, old = start.copy(), np.zeros(64, np.uint32)
    run(source, 1, 64, old, cells, x, undefined=(old,))
    state, seen = start.tolist(), []
    for t in range(64):
        seen.append(state[t % 3])
        state[t % 3] = functions[name](state[t % 3], int(x[t]))
    np.testing.assert_array_equal(cells, np.array(state, np.uint32))
    np.testing.assert_array_equal(old, np.array(seen, np.uint32))


def test_atomics_of_other_types(run, rng):
    source = """
    #include <cuda_fp16.h>
    extern "C" __global__ void k(float* f, unsigned long long* u, long long* m, double* d, __half2* h, int* s,
                                 const int* x) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      atomicAdd(f, (float)x[i]);
      atomicAdd(u, (unsigned long long)x[i] << 30);
      atomicMin(m, (long long)x[i] - 500);
      atomicAdd(d, x[i] * 0.5);
      atomicAdd(h, __floats2half2_rn(1.f, x[i] & 1));
      atomicMax(s, -x[i]);
    }"""
    x = rng.integers(1, 1000, 256).astype(np.int32)
    f, u, m, d = np.zeros(1, np.float32), np.zeros(1, np.uint64), np.full(1, 99, np.int64), np.zeros(1)
    h, s = np.zeros(2, np.float16), np.full(1, -(2**31), np.int32)
    run(source, 4, 64, f, u, m, d, h, s, x)
    assert f[0] == x.sum()
    assert int(u[0]) == int(x.astype(np.int64).sum()) << 30
    assert m[0] == x.min() - 500
    assert d[0] == x.sum() / 2
    assert h.tolist() == [256, (x & 1).sum()]
    assert s[0] == -x.min()


@pytest.mark.parametrize("nbytes", [4, 8, 16])
@pytest.mark.parametrize("tail", ["", ", %3", ", p"])
def test_asynchronous_copies(run, rng, nbytes, tail):
    """Copies in groups, of whole and of shortened sources, which are filled up with zeros."""
    source = f"""
    extern "C" __global__ void k(unsigned char* y, const unsigned char* x, const int* lengths) {{
      __shared__ __align__(16) unsigned char s[2][64 * {nbytes}];
      int t = threadIdx.x;
      for (int stage = 0; stage < 2; stage++) {{
        unsigned at = (unsigned)__cvta_generic_to_shared(s[stage] + t * {nbytes});
        int length = lengths[stage * 64 + t];
        const unsigned char* from = x + (stage * 64 + t) * {nbytes};
        if ({int(tail == ", %3")} && length == 0) from = x;
        asm volatile("{{.reg .pred p; setp.eq.s32 p, %3, 0; "
          "cp.async.{"cg" if nbytes == 16 else "ca"}.shared.global [%0], [%1], %2{tail};}}"
          :: "r"(at), "l"(from), "n"({nbytes}), "r"(length) : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
      }}
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      __syncthreads();
      for (int j = 0; j < {nbytes}; j++) y[t * {nbytes} + j] = s[0][(t ^ 7) * {nbytes} + j];
      asm volatile("cp.async.wait_all;" ::: "memory");
      __syncthreads();
      for (int j = 0; j < {nbytes}; j++) y[(64 + t) * {nbytes} + j] = s[1][(t ^ 33) * {nbytes} + j];
    }}"""
    x = rng.integers(1, 256, (2, 64, nbytes)).astype(np.uint8)
    lengths = rng.integers(0, nbytes + 1, (2, 64)).astype(np.int32)
    y = np.zeros_like(x)
    want = x.copy()
    if tail == ", %3":
        want[np.arange(nbytes) >= lengths[:, :, None]] = 0
    elif tail:
        want[lengths == 0] = 0
    want = np.stack([want[0][np.arange(64) ^ 7], want[1][np.arange(64) ^ 33]])
    for seed in (None, 1):
        y[:] = 0
        run(source, 1, 64, y, x, lengths, undefined=(y,), readonly=(x,), seed=seed)
        np.testing.assert_array_equal(y, want)


def test_a_pool_beyond_two_gibi_elements(run):
    """64-bit addresses, on memory that exists only where it is touched."""
    source = """
    extern "C" __global__ void k(signed char* pool, long long stride, int page, int* wrong) {
      int t = blockIdx.x * blockDim.x + threadIdx.x;
      pool[page * stride + t] = (signed char)t;
      if (*wrong) pool[(int)(page * (int)stride) + t] = 1;
    }"""
    pool = SparseBuffer(131_080 * 16_384, fill=7)
    wrong = np.zeros(1, np.int32)
    kernel = Module.compile(source)["k"]
    args = [pool.address, 16_384, 131_079, wrong.ctypes.data]
    launch(kernel, 2, 32, args, buffers=[pool, Buffer.of(wrong)])
    assert pool.read(131_079 * 16_384, 64) == bytes(range(64))
    assert pool.read(131_079 * 16_384 + 64, 4) == bytes([7] * 4)
    assert pool.read(0, 4) == bytes([7] * 4)
    assert pool.touched_bytes < 2**20
    wrong[0] = 1
    with pytest.raises(KernelFault, match="out of bounds"):
        launch(kernel, 2, 32, args, buffers=[pool, Buffer.of(wrong)])


def test_a_sparse_buffer_written_by_the_host(run):
    source = 'extern "C" __global__ void k(int* y, const int* x) { y[threadIdx.x] = x[threadIdx.x * 100000]; }'
    x = SparseBuffer(4 * 3_200_000, writable=False, defined=False)
    for t in range(32):
        x.write(400_000 * t, int(t * t).to_bytes(4, "little"))
    y = np.zeros(33, np.int32)
    kernel = Module.compile(source)["k"]
    launch(kernel, 1, 32, [y.ctypes.data, x.address], buffers=[x, Buffer.of(y)])
    np.testing.assert_array_equal(y[:32], np.arange(32) ** 2)
    hole = SparseBuffer(4 * 3_200_000, defined=False)
    with pytest.raises(KernelFault, match="undefined value"):
        launch(kernel, 1, 32, [y.ctypes.data, hole.address], buffers=[hole, Buffer.of(y)])


def test_marks_are_exact_to_the_bit(run):
    """A word of which only one byte was written: that byte can be taken out, the others not."""
    source = """
    extern "C" __global__ void k(unsigned* y, int which) {
      __shared__ unsigned char s[64];
      int t = threadIdx.x;
      if (t < 8) s[t * 4 + 2] = t + 1;
      __syncwarp();
      unsigned word = ((unsigned*)s)[t & 7];
      unsigned a = (word >> 16) & 255, b = (word & 0x00ff0000u) | 5u, c = __byte_perm(word, 0, 0x4442);
      unsigned d = (word << 8) >> 24, e = which ? word : 9u;
      y[t] = a + (b >> 16) + c + d + e;
    }"""
    y = np.zeros(32, np.uint32)
    run(source, 1, 32, y, 0, undefined=(y,))
    np.testing.assert_array_equal(y, 4 * (np.arange(32) % 8 + 1) + 9)
    with pytest.raises(KernelFault, match="undefined value"):
        run(source, 1, 32, y, 1)


def test_arguments_are_checked(run):
    source = 'extern "C" __global__ void k(int* y, int n, float f) { y[0] = n + (int)f; }'
    kernel = Module.compile(source)["k"]
    y = np.zeros(1, np.int32)
    buffers = [Buffer.of(y)]
    launch(kernel, 1, 1, [y.ctypes.data, -3, 5], buffers=buffers)
    assert y[0] == 2
    with pytest.raises(TypeError, match="args must be 3 values, got 2"):
        launch(kernel, 1, 1, [y.ctypes.data, 1], buffers=buffers)
    with pytest.raises(TypeError, match=r"args\[1\] must be an int, got float"):
        launch(kernel, 1, 1, [y.ctypes.data, 1.5, 1.0], buffers=buffers)
    with pytest.raises(ValueError, match=r"args\[1\] must fit in 32 bits"):
        launch(kernel, 1, 1, [y.ctypes.data, 2**33, 1.0], buffers=buffers)
    with pytest.raises(ValueError, match="at most 1024 threads"):
        launch(kernel, 1, 1025, [y.ctypes.data, 1, 1.0], buffers=buffers)
    with pytest.raises(ValueError, match="undefined buffers must not overlap"):
        launch(kernel, 1, 1, [y.ctypes.data, 1, 1.0], buffers=[*buffers, Buffer.of(y, defined=False)])
    with pytest.raises(ValueError, match="contiguous"):
        Buffer.of(np.zeros((4, 4))[:, ::2])


def test_overlapping_views_are_one_buffer(run, rng):
    """K and V side by side in one array: their ranges overlap."""
    source = """
    extern "C" __global__ void k(float* y, const float* k, const float* v) {
      int t = threadIdx.x; y[t] = k[8 * t] - v[8 * t];
    }"""
    both = rng.standard_normal((32, 2, 4)).astype(np.float32)
    y = np.zeros(32, np.float32)
    ranges = [Buffer(both.ctypes.data + start, 31 * 32 + 16, writable=False) for start in (0, 16)]
    args = [y.ctypes.data, both.ctypes.data, both.ctypes.data + 16]
    launch(Module.compile(source)["k"], 1, 32, args, buffers=[Buffer.of(y), *ranges, ranges[0]])
    np.testing.assert_array_equal(y, both[:, 0, 0] - both[:, 1, 0])
