"""What a launch counts, against patterns whose cost is known."""

import numpy as np
import pytest

from kvcupy.backends.ptx import Buffer, Module, launch


def aligned(nbytes):
    """Zeros at a multiple of 128, so that sectors and lines are what they would be in a GPU's memory."""
    raw = np.zeros(nbytes + 128, np.uint8)
    skip = -raw.ctypes.data % 128
    return raw[skip : skip + nbytes]


def count(source, block, nbytes, *args, grid=1, shared=0):
    data = aligned(nbytes)
    kernel = Module.compile(source)["k"]
    return launch(kernel, grid, block, [data.ctypes.data, *args], shared, buffers=[Buffer.of(data)])


@pytest.mark.parametrize(
    ("kind", "nbytes", "stride", "sectors", "lines", "minimum"),
    [
        ("float", 4, 1, 4, 1, 4),
        ("float4", 16, 1, 16, 4, 16),
        ("float", 4, 2, 8, 2, 4),
        ("float", 4, 8, 32, 8, 4),
        ("float", 4, 32, 32, 32, 4),
        ("char", 1, 1, 1, 1, 1),
        ("float", 4, 0, 1, 1, 1),
        ("float4", 16, 2, 32, 8, 16),
    ],
)
def test_sectors_and_lines(run, kind, nbytes, stride, sectors, lines, minimum):
    source = f"""
    extern "C" __global__ void k({kind}* x, int stride) {{
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      {kind} v = x[(long long)i * stride];
      if (*(char*)&v == 77) x[0] = v;
    }}"""
    report = count(source, 64, 256 * nbytes * max(stride, 1), stride, grid=3)
    total = report.total
    assert total.global_loads == 6
    assert total.global_stores == 0
    assert total.sectors == 6 * sectors
    assert total.lines == 6 * lines
    assert total.useful_bytes == 6 * nbytes * (32 if stride else 1)
    assert total.minimum_sectors == 6 * minimum


def test_offset_by_half_a_sector_costs_one_more(run):
    source = 'extern "C" __global__ void k(float* x) { float v = x[threadIdx.x + 4]; if (v == 77) x[0] = v; }'
    total = count(source, 32, 1024).total
    assert (total.sectors, total.minimum_sectors, total.lines) == (5, 4, 2)


def test_inactive_lanes_cost_nothing(run):
    source = 'extern "C" __global__ void k(float* x) { if (threadIdx.x % 16 == 3) x[threadIdx.x * 8] = 1.f; }'
    total = count(source, 64, 4096).total
    assert total.global_stores == 2
    assert (total.sectors, total.lines, total.useful_bytes, total.minimum_sectors) == (4, 4, 16, 2)


@pytest.mark.parametrize(
    ("kind", "words", "stride", "extra"),
    [
        ("float", 1, 1, 0),
        ("float", 1, 2, 1),
        ("float", 1, 32, 31),
        ("float", 1, 33, 0),
        ("float", 1, 0, 0),
        ("float2", 2, 1, 0),
        ("float2", 2, 2, 2),  # in each half warp two lanes to a bank
        ("float4", 4, 1, 0),
        ("float4", 4, 8, 28),  # in each quarter warp eight lanes to a bank
    ],
)
def test_bank_conflicts(run, kind, words, stride, extra):
    source = f"""
    extern "C" __global__ void k(float* x, int stride) {{
      extern __shared__ __align__(16) float raw[];
      {kind}* s = ({kind}*)raw;
      volatile float* sink = x;
      s[(threadIdx.x & 31) * stride] = {kind}();
    }}"""
    if stride == 0:
        source = source.replace("s[(threadIdx.x & 31) * stride] =", "if (threadIdx.x == 0) s[0] =")
    report = count(source, 32, 1024, stride, grid=2, shared=32 * max(stride, 1) * words * 4)
    assert report.total.shared_requests == 2
    assert report.total.bank_conflicts == 2 * extra


def test_lines_of_the_source_and_classes(run):
    source = """#line 1 "lines.cu"
extern "C" __global__ void k(float* x) {
  float v = x[threadIdx.x];
  for (int j = 0; j < 10; j++)
    asm volatile("fma.rn.f32 %0, %0, %0, %0;" : "+f"(v));
  x[threadIdx.x] = v;
}"""
    report = count(source, 64, 1024)
    by_line = {(line.file, line.number): counts for line, counts in report.lines.items()}
    assert by_line["lines.cu", 2].global_loads == 2
    assert by_line["lines.cu", 5].global_stores == 2
    assert by_line["lines.cu", 5].sectors == 8
    assert report.classes["f32"] == 20
    assert report.classes["global"] == 4
    assert report.total.instructions == sum(report.classes.values())
    assert report.total.instructions == sum(counts.instructions for counts in report.lines.values())


def test_divergence_issues_both_sides(run):
    source = """
    extern "C" __global__ void k(float* x) {
      float v = x[threadIdx.x];
      if (threadIdx.x % 32 < 7) { asm volatile("add.f32 %0, %0, %0;" : "+f"(v)); }
      else { asm volatile("mul.f32 %0, %0, %0;" : "+f"(v)); }
      x[threadIdx.x] = v;
    }"""
    assert count(source, 96, 1024).classes["f32"] == 6
    source = source.replace("threadIdx.x % 32 < 7", "threadIdx.x / 32 == 1")
    assert count(source, 96, 1024).classes["f32"] == 3


def test_without_checks_nothing_but_instructions_is_counted(run):
    source = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] += 1.f; }'
    x = np.zeros(32, np.float32)
    report = launch(Module.compile(source)["k"], 1, 32, [x.ctypes.data], buffers=[Buffer.of(x)], checks=False)
    assert x.tolist() == [1.0] * 32
    assert report.total.instructions > 0
    assert report.total.global_loads == report.total.sectors == 0
