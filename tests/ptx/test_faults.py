"""Every kind of fault, planted in a small kernel and caught at its line; beside it the correct twin, which passes.

A kernel is correct, and wrong where FAULT is defined. The line to be blamed ends in `// here`. Each kernel maps
x, 128 floats by default, to y; the twin must give the expected y, in every order of the warps.
"""

from dataclasses import dataclass
from textwrap import dedent

import numpy as np
import pytest

from kvcupy.backends.ptx import KernelFault

SEEDS = [None, *range(20)]


@dataclass
class Plant:
    kind: str
    body: str
    expected: str = "x"
    grid: int = 2
    block: int = 64
    shared: int = 0
    arguments: str = "float* y, const float* x"
    head: str = ""
    spare: bool = False  # y has one more element, a zero, which the others count with

    @property
    def source(self) -> str:
        return f"""#line 1 "planted.cu"
{self.head}
extern "C" __global__ void k({self.arguments}) {{
  const int t = threadIdx.x, i = blockIdx.x * blockDim.x + t, lane = t & 31;
{dedent(self.body).strip()}
}}
"""

    @property
    def line(self) -> int:
        """Counted as the compiler does after the #line."""
        return self._ending("// here")[0]

    @property
    def other_lines(self) -> list[int]:
        """What else may be blamed if warps run in another order: a race has two ends."""
        return self._ending("// or here")

    def _ending(self, mark: str) -> list[int]:
        return [number for number, text in enumerate(self.source.split("\n")) if text.endswith(mark)]


ASYNC = """
__device__ void copy4(void* to, const void* from) {
  unsigned at = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at), "l"(from) : "memory");
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
"""

PLANTS = {
    "global read past the end": Plant(
        "global out of bounds",
        """
        #ifdef FAULT
          y[i] = x[i + 1];  // here
        #else
          y[i] = x[i];
        #endif
        """,
    ),
    "global write before the start": Plant(
        "global out of bounds",
        """
        #ifdef FAULT
          y[i - 1] = x[i];  // here
        #else
          y[i] = x[i];
        #endif
        """,
    ),
    "vector across the end": Plant(
        "global out of bounds",
        """
          const int base = i * 4;
        #ifdef FAULT
          if (base < 130) {
            float4 v = *(const float4*)(x + base);  // here
        #else
          if (base < 128) {
            float4 v = *(const float4*)(x + base);
        #endif
            y[base] = v.x;
            if (base < 128) { y[base + 1] = v.y; y[base + 2] = v.z; y[base + 3] = v.w; }
          }
        """,
    ),
    "write to read-only": Plant(
        "write to read-only memory",
        """
        #ifdef FAULT
          ((float*)x)[i] = 1.f;  // here
        #endif
          y[i] = x[i];
        """,
    ),
    "shared out of bounds": Plant(
        "shared out of bounds",
        """
          extern __shared__ float s[];
          s[t] = x[i];
          __syncthreads();
        #ifdef FAULT
          y[i] = s[t + 64 * (int)x[i]];  // here
        #else
          y[i] = s[t];
        #endif
        """,
        shared=64 * 4,
    ),
    "misaligned vector": Plant(
        "misaligned access",
        """
          if (i < 32) {
        #ifdef FAULT
            *(float4*)(y + i * 4) = *(const float4*)(x + i * 2 + 1);  // here
        #else
            *(float4*)(y + i * 4) = *(const float4*)(x + i * 4);
        #endif
          }
        """,
    ),
    "undefined shared stored": Plant(
        "undefined value",
        """
          __shared__ float s[65];
          s[t] = x[i];
          __syncthreads();
        #ifdef FAULT
          float v = s[t + 1];
          y[i] = v;  // here
        #else
          y[i] = s[t];
        #endif
        """,
    ),
    "undefined value through arithmetic": Plant(
        "undefined value",
        """
          __shared__ float s[64];
          if (t < 40) s[t] = x[i];
          __syncthreads();
          float v = s[t] * 2.f + 1.f;
        #ifndef FAULT
          v = t < 40 ? v : 0.f;
        #endif
          y[i] = v;  // here
        """,
        expected="np.where(np.arange(128) % 64 < 40, 2 * x + 1, 0)",
    ),
    "undefined value through a shuffle": Plant(
        "undefined value",
        """
          __shared__ float s[64];
          if (lane < 31) s[t] = x[i];
          __syncwarp();
          float v = s[t];
          v = __shfl_sync(~0u, v, lane < 30 ? lane + 1 : 29);
        #ifdef FAULT
          y[i] = v;
          if (lane == 30) y[i] = __shfl_sync(1u << 30, s[t + 1], 30);  // here
        #else
          y[i] = v;
        #endif
        """,
        expected="x[np.arange(128) // 32 * 32 + np.minimum(np.arange(128) % 32 + 1, 30) "
        "- (np.arange(128) % 32 > 29)]",
    ),
    "undefined condition": Plant(
        "undefined value",
        """
          __shared__ int s[64];
        #ifdef FAULT
          if (t != 5)
        #endif
          s[t] = 1;
          __syncthreads();
          float v = x[i];
          if (s[t] > 0) y[i] = v;  // here
        """,
    ),
    "undefined address": Plant(
        "undefined value",
        """
          __shared__ int s[64];
        #ifdef FAULT
          if (t != 5)
        #endif
          s[t] = i;
          __syncthreads();
          int j = s[t];
          y[i] = x[j];  // here
        """,
    ),
    "reading the output": Plant(
        "undefined value",
        """
        #ifdef FAULT
          y[i] += x[i];  // here
        #else
          y[i] = x[i];
        #endif
        """,
    ),
    "missing barrier, read after write": Plant(
        "shared race",
        """
          __shared__ float s[64];
          s[t] = x[i];
        #ifndef FAULT
          __syncthreads();
        #endif
          y[i] = s[63 - t];  // here
        """,
        expected="x.reshape(2, 64)[:, ::-1].reshape(-1)",
    ),
    "missing barrier, write after read": Plant(
        "shared race",
        """
          __shared__ float s[64];
          float sum = 0;
          for (int round = 0; round < 3; round++) {
            s[t] = x[i] * (round + 1);  // here
            __syncthreads();
            sum += s[t ^ 32];  // or here
        #ifndef FAULT
            __syncthreads();
        #endif
          }
          y[i] = sum;
        """,
        expected="6 * x[np.arange(128) ^ 32]",
    ),
    "missing barrier, write after write": Plant(
        "shared race",
        """
          __shared__ float s[64];
          s[t] = x[i];  // or here
        #ifndef FAULT
          __syncthreads();
        #endif
          s[t ^ 32] = x[i] + 1.f;  // here
          __syncthreads();
          y[i] = s[t];
        """,
        expected="x[np.arange(128) ^ 32] + 1",
    ),
    "missing syncwarp": Plant(
        "shared race",
        """
          __shared__ float s[64];
          s[t] = x[i];
        #ifndef FAULT
          __syncwarp();
        #endif
          y[i] = s[t ^ 5];  // here
        """,
        expected="x[np.arange(128) ^ 5]",
    ),
    "syncwarp is not a barrier": Plant(
        "shared race",
        """
          __shared__ float s[64];
          s[t] = x[i];
        #ifdef FAULT
          __syncwarp();
        #else
          __syncthreads();
        #endif
          y[i] = s[t ^ 32];  // here
        """,
        expected="x[np.arange(128) ^ 32]",
    ),
    "lanes that disagree": Plant(
        "race between lanes",
        """
          __shared__ float s[32];
        #ifdef FAULT
          s[lane >> 1] = x[i] * lane;  // here
        #else
          if (t < 32) s[lane] = x[i];
        #endif
          __syncthreads();
          if (t < 32) y[i] = s[lane];
        """,
        expected="np.where(np.arange(128) % 64 < 32, x, np.nan)",
    ),
    "two blocks write": Plant(
        "race between blocks",
        """
          y[i] = x[i];
          __syncthreads();
        #ifdef FAULT
          if (t == 3) y[0] = x[0];  // here
        #endif
        """,
    ),
    "a block reads what another writes": Plant(
        "race between blocks",
        """
          y[i] = x[i];  // or here
        #ifdef FAULT
          if (blockIdx.x == 1) y[i] = y[t];  // here
        #endif
        """,
    ),
    "plain write beside an atomic": Plant(
        "race between blocks",
        """
          y[i] = x[i];
          __syncthreads();
          if (t < 32 && blockIdx.x == 0) atomicAdd(&y[lane], 1.f);  // or here
        #ifdef FAULT
          if (t < 32 && blockIdx.x == 1) y[lane] = 0.f;  // here
        #endif
        """,
        expected="x + (np.arange(128) < 32)",
    ),
    "last block without a fence": Plant(
        "race between blocks",
        """
          y[i] = x[i];
        #ifndef FAULT
          __threadfence();
        #endif
          __shared__ bool last;
          __syncthreads();
          if (t == 0) last = atomicAdd((unsigned*)(y + 128), 1u) == gridDim.x - 1;
          __syncthreads();
          if (!last) return;
          float sum = 0;
          for (int b = 0; b < gridDim.x; b++) sum += ((volatile float*)y)[b * 64 + t];  // here
          y[t] = sum;
          y[64 + t] = 0;
          if (t == 0) y[128] = 0;
        """,
        expected="np.concatenate([x[:64] + x[64:], 0 * x[:64]])",
        spare=True,
    ),
    "a register that was never written": Plant(
        "undefined value",
        """
          float v = x[i], u;
        #ifdef FAULT
          asm volatile("{.reg .f32 never; add.f32 %0, %1, never;}" : "=f"(u) : "f"(v));
        #else
          asm volatile("{.reg .f32 never; mov.f32 never, %1; mov.f32 %0, never;}" : "=f"(u) : "f"(v));
        #endif
          y[i] = u;  // here
        """,
    ),
    "comparison that a false predicate should have guarded": Plant(
        "undefined value",
        """
          __shared__ float s[64];
          if (t < 40) s[t] = x[i];
          __syncthreads();
          unsigned r;
        #ifdef FAULT
          const int limit = 41;
        #else
          const int limit = 40;
        #endif
          asm volatile("{.reg .pred p, q; setp.lt.s32 q, %1, %3; "
                       "setp.gt.and.f32 p, %2, 0f00000000, q; selp.u32 %0, 1, 0, p;}"
                       : "=r"(r) : "r"(t), "f"(s[t]), "r"(limit));
          y[i] = r;  // here
        """,
        expected="np.arange(128) % 64 < 40",
    ),
    "barrier in half a warp": Plant(
        "barrier not reached by all",
        """
          float v = x[i];
        #ifdef FAULT
          if (lane < 16) {
            y[i] = v;
            __syncthreads();  // here
            v += 1.f;
          }
        #endif
          __syncwarp(__activemask());
          y[i] = v;
        """,
    ),
    "two different barriers": Plant(
        "barrier not reached by all",
        """
          if (t < 32) {
            y[i] = x[i];
        #ifdef FAULT
            __syncthreads();  // here
            y[i] = x[i] + 1.f;
        #endif
          } else {
            y[i] = x[i] + 2.f;
        #ifdef FAULT
            __syncthreads();
            y[i] = x[i] + 3.f;
        #endif
          }
        """,
        expected="x + 2 * (np.arange(128) % 64 >= 32)",
    ),
    "no wait": Plant(
        "missing cp.async wait",
        """
          __shared__ float s[64];
          copy4(s + t, x + i);
          commit();
        #ifndef FAULT
          wait<0>();
        #endif
          y[i] = s[t];  // here
        """,
        head=ASYNC,
    ),
    "wait for too few": Plant(
        "missing cp.async wait",
        """
          __shared__ float s[2][64];
          copy4(s[0] + t, x + i);
          commit();
          copy4(s[1] + t, x + i);
          commit();
          wait<1>();
          float v = s[0][t];
        #ifndef FAULT
          wait<0>();
        #endif
          y[i] = v + s[1][t];  // here
        """,
        head=ASYNC,
        expected="2 * x",
    ),
    "copy overwritten": Plant(
        "missing cp.async wait",
        """
          __shared__ float s[64];
          copy4(s + t, x + i);
          commit();
        #ifndef FAULT
          wait<0>();
        #endif
          s[t] = 1.f;  // here
          wait<0>();
          y[i] = s[t];
        """,
        head=ASYNC,
        expected="np.ones(128)",
    ),
    "no barrier after the wait": Plant(
        "shared race",
        """
          __shared__ float s[64];
          copy4(s + t, x + i);
          commit();
          wait<0>();
        #ifndef FAULT
          __syncthreads();
        #endif
          y[i] = s[63 - t];  // here
        """,
        head=ASYNC,
        expected="x.reshape(2, 64)[:, ::-1].reshape(-1)",
    ),
    "copy into a tile in use": Plant(
        "shared race",
        """
          __shared__ float s[64];
          s[t] = x[i];
          __syncthreads();
          float v = s[t ^ 32];  // or here
        #ifndef FAULT
          __syncthreads();
        #endif
          copy4(s + t, x + i);  // here
          commit();
          wait<0>();
          __syncthreads();
          y[i] = v + s[t ^ 32];
        """,
        head=ASYNC,
        expected="2 * x[np.arange(128) ^ 32]",
    ),
    "shuffle from outside the mask": Plant(
        "shuffle from an inactive lane",
        """
          float v = x[i];
        #ifdef FAULT
          if (lane < 16) v = __shfl_sync(0xffffu, v, lane + 8);  // here
        #else
          if (lane < 16) v = __shfl_sync(0xffffu, v, lane ^ 8);
        #endif
          y[i] = v;
        """,
        expected="np.where(np.arange(128) % 32 < 16, x[np.arange(128) ^ 8], x)",
    ),
    "mask names lanes that never come": Plant(
        "warp not complete",
        """
          float v = x[i];
        #ifdef FAULT
          if (lane < 16) v = __shfl_xor_sync(~0u, v, 1);  // here
        #else
          if (lane < 16) v = __shfl_xor_sync(0xffffu, v, 1);
        #endif
          y[i] = v;
        """,
        expected="np.where(np.arange(128) % 32 < 16, x[np.arange(128) ^ 1], x)",
    ),
}


def _execute(run, plant, seed, fault, **options):
    rng = np.random.default_rng(7)
    x = rng.uniform(1, 2, 128).astype(np.float32)
    y = np.full(128 + plant.spare, np.nan, np.float32)
    if plant.spare:
        y[128] = 0
    options |= {"shared": plant.shared, "seed": seed, "undefined": () if plant.spare else (y,), "readonly": (x,)}
    define = ("FAULT",) if fault else ()
    report = run(plant.source, plant.grid, plant.block, y, x, define=define, **options)
    return x, y[:128], report


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_caught_at_its_line(run, name):
    plant = PLANTS[name]
    for seed in SEEDS:
        with pytest.raises(KernelFault) as caught:
            _execute(run, plant, seed, fault=True)
        fault = caught.value
        lines = {fault.line.number}
        if fault.line.caller is not None:
            lines.add(fault.line.caller.number)
        assert fault.line.file == "planted.cu"
        if seed is None:
            assert fault.kind == plant.kind, fault
            assert plant.line in lines, fault
        else:  # a race may also show as what it leads to
            assert fault.kind in (plant.kind, "undefined value", "missing cp.async wait"), fault
            assert lines & {plant.line, *plant.other_lines}, fault
        assert fault.kernel == "k"
        assert 0 <= fault.block[0] < plant.grid
        assert 0 <= fault.thread[0] < plant.block
        assert str(fault.line) in str(fault)


@pytest.mark.parametrize("arch", ["compute_70", "compute_90"])
@pytest.mark.parametrize("name", PLANTS)
def test_other_architectures(run, name, arch):
    """The same in the PTX for older and newer GPUs."""
    plant = PLANTS[name]
    with pytest.raises(KernelFault) as caught:
        _execute(run, plant, None, fault=True, arch=arch)
    assert caught.value.kind == plant.kind
    x, y, _ = _execute(run, plant, None, fault=False, arch=arch)
    np.testing.assert_allclose(y, eval(plant.expected, {"np": np, "x": x}), rtol=1e-6)


@pytest.mark.parametrize("name", PLANTS)
def test_its_correct_twin_passes(run, name):
    plant = PLANTS[name]
    for seed in SEEDS:
        x, y, _ = _execute(run, plant, seed, fault=False)
        np.testing.assert_allclose(y, eval(plant.expected, {"np": np, "x": x}), rtol=1e-6)
