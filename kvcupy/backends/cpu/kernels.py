"""The loops of the `cpu` device, compiled by Numba.

Threads: decode is cut into units (query token, kv head, SPLIT tokens); each thread takes a contiguous share
of them with an equal number of tokens. A unit leaves a partial softmax state, and the states of a query token
are merged in order, so that the result does not depend on the number of threads.

Memory: a unit first lists the addresses of its valid K rows. Pages, layouts, strides and skipped pages end
there: what follows streams rows from a list, and prefetches the rows that stand PREFETCH_ROWS further on.

Bound by memory bandwidth if the arithmetic is cheap enough: rows are widened to float32 in registers, where
they meet up to 4 q heads at once, and sums over lanes are taken for a whole vector of scores together. Numba
has no vector types, so the tiles are LLVM IR with explicit vectors, which LLVM fits to the machine it finds.

All in one file: Numba renews a cached kernel when its own file changes, but not when an imported one does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

SPLIT = 512  # tokens of a unit
BLOCK = 64  # tokens whose weights are held at once; sums are rescaled at most once a block
PREFETCH_ROWS = 32
MAX_LANES = 16  # scores and sums are padded to a multiple of this many floats
LIST_TAIL = PREFETCH_ROWS + MAX_LANES  # addresses that may be read past the end of a list of rows
STRIP = 4  # vectors of a sum held in registers at once
NEG_INF = np.float32(-np.inf)
LN2 = np.float32(np.log(2))

# How read_bandwidth reads: a single stream without prefetch waits for memory most of the time.
SUM_STREAMS = 4
SUM_WORDS = 64
SUM_AHEAD_BYTES = 4096

# Numba knows neither 16-bit float: a value of one of these types tells a kernel what is stored.
ELEMENTS = {"float32": np.float32(0), "float16": np.int16(0), "bfloat16": np.uint16(0)}

# --- Tiles in LLVM IR ---

BYTE, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()
STORED = {types.float32: FLOAT, types.int16: ir.HalfType(), types.uint16: I16}

Array = Any
Values = list[Any]
"""LLVM values."""

_intrinsic = cast(Callable[[Callable[..., Any]], Any], intrinsic)


def _jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile at the first call, keep the result on disk, and let other Python threads run meanwhile."""
    options |= {"nogil": True, "error_model": "numpy"}

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # no folder where Numba could keep it
            return njit(**options)(function)

    return decorate


# 2**x on [-0.5, 0.5], highest power first, within 3e-9: least squares at Chebyshev points.
EXP2_COEFFICIENTS = (
    0.0001537070482,
    0.001339984829,
    0.009618373251,
    0.05550329035,
    0.2402264846,
    0.6931472056,
    1.0,
)


def _call_llvm(builder: Any, name: str, result: ir.Type, values: Values, **flags: Any) -> Any:
    """Call the intrinsic llvm.<name>."""
    function = builder.module.globals.get(f"llvm.{name}")
    if function is None:
        signature = ir.FunctionType(result, [value.type for value in values])
        function = ir.Function(builder.module, signature, f"llvm.{name}")
    return builder.call(function, values, **flags)


class _Emitter:
    """Writes one internal LLVM function on float32 vectors as wide as the target's registers."""

    def __init__(self, context: Any, module: ir.Module, name: str, arguments: list[ir.Type], result: ir.Type) -> None:
        features = context.codegen().magic_tuple()[2]
        self.lanes = 16 if "+avx512bw" in features else 8
        self.has_half = "+f16c" in features or module.triple.startswith(("aarch64", "arm64"))
        self.vector = ir.VectorType(FLOAT, self.lanes)
        self.function = ir.Function(module, ir.FunctionType(result, arguments), name)
        self.function.linkage = "internal"
        self.builder = ir.IRBuilder(self.function.append_basic_block())

    def loop(
        self, start: Any, stop: Any, step: int, carried: Values, body: Callable[[Any, Values], Values]
    ) -> Values:
        """for i in range(start, stop, step): carried = body(i, carried)"""
        b = self.builder
        before = b.block
        head, inside, after = (self.function.append_basic_block() for _ in range(3))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(I64)
        state = [b.phi(value.type) for value in carried]
        b.cbranch(b.icmp_signed("<", index, stop), inside, after)
        b.position_at_end(inside)
        following = body(index, list(state))
        index.add_incoming(start, before)
        index.add_incoming(b.add(index, I64(step)), b.block)
        for phi, first, later in zip(state, carried, following, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, b.block)
        b.branch(head)
        b.position_at_end(after)
        return state

    def call(self, name: str, result: ir.Type, values: Values, **flags: Any) -> Any:
        return _call_llvm(self.builder, name, result, values, **flags)

    def pointer(self, address: Any, element: ir.Type) -> Any:
        return self.builder.inttoptr(address, element.as_pointer())

    def load(self, address: Any, element: ir.Type, align: int = 4) -> Any:
        return self.builder.load(self.pointer(address, element), align=align)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.pointer(address, value.type), align=4)

    def step(self, address: Any, count: Any, nbytes: int) -> Any:
        """address + count * nbytes"""
        return self.builder.add(address, self.builder.mul(count, I64(nbytes)))

    def splat(self, scalar: Any) -> Any:
        vector = ir.VectorType(scalar.type, self.lanes)
        one = self.builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
        return self.shuffle(one, one, [0] * self.lanes)

    def shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
        return self.builder.shuffle_vector(a, b, mask)

    def constant(self, value: float | int, scalar: ir.Type = FLOAT) -> ir.Constant:
        return ir.Constant(ir.VectorType(scalar, self.lanes), [value] * self.lanes)

    def first_lanes(self, count: Any) -> Any:
        """A mask of the lanes below `count`."""
        lanes = ir.Constant(ir.VectorType(I64, self.lanes), list(range(self.lanes)))
        return self.builder.icmp_signed("<", lanes, self.splat(count))

    def elements(self, address: Any, stored: ir.Type, mask: Any = None) -> Any:
        """A vector of stored elements as float32; lanes outside the mask are 0 and touch no memory."""
        b = self.builder
        element = I16 if stored == ir.HalfType() and not self.has_half else stored
        align = 4 if stored == FLOAT else 2
        vector = ir.VectorType(element, self.lanes)
        if mask is None:
            loaded = self.load(address, vector, align)
        else:
            pointer = self.pointer(address, vector)
            zero = ir.Constant(vector, [0] * self.lanes)
            suffix = f"v{self.lanes}{element.intrinsic_name}.p0"
            loaded = self.call(f"masked.load.{suffix}", vector, [pointer, I32(align), mask, zero])
        if stored == FLOAT:
            return loaded
        if element == ir.HalfType():
            return b.fpext(loaded, self.vector)
        bits = b.zext(loaded, ir.VectorType(I32, self.lanes))
        if stored == ir.HalfType():
            return self.widened_half(bits)
        return b.bitcast(b.shl(bits, self.constant(16, I32)), self.vector)

    def widened_half(self, bits: Any) -> Any:
        """float16 bits as float32, by integer arithmetic, for targets without the instruction."""
        b = self.builder
        magnitude = b.and_(bits, self.constant(0x7FFF, I32))
        shifted = b.shl(magnitude, self.constant(13, I32))
        finite = b.bitcast(b.fmul(b.bitcast(shifted, self.vector), self.constant(2.0**112)), bits.type)
        special = b.or_(shifted, self.constant(0x7F800000, I32))
        is_finite = b.icmp_signed("<", magnitude, self.constant(0x7C00, I32))
        sign = b.shl(b.and_(bits, self.constant(0x8000, I32)), self.constant(16, I32))
        return b.bitcast(b.or_(b.select(is_finite, finite, special), sign), self.vector)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        # fmuladd, not fma: a target without the instruction would call a library for every lane.
        return self.call(f"fmuladd.v{self.lanes}f32", self.vector, [a, b, c])

    def prefetch(self, address: Any) -> None:
        # Into the L2 cache: more lines may be on their way there than to the L1.
        pointer = self.pointer(address, BYTE)
        self.call("prefetch.p0", ir.VoidType(), [pointer, I32(0), I32(2), I32(1)])

    def lane_sums(self, vectors: Values) -> Any:
        """The sum over the lanes of each of `lanes` vectors, as one vector in the same order."""
        width = self.lanes  # lanes of a block, which holds partial sums of one vector
        while len(vectors) > 1:
            half = len(vectors) // 2
            # Fold each block of x and of y in two, and lay y's beside x's.
            low = [
                start + lane
                for block in range(0, self.lanes, width)
                for start in (block, self.lanes + block)
                for lane in range(width // 2)
            ]
            high = [lane + width // 2 for lane in low]
            vectors = [
                self.builder.fadd(self.shuffle(x, y, low), self.shuffle(x, y, high))
                for x, y in zip(vectors[:half], vectors[half:], strict=True)
            ]
            width //= 2
        return vectors[0]

    def exp2(self, x: Any) -> Any:
        """2**x for x <= 0, within 1e-7 relative; below 2**-126 it is 0, and NaN stays NaN."""
        b = self.builder
        x = b.select(b.fcmp_ordered("<", x, self.constant(-127.0)), self.constant(-127.0), x)
        magic = self.constant(1.5 * 2.0**23)  # its last bit is worth 1: adding it rounds to a whole number
        shifted = b.fadd(x, magic)
        fraction = b.fsub(x, b.fsub(shifted, magic))
        result = self.constant(EXP2_COEFFICIENTS[0])
        for coefficient in EXP2_COEFFICIENTS[1:]:
            result = self.fma(result, fraction, self.constant(coefficient))
        bits = ir.VectorType(I32, self.lanes)
        exponent = b.shl(b.bitcast(shifted, bits), self.constant(23, I32))
        power = b.bitcast(b.add(exponent, self.constant(0x3F800000, I32)), self.vector)
        return b.fmul(result, power)


def _emit_dot(context: Any, module: ir.Module, stored: ir.Type, heads: int) -> ir.Function:
    """scores[h][t] = q[h] . row[t] for some heads at once, in tiles of as many sums as a vector has lanes."""
    e = _Emitter(context, module, f"dot_{heads}", [I64] * 7, ir.VoidType())
    q, q_stride, rows, tokens, head_dim, scores, scores_stride = e.function.args
    b = e.builder
    itemsize = 4 if stored == FLOAT else 2
    tile = e.lanes // heads
    full = b.and_(head_dim, I64(-e.lanes))
    mask = e.first_lanes(b.sub(head_dim, full))

    def one_tile(first: Any, _: Values) -> Values:
        addresses = [e.load(e.step(rows, b.add(first, I64(i)), 8), I64, 8) for i in range(tile)]
        later = [e.load(e.step(rows, b.add(first, I64(i + PREFETCH_ROWS)), 8), I64, 8) for i in range(tile)]

        def chunk(dim: Any, sums: Values, mask: Any = None) -> Values:
            offset = b.mul(dim, I64(itemsize))
            keys = [e.elements(b.add(address, offset), stored, mask) for address in addresses]
            result = []
            for h in range(heads):
                head = e.step(b.add(q, b.mul(q_stride, I64(h))), dim, 4)
                query = e.elements(head, FLOAT, mask)
                result += [e.fma(query, key, sums[h * tile + i]) for i, key in enumerate(keys)]
            for address in later:
                e.prefetch(b.add(address, offset))
            return result

        sums = e.loop(I64(0), full, e.lanes, [e.constant(0.0)] * e.lanes, chunk)
        # The incomplete last vector, if there is one: a loop of at most one pass.
        sums = e.loop(full, head_dim, e.lanes, sums, lambda dim, sums: chunk(dim, sums, mask))
        result = e.lane_sums(sums)
        for h in range(heads):
            part = e.shuffle(result, result, list(range(h * tile, (h + 1) * tile)))
            e.store(part, e.step(b.add(scores, b.mul(scores_stride, I64(h))), first, 4))
        return []

    e.loop(I64(0), tokens, tile, [], one_tile)
    b.ret_void()
    return e.function


def _emit_accumulate(context: Any, module: ir.Module, stored: ir.Type, heads: int) -> ir.Function:
    """sums[h] += weights[h][t] * row[t] over all tokens; a strip of sums stays in registers meanwhile."""
    e = _Emitter(context, module, f"accumulate_{heads}", [I64] * 8, ir.VoidType())
    weights, weights_stride, rows, kv_stride, tokens, head_dim, sums, sums_stride = e.function.args
    b = e.builder
    itemsize = 4 if stored == FLOAT else 2
    full = b.and_(head_dim, I64(-e.lanes))
    strips = b.and_(head_dim, I64(-e.lanes * STRIP))
    mask = e.first_lanes(b.sub(head_dim, full))

    def strip(dim: Any, vectors: int, mask: Any = None) -> Values:
        offset = b.add(kv_stride, b.mul(dim, I64(itemsize)))
        places = [
            e.step(b.add(sums, b.mul(sums_stride, I64(h))), b.add(dim, I64(i * e.lanes)), 4)
            for h in range(heads)
            for i in range(vectors)
        ]

        def one_token(token: Any, state: Values) -> Values:
            row = b.add(e.load(e.step(rows, token, 8), I64, 8), offset)
            later = b.add(e.load(e.step(rows, b.add(token, I64(PREFETCH_ROWS)), 8), I64, 8), offset)
            nbytes = e.lanes * itemsize
            values = [e.elements(b.add(row, I64(i * nbytes)), stored, mask) for i in range(vectors)]
            result = []
            for h in range(heads):
                weight = e.load(e.step(b.add(weights, b.mul(weights_stride, I64(h))), token, 4), FLOAT)
                weight = e.splat(weight)
                result += [e.fma(weight, value, state[h * vectors + i]) for i, value in enumerate(values)]
            for i in range(0, vectors * nbytes, 64):
                e.prefetch(b.add(later, I64(i)))
            return result

        final = e.loop(I64(0), tokens, 1, [e.load(place, e.vector) for place in places], one_token)
        for value, place in zip(final, places, strict=True):
            e.store(value, place)
        return []

    e.loop(I64(0), strips, e.lanes * STRIP, [], lambda dim, _: strip(dim, STRIP))
    e.loop(strips, full, e.lanes, [], lambda dim, _: strip(dim, 1))
    e.loop(full, head_dim, e.lanes, [], lambda dim, _: strip(dim, 1, mask))
    b.ret_void()
    return e.function


def _call_variant(context: Any, builder: Any, emit: Callable[..., ir.Function], stored: ir.Type, args: Values) -> Any:
    """Call the variant for args[0] = 1, 2 or 4 heads with the other arguments."""
    after = builder.append_basic_block()
    variants = builder.switch(args[0], after)
    for heads in (1, 2, 4):
        block = builder.append_basic_block()
        variants.add_case(I64(heads), block)
        builder.position_at_end(block)
        builder.call(emit(context, builder.module, stored, heads), args[1:])
        builder.branch(after)
    builder.position_at_end(after)
    return context.get_dummy_value()


@_intrinsic
def dot(
    typingctx: Any,
    element: Any,
    heads: Any,
    q: Any,
    q_stride: Any,
    rows: Any,
    tokens: Any,
    head_dim: Any,
    scores: Any,
    scores_stride: Any,
) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Values) -> Any:
        return _call_variant(context, builder, _emit_dot, STORED[element], args[1:])

    return types.void(element, *[types.int64] * 8), codegen


@_intrinsic
def accumulate(
    typingctx: Any,
    element: Any,
    heads: Any,
    weights: Any,
    weights_stride: Any,
    rows: Any,
    kv_stride: Any,
    tokens: Any,
    head_dim: Any,
    sums: Any,
    sums_stride: Any,
) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Values) -> Any:
        return _call_variant(context, builder, _emit_accumulate, STORED[element], args[1:])

    return types.void(element, *[types.int64] * 9), codegen


def _emit_maximum(context: Any, module: ir.Module) -> ir.Function:
    """The largest of a first value and `count` floats, a multiple of MAX_LANES; NaN is passed over."""
    e = _Emitter(context, module, "maximum", [I64, I64, FLOAT], FLOAT)
    address, count, first = e.function.args

    def larger(index: Any, state: Values) -> Values:
        x = e.load(e.step(address, index, 4), e.vector)
        return [e.builder.select(e.builder.fcmp_ordered(">", x, state[0]), x, state[0])]

    final = e.loop(I64(0), count, e.lanes, [e.splat(first)], larger)
    e.builder.ret(e.call(f"vector.reduce.fmax.v{e.lanes}f32", FLOAT, final))
    return e.function


def _emit_exp2_sum(context: Any, module: ir.Module) -> ir.Function:
    """x = 2**(x - shift) for `count` floats, a multiple of MAX_LANES, in place; returns their sum."""
    e = _Emitter(context, module, "exp2_sum", [I64, I64, FLOAT], FLOAT)
    address, count, shift = e.function.args
    shifts = e.splat(shift)

    def one_vector(index: Any, state: Values) -> Values:
        place = e.step(address, index, 4)
        power = e.exp2(e.builder.fsub(e.load(place, e.vector), shifts))
        e.store(power, place)
        return [e.builder.fadd(state[0], power)]

    final = e.loop(I64(0), count, e.lanes, [e.constant(0.0)], one_vector)
    name = f"vector.reduce.fadd.v{e.lanes}f32"
    e.builder.ret(e.call(name, FLOAT, [FLOAT(0.0), *final], fastmath=("reassoc",)))
    return e.function


@_intrinsic
def maximum(typingctx: Any, address: Any, count: Any, first: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Values) -> Any:
        return builder.call(_emit_maximum(context, builder.module), args)

    return types.float32(types.int64, types.int64, types.float32), codegen


@_intrinsic
def exp2_sum(typingctx: Any, address: Any, count: Any, shift: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Values) -> Any:
        return builder.call(_emit_exp2_sum(context, builder.module), args)

    return types.float32(types.int64, types.int64, types.float32), codegen


def _emit_sum(context: Any, module: ir.Module) -> ir.Function:
    """The sum of SUM_STREAMS streams of `count` int64, side by side in memory and read together.

    One plain stream waits for memory: prefetch and several streams read this much faster.
    """
    e = _Emitter(context, module, "sum", [I64, I64], I64)
    address, count = e.function.args
    b = e.builder
    lanes = e.lanes // 2
    vector = ir.VectorType(I64, lanes)

    def one_block(index: Any, sums: Values) -> Values:
        for stream in range(SUM_STREAMS):
            place = e.step(address, b.add(index, b.mul(count, I64(stream))), 8)
            for line in range(0, SUM_WORDS * 8, 64):
                e.prefetch(b.add(place, I64(SUM_AHEAD_BYTES + line)))
            for i in range(SUM_WORDS // lanes):
                value = e.load(b.add(place, I64(i * lanes * 8)), vector, 8)
                sums[i % len(sums)] = b.add(sums[i % len(sums)], value)
        return sums

    final = e.loop(I64(0), count, SUM_WORDS, [ir.Constant(vector, [0] * lanes)] * 4, one_block)
    total = b.add(b.add(final[0], final[1]), b.add(final[2], final[3]))
    b.ret(e.call(f"vector.reduce.add.v{lanes}i64", I64, [total]))
    return e.function


@_intrinsic
def sum_streams(typingctx: Any, address: Any, count: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Values) -> Any:
        return builder.call(_emit_sum(context, builder.module), args)

    return types.int64(types.int64, types.int64), codegen


@_intrinsic
def copy_bytes(typingctx: Any, destination: Any, source: Any, nbytes: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Values) -> Any:
        pointers = [builder.inttoptr(address, BYTE.as_pointer()) for address in args[:2]]
        _call_llvm(builder, "memcpy.p0.p0.i64", ir.VoidType(), [*pointers, args[2], ir.IntType(1)(0)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@_intrinsic
def zero_bytes(typingctx: Any, destination: Any, nbytes: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Values) -> Any:
        pointer = builder.inttoptr(args[0], BYTE.as_pointer())
        _call_llvm(builder, "memset.p0.i64", ir.VoidType(), [pointer, BYTE(0), args[1], ir.IntType(1)(0)])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 2), codegen


# --- Decode attention ---


class Rows(NamedTuple):
    """Where the rows of a layer lie: its addresses and strides in bytes, and its sizes."""

    data: int
    page_stride: int
    head_stride: int
    token_stride: int
    kv_stride: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int


class Work(NamedTuple):
    """The rows of a decode: query tokens, each with the sequence and the number of tokens that it reads."""

    sequences: Any  # int64 [rows]
    tokens: Any  # int64 [rows]
    units: Any  # int64 [rows + 1]: each row's first unit
    positions: Any  # int64 [rows + 1]: tokens of all units before the row


@_jit()
def _address(array: Array) -> Any:
    return np.int64(array.ctypes.data)  # unsigned as it comes, and unsigned + signed would be a float


@_jit()
def _unit_at(position: int, units: Array, positions: Array, tokens: Array) -> Any:
    """The first unit that begins at or after a position on the line of all units' tokens."""
    row = np.searchsorted(positions, position, side="right") - 1
    if row >= len(tokens):
        return units[-1]
    head, token = divmod(position - positions[row], tokens[row])
    splits = (tokens[row] + SPLIT - 1) // SPLIT
    return units[row] + head * splits + (token + SPLIT - 1) // SPLIT


@_jit()
def _list_rows(layer: Rows, pages: Array, head: int, first: int, last: int, addresses: Array, start: int) -> Any:
    """Write the addresses of the K rows of tokens first..last-1 to addresses[start:]; return their end."""
    end = start
    token = first
    while token < last:
        page = np.int64(pages[token // layer.page_size])
        offset = token % layer.page_size
        run = min(layer.page_size - offset, last - token)
        if 0 <= page < layer.num_pages:
            address = layer.data + page * layer.page_stride + head * layer.head_stride + offset * layer.token_stride
            for _ in range(run):
                addresses[end] = address
                address += layer.token_stride
                end += 1
        token += run
    return end


@_jit()
def _attend(
    element: Any,
    layer: Rows,
    q: Array,
    addresses: Array,
    count: int,
    scores: Array,
    sums: Array,
    state: Array,
) -> None:
    """Attention of one kv head's q heads over `count` rows.

    sums: sum of 2**(score - peak) * V. state: the peak, and the sum of 2**(score - peak).
    """
    group = len(q)
    q_stride = layer.head_dim * 4
    sums[:] = 0
    state[:, 0] = NEG_INF
    state[:, 1] = 0
    for first in range(0, count, BLOCK):
        tokens = min(BLOCK, count - first)
        padded = (tokens + MAX_LANES - 1) // MAX_LANES * MAX_LANES
        rows = _address(addresses) + first * 8
        h = 0
        while h < group:
            heads = 4 if group - h >= 4 else 2 if group - h >= 2 else 1
            weights = _address(scores) + h * BLOCK * 4
            dot(
                element,
                heads,
                _address(q) + h * q_stride,
                q_stride,
                rows,
                tokens,
                layer.head_dim,
                weights,
                BLOCK * 4,
            )
            for i in range(h, h + heads):
                scores[i, tokens:padded] = NEG_INF
                row = _address(scores) + i * BLOCK * 4
                before = state[i, 0]
                peak = maximum(row, padded, before)
                shift = peak if peak > NEG_INF else np.float32(0)
                if peak > before:
                    factor = np.exp2(before - shift)
                    state[i, 0] = peak
                    state[i, 1] *= factor
                    for d in range(sums.shape[1]):
                        sums[i, d] *= factor
                state[i, 1] += exp2_sum(row, padded, shift)
            sums_stride = sums.shape[1] * 4
            accumulate(
                element,
                heads,
                weights,
                BLOCK * 4,
                rows,
                layer.kv_stride,
                tokens,
                layer.head_dim,
                _address(sums) + h * sums_stride,
                sums_stride,
            )
            h += heads


@_jit()
def decode_share(
    thread: int,
    threads: int,
    element: Any,
    layer: Rows,
    work: Work,
    q: Array,
    page_table: Array,
    addresses: Array,
    scores: Array,
    sums: Array,
    state: Array,
) -> None:
    """One thread's share of the units; unit u fills sums[u] and state[u]."""
    group = scores.shape[1]
    line = work.positions[-1]
    start = _unit_at(line * thread // threads, work.units, work.positions, work.tokens)
    stop = _unit_at(line * (thread + 1) // threads, work.units, work.positions, work.tokens)
    listed = addresses[thread]
    row = np.searchsorted(work.units, start, side="right") - 1
    this_row = this_head = head = count = np.int64(0)
    # A unit's rows are listed one unit ahead, behind those of the unit at work: prefetch runs on into them.
    for unit in range(start - 1, stop):
        end = count
        if unit + 1 < stop:
            while work.units[row + 1] <= unit + 1:
                row += 1
            tokens = work.tokens[row]
            head, split = divmod(unit + 1 - work.units[row], (tokens + SPLIT - 1) // SPLIT)
            first = split * SPLIT
            last = min(first + SPLIT, tokens)
            end = _list_rows(layer, page_table[work.sequences[row]], head, first, last, listed, count)
        if end > 0:
            listed[end : end + LIST_TAIL] = listed[end - 1]
        if unit >= start:
            heads = q[this_row, this_head * group : (this_head + 1) * group]
            _attend(element, layer, heads, listed, count, scores[thread], sums[unit], state[unit])
        for i in range(count, end):
            listed[i - count] = listed[i]
        count = end - count
        this_row, this_head = row, head


@_jit()
def merge_share(
    thread: int, threads: int, layer: Rows, work: Work, sums: Array, state: Array, out: Array, lse: Array
) -> None:
    """One thread's share of the q heads: the states of a row's units, merged in order."""
    rows, q_heads, head_dim = out.shape
    group = q_heads // layer.num_kv_heads
    for index in range(rows * q_heads * thread // threads, rows * q_heads * (thread + 1) // threads):
        row, q_head = divmod(index, q_heads)
        head, h = divmod(q_head, group)
        splits = (work.units[row + 1] - work.units[row]) // layer.num_kv_heads
        first = work.units[row] + head * splits
        peak = NEG_INF
        for unit in range(first, first + splits):
            peak = max(peak, state[unit, h, 0])
        shift = peak if peak > NEG_INF else np.float32(0)
        result = out[row, q_head]
        result[:] = 0
        total = np.float32(0)
        for unit in range(first, first + splits):
            weight = np.exp2(state[unit, h, 0] - shift)
            total += weight * state[unit, h, 1]
            for d in range(head_dim):
                result[d] += weight * sums[unit, h, d]
        if total == 0:  # no token, or none with a score above -inf
            result[:] = 0
            lse[row, q_head] = NEG_INF
        else:
            for d in range(head_dim):
                result[d] /= total
            lse[row, q_head] = (peak + np.log2(total)) * LN2


@_jit(parallel=True)
def decode(
    threads: int,
    element: Any,
    layer: Rows,
    work: Work,
    q: Array,
    page_table: Array,
    addresses: Array,
    scores: Array,
    sums: Array,
    state: Array,
    out: Array,
    lse: Array,
) -> None:
    for thread in prange(threads):
        decode_share(np.int64(thread), threads, element, layer, work, q, page_table, addresses, scores, sums, state)
    for thread in prange(threads):
        merge_share(np.int64(thread), threads, layer, work, sums, state, out, lse)


# --- Moving rows ---


@_jit()
def append_share(
    thread: int, threads: int, layer: Rows, inputs: Array, slots: Array, row_bytes: int, padding: int
) -> None:
    """Store one share of each token's rows, token after token: of two with the same slot the later stays.

    inputs: for K and for V the address and the byte strides of token and head.
    """
    rows = 2 * layer.num_kv_heads
    for token in range(len(slots)):
        page, offset = divmod(slots[token], layer.page_size)
        if 0 <= page < layer.num_pages:
            base = layer.data + page * layer.page_stride + offset * layer.token_stride
            for row in range(rows * thread // threads, rows * (thread + 1) // threads):
                head, kv = row >> 1, row & 1
                source = inputs[kv, 0] + token * inputs[kv, 1] + head * inputs[kv, 2]
                destination = base + head * layer.head_stride + kv * layer.kv_stride
                copy_bytes(destination, source, row_bytes)
                if padding > 0:
                    zero_bytes(destination + row_bytes, padding)


@_jit()
def gather_share(thread: int, threads: int, layer: Rows, outputs: Array, slots: Array, row_bytes: int) -> None:
    """Read stored rows back; `outputs` as `inputs` in append_share."""
    tokens = len(slots)
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        page, offset = divmod(slots[token], layer.page_size)
        for head in range(layer.num_kv_heads):
            for kv in range(2):
                row = outputs[kv, 0] + token * outputs[kv, 1] + head * outputs[kv, 2]
                if 0 <= page < layer.num_pages:
                    page_base = layer.data + page * layer.page_stride + offset * layer.token_stride
                    copy_bytes(row, page_base + head * layer.head_stride + kv * layer.kv_stride, row_bytes)
                else:
                    zero_bytes(row, row_bytes)


@_jit(parallel=True)
def append(threads: int, layer: Rows, inputs: Array, slots: Array, row_bytes: int, padding: int) -> None:
    for thread in prange(threads):
        append_share(np.int64(thread), threads, layer, inputs, slots, row_bytes, padding)


@_jit(parallel=True)
def gather(threads: int, layer: Rows, outputs: Array, slots: Array, row_bytes: int) -> None:
    for thread in prange(threads):
        gather_share(np.int64(thread), threads, layer, outputs, slots, row_bytes)


# --- Reading memory ---


@_jit()
def sum_share(thread: int, threads: int, words: Array) -> Any:
    """The sum of one thread's share; a share is cut to whole blocks of SUM_STREAMS streams."""
    block = SUM_STREAMS * SUM_WORDS
    blocks = len(words) // block
    first = blocks * thread // threads
    count = blocks * (thread + 1) // threads - first
    return sum_streams(_address(words) + first * block * 8, count * SUM_WORDS)


@_jit()
def fill_share(thread: int, threads: int, words: Array) -> None:
    words[len(words) * thread // threads : len(words) * (thread + 1) // threads] = 1


@_jit(parallel=True)
def fill(threads: int, words: Array) -> None:
    for thread in prange(threads):
        fill_share(np.int64(thread), threads, words)


@_jit(parallel=True)
def sum_words(threads: int, words: Array) -> Any:
    total = 0
    for thread in prange(threads):
        total += sum_share(np.int64(thread), threads, words)
    return total
