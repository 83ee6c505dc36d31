"""Integer and bit instructions against Python's own integers, on random numbers and on those at the edges."""

import numpy as np
import pytest


def numbers(rng, kind, count=400):
    """Random numbers of every magnitude, and the edges, of a type such as "s32"."""
    bits = int(kind[1:])
    dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}")
    raw = rng.integers(0, 2**64, count, dtype=np.uint64) >> rng.integers(0, 64, count, dtype=np.uint64)
    raw = np.where(rng.random(count) < 0.5, raw, ~raw)
    edges = np.array([0, 1, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1, 31, 32, 33], np.uint64)
    raw[: len(edges)] = rng.permutation(edges)
    return raw.astype(f"u{bits // 8}").view(dtype)


def wrap(value, dtype):
    bits = np.dtype(dtype).itemsize * 8
    value %= 1 << bits
    return value - (1 << bits) if np.dtype(dtype).kind == "i" and value >> (bits - 1) else value


def check(apply, code, result, function, *arrays):
    got = apply(code, result, *arrays)
    want = [wrap(function(*values), result) for values in zip(*(array.tolist() for array in arrays), strict=True)]
    np.testing.assert_array_equal(got, np.array(want, result))


def truncated(a, b):
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": truncated,
    "rem": lambda a, b: a - truncated(a, b) * b,
}


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("name", BINARY)
def test_binary(apply, rng, name, kind):
    a, b = numbers(rng, kind), numbers(rng, kind)
    if name in ("div", "rem"):
        b[b == 0] = 3
        b[(b == -1) & (a == np.iinfo(a.dtype).min)] = 5 if kind[0] == "s" else 1
    check(apply, f"{name}.{kind} %0, %1, %2;", a.dtype, BINARY[name], a, b)


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_high_and_wide_products(apply, rng, kind):
    a, b = numbers(rng, kind), numbers(rng, kind)
    bits = int(kind[1:])
    check(apply, f"mul.hi.{kind} %0, %1, %2;", a.dtype, lambda a, b: a * b >> bits, a, b)
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}{bits // 4}")
        check(apply, f"mul.wide.{kind} %0, %1, %2;", wide, lambda a, b: a * b, a, b)
        c = numbers(rng, f"{kind[0]}{bits * 2}")
        check(apply, f"mad.wide.{kind} %0, %1, %2, %3;", wide, lambda a, b, c: a * b + c, a, b, c)
    c = numbers(rng, kind)
    check(apply, f"mad.lo.{kind} %0, %1, %2, %3;", a.dtype, lambda a, b, c: a * b + c, a, b, c)


def test_saturating_sum(apply, rng):
    a, b = numbers(rng, "s32"), numbers(rng, "s32")
    for name, function in (("add", lambda a, b: a + b), ("sub", lambda a, b: a - b)):
        check(
            apply,
            f"{name}.sat.s32 %0, %1, %2;",
            np.int32,
            lambda a, b, f=function: min(max(f(a, b), -(2**31)), 2**31 - 1),
            a,
            b,
        )


def reverse(a, bits):
    return int(f"{a:0{bits}b}"[::-1], 2)


@pytest.mark.parametrize("bits", [32, 64])
def test_unary(apply, rng, bits):
    a, s = numbers(rng, f"u{bits}"), numbers(rng, f"s{bits}")
    check(apply, f"neg.s{bits} %0, %1;", s.dtype, lambda a: -a, s)
    check(apply, f"abs.s{bits} %0, %1;", s.dtype, abs, s)
    check(apply, f"not.b{bits} %0, %1;", a.dtype, lambda a: ~a, a)
    check(apply, f"popc.b{bits} %0, %1;", np.uint32, lambda a: a.bit_count(), a)
    check(apply, f"clz.b{bits} %0, %1;", np.uint32, lambda a: bits - a.bit_length(), a)
    check(apply, f"brev.b{bits} %0, %1;", a.dtype, lambda a: reverse(a, bits), a)
    check(apply, f"bfind.u{bits} %0, %1;", np.uint32, lambda a: a.bit_length() - 1, a)
    check(apply, f"bfind.s{bits} %0, %1;", np.uint32, lambda a: (a if a >= 0 else ~a).bit_length() - 1, s)


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_shifts(apply, rng, kind):
    a = numbers(rng, kind)
    bits = int(kind[1:])
    by = rng.integers(0, 2 * bits, len(a)).astype(np.uint32)
    by[:3] = 0, bits, 2**32 - 1
    check(apply, f"shl.b{bits} %0, %1, %2;", a.dtype, lambda a, n: a << min(n, bits), a, by)
    check(apply, f"shr.{kind} %0, %1, %2;", a.dtype, lambda a, n: a >> min(n, bits), a, by)


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_funnel_shifts(apply, rng, mode):
    a, b = numbers(rng, "u32"), numbers(rng, "u32")
    by = rng.integers(0, 80, len(a)).astype(np.uint32)

    def amount(n):
        return min(n, 32) if mode == "clamp" else n & 31

    check(
        apply,
        f"shf.l.{mode}.b32 %0, %1, %2, %3;",
        np.uint32,
        lambda a, b, n: ((b << 32 | a) << amount(n)) >> 32,
        a,
        b,
        by,
    )
    check(
        apply,
        f"shf.r.{mode}.b32 %0, %1, %2, %3;",
        np.uint32,
        lambda a, b, n: (b << 32 | a) >> amount(n),
        a,
        b,
        by,
    )


def field(a, start, length, bits, signed):
    """Bits [start, start + length) of a, as the PTX manual spells it out: bit by bit."""
    start, length = start & 255, length & 255
    bit = lambda i: a >> i & 1  # noqa: E731
    last = min(start + length - 1, bits - 1)
    sign = bit(last) if signed and length else 0
    result = 0
    for i in range(bits):
        result |= (bit(start + i) if i < length and start + i < bits else sign) << i
    return result


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_bit_fields(apply, rng, kind):
    a = numbers(rng, kind)
    bits, signed = int(kind[1:]), kind[0] == "s"
    start = rng.integers(0, bits + 6, len(a)).astype(np.uint32)
    length = rng.integers(0, bits + 6, len(a)).astype(np.uint32)
    check(
        apply,
        f"bfe.{kind} %0, %1, %2, %3;",
        a.dtype,
        lambda a, s, n: field(a, s, n, bits, signed),
        a,
        start,
        length,
    )
    b = numbers(rng, f"u{bits}")

    def insert(a, b, s, n):
        mask = ((1 << n) - 1) << s if s < bits else 0
        return (b & ~mask) | ((a << s) & mask)

    code = f"bfi.b{bits} %0, %1, %2, %3, %4;"
    check(apply, code, b.dtype, insert, numbers(rng, f"u{bits}"), b, start, length)


def permuted(a, b, selector):
    both = b << 32 | a
    result = 0
    for i in range(4):
        control = selector >> 4 * i & 15
        byte = both >> 8 * (control & 7) & 255
        result |= ((255 if byte >= 128 else 0) if control >= 8 else byte) << 8 * i
    return result


def test_permute(apply, rng):
    a, b, selector = (numbers(rng, "u32") for _ in range(3))
    check(apply, "prmt.b32 %0, %1, %2, %3;", np.uint32, permuted, a, b, selector)


@pytest.mark.parametrize("table", [0xE8, 0x96, 0x1B, 0x80, 0xFE])
def test_any_function_of_three_bits(apply, rng, table):
    a, b, c = (numbers(rng, "u32") for _ in range(3))

    def function(a, b, c):
        return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))

    check(apply, f"lop3.b32 %0, %1, %2, %3, {table};", np.uint32, function, a, b, c)


def test_dot_products(apply, rng):
    a, b, c = numbers(rng, "u32"), numbers(rng, "u32"), numbers(rng, "s32")

    def parts(x, bits, signed):
        return [
            wrap(x >> i & ((1 << bits) - 1), f"i{bits // 8}") if signed else x >> i & ((1 << bits) - 1)
            for i in range(0, 32, bits)
        ]

    def dp4a(a, b, c, kinds):
        return c + sum(x * y for x, y in zip(parts(a, 8, kinds[0] == "s"), parts(b, 8, kinds[1] == "s"), strict=True))

    for kinds in ("ss", "su", "us"):
        code = f"dp4a.{kinds[0]}32.{kinds[1]}32 %0, %1, %2, %3;"
        check(apply, code, np.int32, lambda a, b, c, k=kinds: dp4a(a, b, c, k), a, b, c)
    check(apply, "dp4a.u32.u32 %0, %1, %2, %3;", np.uint32, lambda a, b, c: dp4a(a, b, c, "uu"), a, b, c)
    check(
        apply,
        "dp2a.hi.s32.u32 %0, %1, %2, %3;",
        np.int32,
        lambda a, b, c: c + sum(x * y for x, y in zip(parts(a, 16, True), parts(b, 8, False)[2:], strict=True)),
        a,
        b,
        c,
    )


COMPARE = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_comparisons(apply, rng, kind):
    a, b = numbers(rng, kind), numbers(rng, kind)
    b[::3] = a[::3]
    for name, function in COMPARE.items():
        code = f"{{.reg .pred p; setp.{name}.{kind} p, %1, %2; selp.u32 %0, 1, 0, p;}}"
        check(apply, code, np.uint32, lambda a, b, f=function: int(f(a, b)), a, b)
    code = (
        f"{{.reg .pred p, q, r; setp.gt.{kind} r, %1, 7; setp.lt.and.{kind} p|q, %1, %2, r; "
        "selp.u32 %0, 1, 0, p; @q add.u32 %0, %0, 2;}"
    )
    check(apply, code, np.uint32, lambda a, b: int(a < b and a > 7) + 2 * int(not a < b and a > 7), a, b)
    code = f"{{.reg .pred p, q; setp.gt.{kind} q, %1, 7; setp.lt.xor.{kind} p, %1, %2, !q; selp.u32 %0, 1, 0, p;}}"
    check(apply, code, np.uint32, lambda a, b: int((a < b) ^ (not a > 7)), a, b)


def test_integer_conversions(apply, rng):
    for source in ("s16", "u16", "s32", "u32", "s64", "u64"):
        a = numbers(rng, source)
        for to in ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"):
            bits = int(to[1:])
            dtype = np.dtype(f"{'i' if to[0] == 's' else 'u'}{bits // 8}")
            limits = np.iinfo(dtype)
            wide = np.dtype(f"{dtype.kind}{max(16, bits) // 8}")
            check(apply, f"cvt.{to}.{source} %0, %1;", wide, lambda a, d=dtype: wrap(a, d), a)
            check(
                apply,
                f"cvt.sat.{to}.{source} %0, %1;",
                wide,
                lambda a, m=limits: min(max(a, int(m.min)), int(m.max)),
                a,
            )


def test_packing_with_saturation(apply, rng):
    a, b, c = numbers(rng, "s32"), numbers(rng, "s32"), numbers(rng, "u32")
    a[::2] //= 2**20

    def clamp(x):
        return min(max(x, -128), 127) & 255

    check(
        apply,
        "cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;",
        np.uint32,
        lambda a, b, c: c << 16 | clamp(a) << 8 | clamp(b),
        a,
        b,
        c,
    )


def test_packed_halves(apply, rng):
    a, b = numbers(rng, "u32"), numbers(rng, "u32")
    for name, function in (("min", min), ("max", max)):
        code = f"{name}.u16x2 %0, %1, %2;"
        want = [
            function(x & 0xFFFF, y & 0xFFFF) | function(x >> 16, y >> 16) << 16
            for x, y in zip(a.tolist(), b.tolist(), strict=True)
        ]
        np.testing.assert_array_equal(apply(code, np.uint32, a, b, arch="compute_90"), np.array(want, np.uint32))
