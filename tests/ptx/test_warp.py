"""Instructions between the lanes of a warp, and control flow around them."""

import numpy as np
import pytest

LANE = np.arange(128) % 32
WARP = np.arange(128) // 32


def execute(run, body, *arrays, out=np.uint32, block=128, grid=1, **options):
    """out[i] = the value of `r` at the end of body; arrays a, b, ... are read as a[i], b[i]."""
    kinds = {"u4": "unsigned", "i4": "int", "f4": "float", "u8": "unsigned long long"}
    result = np.zeros(block * grid, out)
    parameters = "".join(
        f", const {kinds[array.dtype.str[1:]]}* {name}" for array, name in zip(arrays, "abc", strict=False)
    )
    source = f"""
    extern "C" __global__ void k({kinds[np.dtype(out).str[1:]]}* out{parameters}) {{
      int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31;
      {kinds[np.dtype(out).str[1:]]} r = 0;
      {body}
      out[i] = r;
    }}"""
    run(source, grid, block, result, *arrays, undefined=(result,), **options)
    return result


@pytest.mark.parametrize("width", [32, 16, 8, 4])
def test_shuffles(run, rng, width):
    a = rng.integers(0, 2**32, 128, dtype=np.uint32)
    by = rng.integers(0, 32, 128).astype(np.uint32)
    start = np.arange(128) // width * width
    inside = np.arange(128) - start

    got = execute(run, f"r = __shfl_sync(~0u, a[i], b[i], {width});", a, by)
    np.testing.assert_array_equal(got, a[start + by % width])
    for delta in (1, width // 2, width - 1):
        got = execute(run, f"r = __shfl_up_sync(~0u, a[i], {delta}, {width});", a)
        np.testing.assert_array_equal(got, np.where(inside >= delta, a[np.arange(128) - delta], a))
        got = execute(run, f"r = __shfl_down_sync(~0u, a[i], {delta}, {width});", a)
        below = inside + delta < width
        np.testing.assert_array_equal(got, np.where(below, a[(np.arange(128) + delta) % 128], a))
        got = execute(run, f"r = __shfl_xor_sync(~0u, a[i], {delta}, {width});", a)
        np.testing.assert_array_equal(got, a[np.arange(128) ^ delta])


def test_votes(run, rng):
    a = rng.integers(0, 4, 128).astype(np.uint32)
    a[32:64], a[64:96] = 0, 3
    bits = a.reshape(4, 32) > 1
    np.testing.assert_array_equal(
        execute(run, "r = __ballot_sync(~0u, a[i] > 1);", a), (bits * 2 ** np.arange(32)).sum(axis=1)[WARP]
    )
    np.testing.assert_array_equal(execute(run, "r = __any_sync(~0u, a[i] > 1);", a), bits.any(axis=1)[WARP])
    np.testing.assert_array_equal(execute(run, "r = __all_sync(~0u, a[i] > 1);", a), bits.all(axis=1)[WARP])
    got = execute(run, "r = __uni_sync(~0u, a[i] > 1);", a)
    np.testing.assert_array_equal(got, (bits.all(axis=1) | ~bits.any(axis=1))[WARP])


def test_votes_of_half_warps_at_once(run, rng):
    """Two halves vote in the same instruction with masks of their own."""
    a = rng.integers(0, 2, 128).astype(np.uint32)
    got = execute(run, "r = __ballot_sync(lane < 16 ? 0xffffu : 0xffff0000u, a[i]);", a)
    bits = a.reshape(4, 32) * 2 ** np.arange(32)
    want = np.where(LANE < 16, bits[:, :16].sum(axis=1)[WARP], bits[:, 16:].sum(axis=1)[WARP])
    np.testing.assert_array_equal(got, want)


def test_active_lanes(run):
    got = execute(run, "if (lane % 3 == 1) r = __activemask();")
    mask = sum(1 << lane for lane in range(32) if lane % 3 == 1)
    np.testing.assert_array_equal(got, np.where(LANE % 3 == 1, mask, 0))


@pytest.mark.parametrize("name", ["add", "min", "max", "and", "or", "xor"])
def test_reductions(run, rng, name):
    a = rng.integers(0, 2**32, 128, dtype=np.uint32)
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum}
    functions |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    got = execute(run, f"r = __reduce_{name}_sync(~0u, a[i]);", a)
    want = functions[name].reduce(a.reshape(4, 32).astype(np.uint64), axis=1).astype(np.uint32)
    np.testing.assert_array_equal(got, want[WARP])
    if name in ("min", "max"):
        signed = a.view(np.int32)
        got = execute(run, f"r = __reduce_{name}_sync(~0u, a[i]);", signed, out=np.int32)
        np.testing.assert_array_equal(got, functions[name].reduce(signed.reshape(4, 32), axis=1)[WARP])


def test_matches(run, rng):
    a = rng.integers(0, 5, 128).astype(np.uint32)
    a[64:96] = 7
    rows = a.reshape(4, 32)
    equal = ((rows[:, :, None] == rows[:, None, :]) * 2 ** np.arange(32)).sum(axis=2).reshape(-1)
    np.testing.assert_array_equal(execute(run, "r = __match_any_sync(~0u, a[i]);", a), equal)
    got = execute(run, "int all; r = __match_all_sync(~0u, a[i], &all); r = all ? r : 5;", a)
    np.testing.assert_array_equal(got, np.where(WARP == 2, 0xFFFFFFFF, 5))


def test_shuffles_of_diverged_lanes_that_meet(run):
    """Lanes come to one shuffle by different ways and at different times."""
    body = """
      unsigned v = lane;
      if (lane & 1) { for (int j = 0; j < lane; j++) v = v * 3 + j; } else { v = v + 100; }
      r = __shfl_xor_sync(~0u, v, 1);
    """
    values = []
    for lane in range(32):
        v = lane
        if lane & 1:
            for j in range(lane):
                v = (v * 3 + j) % 2**32
        else:
            v += 100
        values.append(v)
    np.testing.assert_array_equal(execute(run, body), np.array(values)[LANE ^ 1])
    for seed in range(5):
        np.testing.assert_array_equal(execute(run, body, seed=seed), np.array(values)[LANE ^ 1])


def test_a_block_that_is_no_whole_number_of_warps(run):
    """Lanes without a thread are not waited for."""
    body = """
      for (int o = 1; o < 32; o *= 2) r += __ballot_sync(~0u, lane & o);
      __syncthreads();
      r += __syncthreads_count(lane == 3);
    """
    got = execute(run, body, block=40, grid=3)
    lanes = [range(32), range(8)]
    sums = [sum(sum(1 << lane for lane in those if lane & o) for o in (1, 2, 4, 8, 16)) for those in lanes]
    want = np.where(np.arange(120) % 40 < 32, sums[0], sums[1]) + 2
    np.testing.assert_array_equal(got, want % 2**32)


def test_reducing_barriers(run):
    body = """
      r = __syncthreads_count(i % 3 == 0) * 4 + (__syncthreads_and(i < 200) ? 2 : 0) + !!__syncthreads_or(i > 200);
    """
    got = execute(run, body, grid=2)
    counts = np.array([sum(i % 3 == 0 for i in range(start, start + 128)) for start in (0, 128)])
    np.testing.assert_array_equal(got, np.repeat(counts * 4 + np.array([2, 1]), 128))


def collatz(start):
    n, steps = start, 0
    while n != 1 and steps < 60:
        n = 3 * n + 1 if n % 2 else n // 2
        steps += 1
        if n % 7 == 3 and n % 5 == 1:
            break
        if n % 11 == 4:
            steps += 2
            continue
        steps += n % 3 if n % 4 == 1 else 0
    return steps


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_nested_divergence(run, seed):
    """Loops of different lengths, with branches, breaks and continues in them, and threads that return early."""
    body = """
      if (i % 13 == 5) { out[i] = 1000; return; }
      unsigned n = i + 1;
      while (n != 1 && r < 60) {
        n = n % 2 ? 3 * n + 1 : n / 2;
        r++;
        if (n % 7 == 3 && n % 5 == 1) break;
        if (n % 11 == 4) { r += 2; continue; }
        if (n % 4 == 1) r += n % 3;
      }
    """
    got = execute(run, body, grid=3, seed=seed)
    want = [1000 if i % 13 == 5 else collatz(i + 1) for i in range(384)]
    np.testing.assert_array_equal(got, want)


def test_a_switch(run):
    cases = "".join(f"case {value}: r = {value * value + 3}; break;" for value in range(9))
    got = execute(run, f"switch (i % 11) {{ {cases} default: r = 99; }}")
    np.testing.assert_array_equal(got, [n * n + 3 if n < 9 else 99 for n in np.arange(128) % 11])


def test_barriers_in_loops_with_early_warps(run):
    """Whole warps leave; the others go on to meet at barriers."""
    body = """
      __shared__ unsigned s[128];
      s[threadIdx.x] = 0;
      __syncthreads();
      if (threadIdx.x >= 96) { out[i] = 7; return; }
      for (int round = 0; round < 5; round++) {
        s[threadIdx.x] += round + threadIdx.x;
        __syncthreads();
        r += s[(threadIdx.x + 32) % 96];
        __syncthreads();
      }
    """
    t = np.arange(96)
    want = sum(sum(round_ + (t + 32) % 96 for round_ in range(last + 1)) for last in range(5))
    for seed in (None, 3, 4):
        got = execute(run, body, seed=seed)
        np.testing.assert_array_equal(got[:96], want)
        np.testing.assert_array_equal(got[96:], 7)


def test_named_barriers(run):
    """Two halves of a block, each with a barrier of its own."""
    body = """
      __shared__ unsigned s[128];
      int half = threadIdx.x / 64;
      s[threadIdx.x] = i * 3;
      if (half) asm volatile("bar.sync 1, 64;" ::: "memory"); else asm volatile("bar.sync 2, 64;" ::: "memory");
      r = s[threadIdx.x ^ 32];
    """
    for seed in (None, 1):
        np.testing.assert_array_equal(execute(run, body, seed=seed), (np.arange(128) ^ 32) * 3)


def test_special_registers(run):
    source = """
    extern "C" __global__ void k(unsigned* out) {
      unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
      unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z), lane, warp, below;
      asm("mov.u32 %0, %%laneid;" : "=r"(lane));
      asm("mov.u32 %0, %%warpid;" : "=r"(warp));
      asm("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
      unsigned* o = out + 6 * (b * 48 + t);
      o[0] = t; o[1] = b; o[2] = lane; o[3] = warp; o[4] = __popc(below);
      o[5] = threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z;
    }"""
    out = np.zeros((2 * 3 * 2, 48, 6), np.uint32)
    run(source, (2, 3, 2), (4, 6, 2), out, undefined=(out,))
    t = np.arange(48)
    np.testing.assert_array_equal(out[:, :, 0], np.broadcast_to(t, (12, 48)))
    np.testing.assert_array_equal(out[:, :, 1], np.broadcast_to(np.arange(12)[:, None], (12, 48)))
    np.testing.assert_array_equal(out[3, :, 2], t % 32)
    np.testing.assert_array_equal(out[3, :, 3], t // 32)
    np.testing.assert_array_equal(out[3, :, 4], t % 32)
    np.testing.assert_array_equal(out[5, :, 5], t % 4 + 10 * (t // 4 % 6) + 100 * (t // 24))
