// Sixteen floats at a time, in the compiler's own vector type: one source for AVX-512, AVX2 and whatever else it targets.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace hybrid {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef double f64x16 __attribute__((vector_size(128)));

constexpr int WIDTH = 16;
#define INLINE inline __attribute__((always_inline))

struct bf16 {
    uint16_t bits;
};

INLINE f32x16 splat(float x) { return x - f32x16{}; }

INLINE float widen(float x) { return x; }
INLINE float widen(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE f32x16 load(const float* p) {
    f32x16 v;
    memcpy(&v, p, 64);
    return v;
}
INLINE f32x16 load(const bf16* p) {
    u16x16 half;
    memcpy(&half, p, 32);
    return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
}

// The first n values; the others are 0.
template <class T>
INLINE f32x16 load(const T* p, int64_t n) {
    if (n >= WIDTH) return load(p);
    T part[WIDTH] = {};
    memcpy(part, p, n * sizeof(T));
    return load(part);
}

// Round to nearest even, as torch does; a NaN stays one.
INLINE u16x16 to_bf16(f32x16 v) {
    u32x16 bits = (u32x16)v;
    u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    u32x16 nan = (u32x16)(v != v);
    return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0u), u16x16);
}
INLINE void store(float* p, f32x16 v) { memcpy(p, &v, 64); }
INLINE void store(bf16* p, f32x16 v) {
    u16x16 half = to_bf16(v);
    memcpy(p, &half, 32);
}
template <class T>
INLINE void store(T* p, f32x16 v, int64_t n) {
    if (n >= WIDTH) return store(p, v);
    T part[WIDTH];
    store(part, v);
    memcpy(p, part, n * sizeof(T));
}

// `v` as it would come back from memory of type T: the reference rounds after every operation.
template <class T>
INLINE f32x16 rounded(f32x16 v);
template <>
INLINE f32x16 rounded<float>(f32x16 v) { return v; }
template <>
INLINE f32x16 rounded<bf16>(f32x16 v) {
    u32x16 bits = (u32x16)v;
    f32x16 near = (f32x16)((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
    return v != v ? v : near;
}

INLINE f32x16 maximum(f32x16 a, f32x16 b) { return a > b ? a : b; }

// Lanes folded in halves: a fixed order, and vector instructions
INLINE f32x16 lanes_from(f32x16 v, int step) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return __builtin_shuffle(v, (lane + step) & 15);
}
INLINE float sum(f32x16 v) {
    v += lanes_from(v, 8);
    v += lanes_from(v, 4);
    v += lanes_from(v, 2);
    v += lanes_from(v, 1);
    return v[0];
}
INLINE float maximum(f32x16 v) {
    v = maximum(v, lanes_from(v, 8));
    v = maximum(v, lanes_from(v, 4));
    v = maximum(v, lanes_from(v, 2));
    v = maximum(v, lanes_from(v, 1));
    return v[0];
}

// Lane i of the result is the sum over the lanes of rows[i].
INLINE f32x16 sum_rows(f32x16* rows) {
    const i32x16 low[4] = {{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30},
                           {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
                           {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27},
                           {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}};
    int count = WIDTH;
    for (int level = 0, step = 1; level < 4; level++, step *= 2, count /= 2)
        for (int i = 0; i < count / 2; i++)
            rows[i] = __builtin_shuffle(rows[2 * i], rows[2 * i + 1], low[level]) +
                      __builtin_shuffle(rows[2 * i], rows[2 * i + 1], low[level] + step);
    return rows[0];
}

// e^x with a relative error of 2e-7; 0 for -inf, inf for inf, NaN for NaN. Values below 1.2e-38 are 0.
INLINE f32x16 exp(f32x16 x) {
#if defined(__AVX512F__)
    __m512 v = _mm512_max_ps(_mm512_set1_ps(-87.3f), _mm512_min_ps(_mm512_set1_ps(104.0f), (__m512)x));  // the second if NaN
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(v, _mm512_set1_ps(1.44269504088896341f)), 0x08);
    f32x16 r = (f32x16)v - (f32x16)n * 0.693145751953125f - (f32x16)n * 1.42860682030941723212e-6f;
#else
    f32x16 v = x < -87.3f ? splat(-87.3f) : x;
    v = v > 88.7f ? splat(88.7f) : v;
    f32x16 n = v * 1.44269504088896341f + 12582912.0f;  // the sum's low bits hold round(v / ln 2)
    i32x16 power = (i32x16)n << 23;
    n -= 12582912.0f;
    f32x16 r = v - n * 0.693145751953125f - n * 1.42860682030941723212e-6f;
#endif
    f32x16 y = splat(1.9875691500e-4f);  // Cephes, expf
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
#if defined(__AVX512F__)
    // Lanes below the range are masked: a denormal result would cost hundreds of cycles
    return (f32x16)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ), (__m512)y, n);
#else
    y = (f32x16)((i32x16)y + power);
    y = x < -87.3f ? splat(0.0f) : y;
    y = x > 88.7f ? splat(std::numeric_limits<float>::infinity()) : y;
    return x != x ? x : y;
#endif
}

}  // namespace hybrid
