"""ldmatrix and mma against matrix products in float64."""

import ml_dtypes
import numpy as np
import pytest

from kvcupy.backends.ptx import KernelFault

LANE = np.arange(32)


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(run, rng, count, trans):
    registers = ", ".join(f"%{number}" for number in range(count))
    outputs = ", ".join(f'"=r"(r[{number}])' for number in range(count))
    source = f"""
    extern "C" __global__ void k(unsigned* out, const unsigned short* x) {{
      __shared__ __align__(16) unsigned short s[{count} * 64];
      int t = threadIdx.x;
      for (int j = t; j < {count} * 64; j += 32) s[j] = x[blockIdx.x * {count} * 64 + j];
      __syncthreads();
      unsigned at = (unsigned)__cvta_generic_to_shared(s + (t % (8 * {count})) * 8), r[{count}];
      asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%{count}];"
                   : {outputs} : "r"(at) : "memory");
      for (int j = 0; j < {count}; j++) out[(blockIdx.x * {count} + j) * 32 + t] = r[j];
    }}"""
    x = rng.integers(0, 2**16, (3, count, 8, 8), dtype=np.uint16)
    out = np.zeros((3, count, 32), np.uint32)
    run(source, 3, 32, out, x, undefined=(out,))
    matrices = x.swapaxes(2, 3) if trans else x
    want = np.ascontiguousarray(matrices).reshape(3, count, 32, 2)
    np.testing.assert_array_equal(out.view(np.uint16).reshape(3, count, 32, 2), want)


TYPES = {
    "f16": (np.dtype(np.float16), 2),
    "bf16": (np.dtype(ml_dtypes.bfloat16), 2),
    "s8": (np.dtype(np.int8), 4),
    "u8": (np.dtype(np.uint8), 4),
}


def mma_source(shape, kind, result, depth):
    per = TYPES[kind][1]
    a_registers, b_registers, c_registers = (
        depth // (2 * per),
        depth // (4 * per),
        2 if result == "f16" else 4,
    )
    numbers = iter(range(32))
    lists = [
        "{" + ", ".join(f"%{next(numbers)}" for _ in range(n)) + "}" for n in (c_registers, a_registers, b_registers)
    ]
    inputs = [f'"r"(a[{n}])' for n in range(a_registers)] + [f'"r"(b[{n}])' for n in range(b_registers)]
    return f"""
    extern "C" __global__ void k(unsigned* d, const unsigned* pa, const unsigned* pb, const unsigned* pc) {{
      int t = blockIdx.x * 32 + threadIdx.x;
      unsigned a[{a_registers}], b[{b_registers}], c[{c_registers}];
      for (int j = 0; j < {a_registers}; j++) a[j] = pa[t * {a_registers} + j];
      for (int j = 0; j < {b_registers}; j++) b[j] = pb[t * {b_registers} + j];
      for (int j = 0; j < {c_registers}; j++) c[j] = pc[t * {c_registers} + j];
      asm volatile("mma.sync.aligned.{shape}.row.col.{result}.{kind}.{kind}.{result} {lists[0]}, {lists[1]}, "
        "{lists[2]}, {lists[0]};" : {", ".join(f'"+r"(c[{n}])' for n in range(c_registers))} : {", ".join(inputs)});
      for (int j = 0; j < {c_registers}; j++) d[t * {c_registers} + j] = c[j];
    }}"""


@pytest.mark.parametrize(
    ("shape", "kind", "result"),
    [
        ("m16n8k16", "f16", "f32"),
        ("m16n8k16", "bf16", "f32"),
        ("m16n8k16", "f16", "f16"),
        ("m16n8k8", "f16", "f32"),
        ("m16n8k8", "bf16", "f32"),
        ("m16n8k16", "s8", "s32"),
        ("m16n8k32", "s8", "s32"),
        ("m16n8k32", "u8", "s32"),
    ],
)
def test_mma(run, rng, shape, kind, result):
    """The fragments as the PTX manual draws them: thread (g, t), element by element."""
    depth = int(shape.split("k")[1])
    dtype, per = TYPES[kind]
    into = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "s32": np.dtype(np.int32)}[result]
    warps = 3

    def matrix(*size):
        if dtype.kind in "iu":
            return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, (warps, *size)).astype(dtype)
        return rng.standard_normal((warps, *size)).astype(dtype)

    a, b = matrix(16, depth), matrix(depth, 8)
    c = (rng.standard_normal((warps, 16, 8)) * 8).astype(into)
    g, t = LANE // 4, LANE % 4
    # Registers of a lane: A in order (row half, column half), elements side by side.
    fragments_a = np.stack(
        [
            a[:, g + 8 * half, t * per + e + 4 * per * side]
            for side in range(depth // (4 * per))
            for half in range(2)
            for e in range(per)
        ],
        axis=-1,
    )
    fragments_b = np.stack(
        [b[:, t * per + e + 4 * per * side, g] for side in range(depth // (4 * per)) for e in range(per)],
        axis=-1,
    )
    fragments_c = np.stack([c[:, g + 8 * half, t * 2 + e] for half in range(2) for e in range(2)], axis=-1)
    arrays = [np.ascontiguousarray(each) for each in (fragments_a, fragments_b, fragments_c)]
    d = np.zeros_like(arrays[2])
    run(mma_source(shape, kind, result, depth), warps, 32, d, *arrays, undefined=(d,))
    wide = np.int64 if result == "s32" else np.float64
    product = a.astype(wide) @ b.astype(wide) + c.astype(wide)
    want = np.stack([product[:, g + 8 * half, t * 2 + e] for half in range(2) for e in range(2)], axis=-1)
    if result == "s32":
        np.testing.assert_array_equal(d, want)
    else:  # one rounding, at the size of the terms
        np.testing.assert_allclose(d.astype(np.float64), want, rtol=2**-11 if result == "f16" else 2**-24, atol=1e-6)


def test_mma_needs_a_whole_warp(run):
    source = mma_source("m16n8k16", "f16", "f32", 16).replace(
        "      asm volatile", "      if (t % 32 < 16) asm volatile"
    )
    arrays = [np.zeros((32, n), np.uint32) for n in (4, 4, 2, 4)]
    with pytest.raises(KernelFault, match="warp not complete"):
        run(source, 1, 32, *arrays)


def test_undefined_rows_stay_in_their_rows(run):
    """Row 3 of A was never written: only row 3 of D is undefined, whatever B holds."""
    source = """
    extern "C" __global__ void k(float* d, int rows) {
      __shared__ unsigned s[16][8];
      int g = threadIdx.x / 4, t = threadIdx.x % 4;
      for (int row = 0; row < 16; row++) if (row != 3 && threadIdx.x < 8) s[row][threadIdx.x] = 0x3c003c00u;
      __syncwarp();
      unsigned a0 = s[g][t], a1 = s[g + 8][t], a2 = s[g][t + 4], a3 = s[g + 8][t + 4], b = 0x3c003c00u;
      float c0 = 0, c1 = 0, c2 = 0, c3 = 0;
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%8}, {%0,%1,%2,%3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b));
      if (g < rows) { d[g * 8 + t * 2] = c0; d[g * 8 + t * 2 + 1] = c1; }
      d[(g + 8) * 8 + t * 2] = c2; d[(g + 8) * 8 + t * 2 + 1] = c3;
    }"""
    d = np.zeros((16, 8), np.float32)
    run(source, 1, 32, d, 3)
    np.testing.assert_array_equal(d, np.where(np.isin(np.arange(16), range(3, 8)), 0, 16.0)[:, None] * np.ones(8))
    with pytest.raises(KernelFault, match="undefined value"):
        run(source, 1, 32, d, 4)
