// What all kernels share: element types, conversions, wide loads, warp arithmetic.
//
// No CUDA header is needed: half types are 16 bits in a struct, and conversions are bit operations or PTX. This is the
// only file with inline PTX.

typedef unsigned char Byte;
typedef long long Offset;  // bytes or slots of a pool: never fewer than 64 bits

struct float16 {
    unsigned short bits;
};
struct bfloat16 {
    unsigned short bits;
};

#define INLINE __device__ __forceinline__

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float LOWEST = -3.402823466e38f;  // a maximum before anything was seen; finite, since -inf - -inf is NaN
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

template <typename T>
INLINE constexpr T smaller(T a, T b) {
    return a < b ? a : b;
}

template <typename T>
INLINE constexpr T larger(T a, T b) {
    return a > b ? a : b;
}

template <typename T>
INLINE constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

// Conversions

INLINE float infinity() { return __uint_as_float(0x7f800000u); }

INLINE float to_float(float x) { return x; }

INLINE float to_float(float16 x) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
    return result;
}

INLINE float to_float(bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

INLINE void from_float(float x, float& result) { result = x; }

INLINE void from_float(float x, float16& result) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x)); }

// Round to nearest, ties to even; a NaN keeps its sign and stays one.
INLINE void from_float(float x, bfloat16& result) {
    const unsigned bits = __float_as_uint(x);
    const unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    result.bits = static_cast<unsigned short>(x == x ? rounded : (bits >> 16) | 0x40u);
}

// Approximate to two units in the last place, without the slow paths of the exact ones.

INLINE float fast_exp2(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

INLINE float fast_log2(float x) {
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

INLINE float fast_reciprocal(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Wide loads: Words<16>::type is what one 16-byte load fills.

template <int BYTES>
struct Words;
template <>
struct Words<1> {
    typedef unsigned char type;
};
template <>
struct Words<2> {
    typedef unsigned short type;
};
template <>
struct Words<4> {
    typedef unsigned type;
};
template <>
struct Words<8> {
    typedef uint2 type;
};
template <>
struct Words<16> {
    typedef uint4 type;
};

// The elements of type T in one load, as floats.
template <typename T, typename Load, int N>
INLINE void unpack(const Load& load, float (&x)[N], int first) {
    const T* elements = reinterpret_cast<const T*>(&load);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Load) / sizeof(T)); i++) x[first + i] = to_float(elements[i]);
}

// Warp arithmetic. LANES is a power of two: neighbouring lanes that work together.

// Each value summed over LANES neighbouring lanes; all of them get the sums.
template <int LANES, int N>
INLINE void sum_over_lanes(float (&x)[N]) {
#pragma unroll
    for (int step = LANES / 2; step; step /= 2)
#pragma unroll
        for (int i = 0; i < N; i++) x[i] += __shfl_xor_sync(ALL_LANES, x[i], step);
}
