// Sixteen floats at a time, in the compiler's own vector type: one source for AVX-512, AVX2 and whatever else it targets.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace hybrid {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

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
INLINE f32x16 rounded<bf16>(f32x16 v) { return (f32x16)(__builtin_convertvector(to_bf16(v), u32x16) << 16); }

INLINE f32x16 maximum(f32x16 a, f32x16 b) { return a > b ? a : b; }

// Sums in a fixed order: halves, quarters, eighths, pairs.
INLINE float sum(f32x16 v) {
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) v[i] += v[i + step];
    return v[0];
}
INLINE float maximum(f32x16 v) {
    float m = v[0];
    for (int i = 1; i < WIDTH; i++) m = v[i] > m ? v[i] : m;
    return m;
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

// e^x with a relative error of 2e-7; 0 below -87.3 (so for -inf), NaN for NaN, inf above 88.7.
INLINE f32x16 exp(f32x16 x) {
    f32x16 n = x * 1.44269504088896341f + 12582912.0f;  // the sum's low bits hold round(x / ln 2)
    i32x16 power = (i32x16)n << 23;
    n -= 12582912.0f;
    f32x16 r = x - n * 0.693145751953125f - n * 1.42860682030941723212e-6f;
    f32x16 y = splat(1.9875691500e-4f);  // Cephes, expf
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    y = (f32x16)((i32x16)y + power);
    y = x < -87.3f ? splat(0.0f) : y;
    y = x > 88.7f ? splat(std::numeric_limits<float>::infinity()) : y;
    return x != x ? x : y;
}

}  // namespace hybrid
