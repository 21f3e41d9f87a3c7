// A register of floats at a time, in the compiler's own vector type: one source for AVX-512, AVX2 and whatever else it targets.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace hybrid {

// Of the width of a register: the compiler would cut wider ones, comparisons and shuffles lane by lane
#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#else
constexpr int WIDTH = 8;
#endif
typedef float f32v __attribute__((vector_size(4 * WIDTH)));
typedef int32_t i32v __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t u32v __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t u16v __attribute__((vector_size(2 * WIDTH)));
typedef double f64v __attribute__((vector_size(4 * WIDTH)));  // half as many lanes

#define INLINE inline __attribute__((always_inline))

struct bf16 {
    uint16_t bits;
};

INLINE f32v splat(float x) { return x - f32v{}; }

INLINE float widen(float x) { return x; }
INLINE float widen(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE f32v load(const float* p) {
    f32v v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE f32v load(const bf16* p) {
    u16v half;
    memcpy(&half, p, sizeof half);
    return (f32v)(__builtin_convertvector(half, u32v) << 16);
}

// The first n values; the others are 0.
template <class T>
INLINE f32v load(const T* p, int64_t n) {
    if (n >= WIDTH) return load(p);
    T part[WIDTH] = {};
    memcpy(part, p, n * sizeof(T));
    return load(part);
}

// Round to nearest even, as torch does; a NaN stays one.
INLINE u16v to_bf16(f32v v) {
    u32v bits = (u32v)v;
    u32v rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    u32v nan = (u32v)(v != v);
    return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0u), u16v);
}
INLINE void store(float* p, f32v v) { memcpy(p, &v, sizeof v); }
INLINE void store(bf16* p, f32v v) {
    u16v half = to_bf16(v);
    memcpy(p, &half, sizeof half);
}
template <class T>
INLINE void store(T* p, f32v v, int64_t n) {
    if (n >= WIDTH) return store(p, v);
    T part[WIDTH];
    store(part, v);
    memcpy(p, part, n * sizeof(T));
}

// `v` as it would come back from memory of type T: the reference rounds after every operation. For floats that means that a
// product is not fused with the sum that follows, which would leave its rounding out.
template <class T>
INLINE f32v rounded(f32v v);
template <>
INLINE f32v rounded<float>(f32v v) {
#if defined(__FMA__)
    asm("" : "+v"(v));
#elif !defined(__x86_64__)
    asm("" : "+m"(v));
#endif
    return v;
}
template <>
INLINE f32v rounded<bf16>(f32v v) {
    u32v bits = (u32v)v;
    f32v near = (f32v)((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
    return v != v ? v : near;
}

// The lower and the upper lanes as doubles
struct Doubles {
    f64v low, high;
};
INLINE Doubles doubles(f32v v) {
#if defined(__AVX512F__)
    return {(f64v)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)), (f64v)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1))};
#else
    typedef float half __attribute__((vector_size(2 * WIDTH)));
    half parts[2];
    memcpy(parts, &v, sizeof v);
    return {__builtin_convertvector(parts[0], f64v), __builtin_convertvector(parts[1], f64v)};
#endif
}

// Memory of zeros that begins where a cache line does: a row of a tile that lies in two lines is read twice
template <class T>
class Buffer {
   public:
    explicit Buffer(int64_t size) : start((T*)std::aligned_alloc(64, (size * sizeof(T) + 64) / 64 * 64)) {
        if (!start) throw std::bad_alloc();
        std::memset((void*)start, 0, size * sizeof(T));
    }
    ~Buffer() { std::free(start); }
    Buffer(const Buffer&) = delete;
    T* data() { return start; }
    const T* data() const { return start; }
    T& operator[](int64_t i) { return start[i]; }
    const T& operator[](int64_t i) const { return start[i]; }

   private:
    T* start;
};

INLINE f32v maximum(f32v a, f32v b) { return a > b ? a : b; }

INLINE i32v lane_numbers() {
    i32v lane;
    for (int i = 0; i < WIDTH; i++) lane[i] = i;
    return lane;
}

// Lanes folded in halves: a fixed order, and vector instructions
INLINE f32v lanes_from(f32v v, int step) { return __builtin_shuffle(v, (lane_numbers() + step) & (WIDTH - 1)); }
INLINE float sum(f32v v) {
#pragma GCC unroll 4
    for (int step = WIDTH / 2; step; step /= 2) v += lanes_from(v, step);
    return v[0];
}
INLINE float maximum(f32v v) {
#pragma GCC unroll 4
    for (int step = WIDTH / 2; step; step /= 2) v = maximum(v, lanes_from(v, step));
    return v[0];
}

// For __builtin_shuffle(a, b, .): lanes of a where their number lacks the bit `step`, lanes of b moved in between. With `+ step`
// the other half of both
INLINE i32v interleaved(int step) { return lane_numbers() + (lane_numbers() & step) / step * (WIDTH - step); }

// Lane i of the result is the sum over the lanes of rows[i].
INLINE f32v sum_rows(f32v* rows) {
#pragma GCC unroll 4
    for (int step = 1; step < WIDTH; step *= 2)
#pragma GCC unroll 8
        for (int i = 0; i < WIDTH / 2 / step; i++)
            rows[i] = __builtin_shuffle(rows[2 * i], rows[2 * i + 1], interleaved(step)) +
                      __builtin_shuffle(rows[2 * i], rows[2 * i + 1], interleaved(step) + step);
    return rows[0];
}

// e^x with a relative error of 2e-7; 0 for -inf, inf for inf, NaN for NaN. Values below 1.2e-38 are 0.
INLINE f32v exp(f32v x) {
#if defined(__AVX512F__)
    __m512 v = _mm512_max_ps(_mm512_set1_ps(-87.3f), _mm512_min_ps(_mm512_set1_ps(104.0f), (__m512)x));  // the second if NaN
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(v, _mm512_set1_ps(1.44269504088896341f)), 0x08);
    f32v r = (f32v)v - (f32v)n * 0.693145751953125f - (f32v)n * 1.42860682030941723212e-6f;
#else
    f32v v = x < -87.3f ? splat(-87.3f) : x;
    v = v > 88.7f ? splat(88.7f) : v;
    f32v n = v * 1.44269504088896341f + 12582912.0f;  // the sum's low bits hold round(v / ln 2)
    i32v power = (i32v)n << 23;
    n -= 12582912.0f;
    f32v r = v - n * 0.693145751953125f - n * 1.42860682030941723212e-6f;
#endif
    f32v y = splat(1.9875691500e-4f);  // Cephes, expf
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
#if defined(__AVX512F__)
    // Lanes below the range are masked: a denormal result would cost hundreds of cycles
    return (f32v)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ), (__m512)y, n);
#else
    y = (f32v)((i32v)y + power);
    y = x < -87.3f ? splat(0.0f) : y;
    y = x > 88.7f ? splat(std::numeric_limits<float>::infinity()) : y;
    return x != x ? x : y;
#endif
}

}  // namespace hybrid
