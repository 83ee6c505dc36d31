"""Float instructions against exact rational arithmetic, rounded once."""

from fractions import Fraction
from math import inf, isfinite, isnan, nan

import ml_dtypes
import numpy as np
import pytest

FORMATS = {  # dtype, bits of the significand, exponents of the smallest and largest normal number, carrier
    "f16": (np.dtype(np.float16), 11, -14, 15, np.uint16),
    "bf16": (np.dtype(ml_dtypes.bfloat16), 8, -126, 127, np.uint16),
    "f32": (np.dtype(np.float32), 24, -126, 127, np.float32),
    "f64": (np.dtype(np.float64), 53, -1022, 1023, np.float64),
}


def exact_round(x, kind, mode="rn"):
    """A Fraction rounded to a format, as a Python float."""
    _, precision, smallest, largest, _ = FORMATS[kind]
    if x == 0:
        return 0.0
    magnitude = abs(x)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, smallest) - precision + 1)
    whole, rest = divmod(magnitude, step)
    up = {
        "rn": 2 * rest > step or (2 * rest == step and whole % 2 == 1),
        "rz": False,
        "rm": rest > 0 and x < 0,
        "rp": rest > 0 and x > 0,
    }[mode]
    result = (whole + up) * step
    limit = (2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** largest
    if result > limit:
        towards_zero = mode == "rz" or (mode == "rm" and x > 0) or (mode == "rp" and x < 0)
        result = limit if towards_zero else inf
    return float(result) * (1 if x > 0 else -1)


def floats(rng, kind, count=1000):
    """Random bit patterns, numbers of similar size (whose sums cancel and tie), and the edges; no NaN."""
    dtype = FORMATS[kind][0]
    bits = rng.integers(0, 2 ** (8 * dtype.itemsize) - 1, count, dtype=np.uint64).astype(f"u{dtype.itemsize}")
    values = bits.view(dtype).copy()
    near = (rng.integers(-64, 64, count) * 2.0 ** rng.integers(-6, 6, count)).astype(dtype)
    values = np.where(rng.random(count) < 0.6, near, values)
    info = ml_dtypes.finfo(dtype)
    edges = [0.0, -0.0, 1.0, -1.0, info.max, -info.max, info.tiny, info.smallest_subnormal, inf, -inf]
    values[: len(edges)] = np.array(rng.permutation(edges), np.float64).astype(dtype)
    with np.errstate(invalid="ignore"):  # a signalling NaN complains when it is converted
        values[np.isnan(values.astype(np.float64))] = dtype.type(1.5)
    return values


def same(got, want):
    """Equal values, and zeros of equal sign; any NaN equals any other."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_array_equal(got, want)
    zero = want == 0
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]))


def execute(apply, code, kind, *arrays):
    """Run on arrays of a format, carried as integers where C has no such type."""
    dtype, carrier = FORMATS[kind][0], np.dtype(FORMATS[kind][4])
    return apply(code, carrier, *(array.view(carrier) for array in arrays)).view(dtype)


EXACT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
    "div": lambda a, b: a / b,
}


def oracle(function, kind, mode, values):
    """One rounding of the exact result; with infinities, or for zeros, what IEEE arithmetic in float64 says."""
    if all(isfinite(value) for value in values):
        try:
            exact = function(*(Fraction(value) for value in values))
        except ZeroDivisionError:
            return inf * np.sign(values[0]) * (-1 if np.signbit(values[1]) else 1) if values[0] else nan
        if exact != 0:
            return exact_round(exact, kind, mode)
    with np.errstate(all="ignore"):
        wide = function(*(np.float64(value) for value in values))
    return float(wide)


@pytest.mark.parametrize(
    ("name", "kind", "mode"),
    [(name, "f32", mode) for name in ("add", "sub", "mul", "fma") for mode in ("rn", "rz", "rm", "rp")]
    + [(name, "f16", "rn") for name in ("add", "sub", "mul", "fma")]
    + [(name, "f64", "rn") for name in EXACT]
    + [("div", "f32", "rn"), ("fma", "bf16", "rn")],
)
def test_arithmetic_is_rounded_once(apply, rng, name, kind, mode):
    count = 3 if name == "fma" else 2
    values = [floats(rng, kind) for _ in range(count)]
    if kind == "f64":  # far from over- and underflow, where the emulated fused operation is exact
        values = [rng.standard_normal(1000) * 2.0 ** rng.integers(-30, 30, 1000) for _ in range(count)]
    operands = ", ".join(f"%{number + 1}" for number in range(count))
    got = execute(apply, f"{name}.{mode}.{kind} %0, {operands};", kind, *values)
    rows = zip(*(value.astype(np.float64).tolist() for value in values), strict=True)
    with np.errstate(over="ignore", invalid="ignore"):
        want = np.array([oracle(EXACT[name], kind, mode, row) for row in rows])
    exact_zero = want == 0
    same(got[~exact_zero], want[~exact_zero])
    np.testing.assert_array_equal(got[exact_zero].astype(np.float64), 0)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_packed_arithmetic(apply, rng, name, kind):
    count = 3 if name == "fma" else 2
    values = [floats(rng, kind) for _ in range(count)]
    operands = ", ".join(f"%{number + 1}" for number in range(count))
    words = [value.view(np.uint32) for value in values]
    rounding = ".rn" if name == "fma" else ""
    got = apply(f"{name}{rounding}.{kind}x2 %0, {operands};", np.uint32, *words, arch="compute_90")
    rows = zip(*(value.astype(np.float64).tolist() for value in values), strict=True)
    want = np.array([oracle(EXACT[name], kind, "rn", row) for row in rows])
    np.testing.assert_array_equal(got.view(FORMATS[kind][0]).astype(np.float64), want)


def test_fused_is_not_two_roundings(apply):
    """2^-24 decides a tie that a float64 sum would have lost."""
    a = np.array([1 + 2.0**-12], np.float32)
    b = np.array([1 + 2.0**-12], np.float32)
    c = np.array([2.0**-60], np.float32)
    # a·b = 1 + 2^-11 + 2^-24 lies half way between two float32; c tips it upwards.
    got = apply("fma.rn.f32 %0, %1, %2, %3;", np.float32, a, b, c)
    assert got[0] == np.float32(1 + 2.0**-11 + 2.0**-23)
    assert apply("fma.rn.f32 %0, %1, %2, %3;", np.float32, a, b, -c)[0] == np.float32(1 + 2.0**-11)


def test_flush_to_zero(apply):
    tiny = np.array([1e-40, -1e-40, 1e-20, 3.0], np.float32)
    got = apply("mul.ftz.f32 %0, %1, %2;", np.float32, tiny, np.array([1, 1, 1e-20, 1], np.float32))
    same(got, [0.0, -0.0, 0.0, 3.0])
    same(apply("add.ftz.f32 %0, %1, %1;", np.float32, tiny), [0.0, -0.0, np.float32(2e-20), 6.0])


def test_saturation(apply):
    x = np.array([-1, 0.25, 7, nan, inf], np.float32)
    same(apply("add.sat.f32 %0, %1, %1;", np.float32, x), [0, 0.5, 1, 0, 1])


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_extremes(apply, rng, kind):
    a, b = floats(rng, kind), floats(rng, kind)
    a[-1], b[-2] = nan, nan
    a[-3], b[-3] = -0.0, 0.0
    a[-4], b[-4] = 0.0, -0.0
    wide = [value.astype(np.float64) for value in (a, b)]
    got = execute(apply, f"min.{kind} %0, %1, %2;", kind, a, b)
    np.testing.assert_array_equal(got.astype(np.float64), np.fmin(*wide))
    same(got[-4:], [-0.0, -0.0, wide[0][-2], wide[1][-1]])
    same(execute(apply, f"max.{kind} %0, %1, %2;", kind, a, b)[-4:], [0.0, 0.0, wide[0][-2], wide[1][-1]])
    if kind != "f64":
        got = execute(apply, f"max.NaN.{kind} %0, %1, %2;", kind, a, b).astype(np.float64)
        np.testing.assert_array_equal(got, np.maximum(*wide))


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_signs(apply, rng, kind):
    a = floats(rng, kind)
    same(execute(apply, f"neg.{kind} %0, %1;", kind, a), -a.astype(np.float64))
    same(execute(apply, f"abs.{kind} %0, %1;", kind, a), np.abs(a.astype(np.float64)))


def test_functions(apply, rng):
    """Correctly rounded where PTX says so; the approximations within the error it allows."""
    x = np.abs(rng.standard_normal(500) * 2.0 ** rng.integers(-20, 20, 500)).astype(np.float32) + np.float32(1e-6)
    wide = x.astype(np.float64)
    same(apply("sqrt.rn.f32 %0, %1;", np.float32, x), np.sqrt(wide).astype(np.float32))
    same(apply("rcp.rn.f32 %0, %1;", np.float32, x), (1 / wide).astype(np.float32))
    same(apply("div.full.f32 %0, %1, %2;", np.float32, x, x[::-1].copy()), x / x[::-1])
    bounded = (np.abs(rng.standard_normal(500)) * 20 - 10).astype(np.float32)
    for name, function, values in (
        ("ex2.approx", np.exp2, bounded),
        ("rsqrt.approx", lambda v: 1 / np.sqrt(v), x),
        ("rcp.approx", lambda v: 1 / v, x),
        ("tanh.approx", np.tanh, bounded),
    ):
        got = apply(f"{name}.f32 %0, %1;", np.float32, values)
        np.testing.assert_allclose(got, function(values.astype(np.float64)), rtol=2**-22)
    for name, function, values in (("lg2", np.log2, x), ("sin", np.sin, bounded), ("cos", np.cos, bounded)):
        got = apply(f"{name}.approx.f32 %0, %1;", np.float32, values)
        np.testing.assert_allclose(got, function(values.astype(np.float64)), rtol=2**-22, atol=2**-22)
    edges = apply("ex2.approx.f32 %0, %1;", np.float32, np.array([-inf, inf, nan, 0, -200], np.float32))
    same(edges, [0, inf, nan, 1, 0])
    same(
        apply("lg2.approx.f32 %0, %1;", np.float32, np.array([0, 1, -1, inf], np.float32)),
        [-inf, 0, nan, inf],
    )


ORDERED = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_comparisons_with_and_without_nan(apply, rng, kind):
    a, b = floats(rng, kind), floats(rng, kind)
    b[::3] = a[::3]
    a[::7], b[::11] = nan, nan
    carrier = FORMATS[kind][4]
    rows = list(zip(a.astype(np.float64).tolist(), b.astype(np.float64).tolist(), strict=True))
    arrays = [value.view(carrier) for value in (a, b)]
    for name, function in ORDERED.items():
        for suffix in ("", "u"):
            code = f"{{.reg .pred p; setp.{name}{suffix}.{kind} p, %1, %2; selp.u32 %0, 1, 0, p;}}"
            want = [
                (suffix == "u") if isnan(x) or isnan(y) else function(x, y)  # unordered: only the u forms hold
                for x, y in rows
            ]
            got = apply(code, np.uint32, *arrays, arch="compute_90")
            np.testing.assert_array_equal(got, np.array(want, np.uint32), err_msg=name + suffix)
    for name, wanted in (("num", False), ("nan", True)):
        code = f"{{.reg .pred p; setp.{name}.{kind} p, %1, %2; selp.u32 %0, 1, 0, p;}}"
        want = [(isnan(x) or isnan(y)) == wanted for x, y in rows]
        np.testing.assert_array_equal(apply(code, np.uint32, *arrays, arch="compute_90"), np.array(want, np.uint32))


def test_set_gives_numbers(apply, rng):
    a, b = floats(rng, "f32"), floats(rng, "f32")
    b[::3] = a[::3]
    same(apply("set.le.f32.f32 %0, %1, %2;", np.float32, a, b), (a <= b).astype(np.float32))
    np.testing.assert_array_equal(
        apply("set.le.u32.f32 %0, %1, %2;", np.uint32, a, b), np.where(a <= b, 0xFFFFFFFF, 0)
    )
    c, d = floats(rng, "f16"), floats(rng, "f16")
    d[::3] = c[::3]
    got = apply("set.ge.f16x2.f16x2 %0, %1, %2;", np.uint32, c.view(np.uint32), d.view(np.uint32))
    np.testing.assert_array_equal(got.view(np.float16), (c >= d).astype(np.float16))


@pytest.mark.parametrize(
    ("to", "source"),
    [("f16", "f32"), ("f16", "f64"), ("f32", "f64"), ("bf16", "f32"), ("f32", "f16"), ("f64", "f32")],
)
def test_conversions_between_floats(apply, rng, to, source):
    a = floats(rng, source)
    narrows = FORMATS[to][0].itemsize < FORMATS[source][0].itemsize
    if narrows:  # around the range of the target, and ties of it
        some = floats(rng, to).astype(np.float64) * (1 + rng.choice([0, 0.5, -0.5], 1000) * 2.0 ** -FORMATS[to][1])
        a = np.where(rng.random(1000) < 0.8, some, a.astype(np.float64)).astype(FORMATS[source][0])
    modes = ["rn", "rz"] if to == "bf16" else ["rn", "rz", "rm", "rp"] if narrows else [""]
    for mode in modes:
        code = f"cvt.{mode + '.' if mode else ''}{to}.{source} %0, %1;"
        got = apply(code, FORMATS[to][4], a.view(FORMATS[source][4])).view(FORMATS[to][0])
        want = [
            exact_round(Fraction(x), to, mode or "rn") if isfinite(x) and x else x
            for x in a.astype(np.float64).tolist()
        ]
        same(got, want)


def test_packed_conversions(apply, rng):
    a, b = floats(rng, "f32"), floats(rng, "f32")
    with np.errstate(over="ignore"):
        for kind in ("f16", "bf16"):
            dtype = FORMATS[kind][0]
            got = apply(f"cvt.rn.{kind}x2.f32 %0, %1, %2;", np.uint32, a, b).view(dtype).reshape(-1, 2)
            same(got[:, 1], a.astype(dtype))
            same(got[:, 0], b.astype(dtype))
            got = apply(f"cvt.rn.relu.{kind}x2.f32 %0, %1, %2;", np.uint32, a, b).view(dtype).reshape(-1, 2)
            np.testing.assert_array_equal(
                got[:, 1].astype(np.float64), np.maximum(a.astype(dtype).astype(np.float64), 0)
            )


INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@pytest.mark.parametrize("source", ["f16", "f32", "f64"])
@pytest.mark.parametrize("to", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_floats_to_integers(apply, rng, to, source):
    a = floats(rng, source)
    a[-1] = nan
    a[-200:-1] = (rng.integers(-600, 600, 199) / 2).astype(a.dtype)
    dtype = np.dtype(f"{'i' if to[0] == 's' else 'u'}{int(to[1:]) // 8}")
    limits = np.iinfo(dtype)
    wide = np.dtype(f"{dtype.kind}{max(2, dtype.itemsize)}")
    for mode, function in INTEGRAL.items():
        got = apply(f"cvt.{mode}.{to}.{source} %0, %1;", wide, a.view(FORMATS[source][4]))
        want = [
            0 if isnan(x) else int(limits.max if x > 0 else limits.min) if not isfinite(x)
            else min(max(int(function(x)), int(limits.min)), int(limits.max))
            for x in a.astype(np.float64).tolist()
        ]  # fmt: skip
        np.testing.assert_array_equal(got, np.array(want, wide))
        if to == "s32":
            same(
                execute(apply, f"cvt.{mode}.{source}.{source} %0, %1;", source, a),
                function(a.astype(np.float64)),
            )


@pytest.mark.parametrize("source", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_integers_to_floats(apply, rng, source):
    bits = int(source[1:])
    dtype = np.dtype(f"{'i' if source[0] == 's' else 'u'}{bits // 8}")
    raw = rng.integers(0, 2**64, 800, dtype=np.uint64) >> rng.integers(0, 64, 800, dtype=np.uint64)
    a = raw.astype(f"u{bits // 8}").view(dtype)
    for to in ("f16", "f32", "f64"):
        if bits == 64 and to == "f16":
            continue
        for mode in ("rn", "rz", "rm", "rp") if bits < 64 and to == "f32" else ("rn",):
            got = apply(f"cvt.{mode}.{to}.{source} %0, %1;", FORMATS[to][4], a).view(FORMATS[to][0])
            want = [exact_round(Fraction(x), to, mode) for x in a.tolist()]
            same(got, want)


def test_half_intrinsics_of_cuda(run, rng):
    """What the headers make of half and bfloat16 types, through a kernel as one would write it."""
    source = """
    #include <cuda_fp16.h>
    #include <cuda_bf16.h>
    extern "C" __global__ void k(float* out, const __half2* h, const __nv_bfloat162* b, const float* f) {
      int i = threadIdx.x;
      float2 x = __half22float2(__hfma2(h[i], h[i + 64], __float2half2_rn(f[i])));
      float2 y = __bfloat1622float2(__hadd2(b[i], __hmul2(b[i + 64], __floats2bfloat162_rn(f[i], -f[i]))));
      out[4 * i] = x.x; out[4 * i + 1] = x.y; out[4 * i + 2] = y.x; out[4 * i + 3] = y.y;
    }"""
    h = rng.standard_normal((128, 2)).astype(np.float16)
    b = rng.standard_normal((128, 2)).astype(ml_dtypes.bfloat16)
    f = rng.standard_normal(64).astype(np.float32)
    half = f.astype(np.float16).astype(np.float64)[:, None]
    wide = h.astype(np.float64)
    want_half = (wide[:64] * wide[64:] + half).astype(np.float16).astype(np.float32)
    pair = np.stack([f, -f], axis=1).astype(ml_dtypes.bfloat16).astype(np.float32)
    product = (b[64:].astype(np.float32) * pair).astype(ml_dtypes.bfloat16).astype(np.float32)
    want_bfloat = (b[:64].astype(np.float32) + product).astype(ml_dtypes.bfloat16).astype(np.float32)
    for arch in ("compute_80", "compute_90"):
        out = np.zeros((64, 4), np.float32)
        run(source, 1, 64, out, h, b, f, undefined=(out,), arch=arch)
        np.testing.assert_array_equal(out[:, :2], want_half)
        np.testing.assert_array_equal(out[:, 2:], want_bfloat)
