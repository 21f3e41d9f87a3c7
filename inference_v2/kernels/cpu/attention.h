// What a tile of keys adds to the running softmax of some query rows: in vectors of floats, for any dtype and head dimension.
#pragma once
#include <algorithm>
#include <vector>

#include "ops.h"

namespace hybrid {

constexpr int TILE = 64;       // keys
constexpr int HEADS = 4;       // rows of one query token that are computed together
constexpr float FAR = -1e30f;  // running maximum before any key: finite, so that FAR - FAR is 0

template <class T>
struct Keys {
    const T* k[TILE];
    const T* v[TILE];
    int low[TILE], high[TILE];  // of each query token of the unit: it sees keys low : high of the tile
    int count = 0;

    // Keys and values first : last, if there are so many, on their way to the cache
    INLINE void fetch(int first, int last, int64_t dim) const {
        for (int j = first; j < std::min(last, count); j++)
            for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) {
                __builtin_prefetch(k[j] + d, 0, 2);
                __builtin_prefetch(v[j] + d, 0, 2);
            }
    }
};

// The running softmax of query rows: a row is one head of one token
struct Softmax {
    Buffer<float> total, peak, mass;  // [rows, padded], [rows], [rows]

    Softmax(int64_t rows, int64_t padded) : total(rows * padded), peak(rows), mass(rows) {}
    void clear(int64_t rows, int64_t padded) {
        std::fill(total.data(), total.data() + rows * padded, 0.0f);
        std::fill(peak.data(), peak.data() + rows, FAR);
        std::fill(mass.data(), mass.data() + rows, 0.0f);
    }
};

// Products of a row with KEYS keys, of which low : high are seen -> weights, 0 for the others; returns what the old sums shrink by
template <int KEYS>
INLINE float soften(const Attention& a, float* row, int low, int high, float& peak, float& mass) {
    const i32v lanes = lane_numbers();
    f32v scores[KEYS / WIDTH], top = splat(FAR), sums{};
    for (int i = 0; i < KEYS / WIDTH; i++) {
        f32v s = load(row + i * WIDTH) * a.scale;
        if (a.softcap != 0)
            for (int j = 0; j < WIDTH; j++) s[j] = std::tanh(s[j] / a.softcap) * a.softcap;
        if (low > 0 || high < KEYS) {
            i32v at = lanes + i * WIDTH;
            s = (at >= low) & (at < high) ? s : splat(-INFINITY);
        }
        scores[i] = s;
        top = maximum(top, s);
    }
    const float old = peak, now = std::max(old, maximum(top));
    for (int i = 0; i < KEYS / WIDTH; i++) {
        f32v w = exp(scores[i] - now);
        store(row + i * WIDTH, w);
        sums += w;
    }
    const float shrink = old == now ? 1.0f : exp(splat(old - now))[0];
    mass = mass * shrink + sum(sums);
    peak = now;
    return shrink;
}

// x . y over two vectors of T at a time, added to acc: bf16 pairs where the CPU multiplies them
template <class T, int DV>
struct Dot {
    static constexpr int64_t STEP = WIDTH;
    typedef f32v Operand;
    static INLINE Operand get(const T* p, int64_t n) { return DV ? load(p) : load(p, n); }
    static INLINE void add(f32v& acc, Operand x, Operand y) { acc += x * y; }
};
#if defined(__AVX512BF16__)
template <int DV>
struct PairDot {
    static constexpr int64_t STEP = 2 * WIDTH;
    typedef __m512bh Operand;
    static INLINE Operand get(const bf16* p, int64_t) { return (__m512bh)_mm512_loadu_si512(p); }
    static INLINE void add(f32v& acc, Operand x, Operand y) { acc = (f32v)_mm512_dpbf16_ps((__m512)acc, x, y); }
};
template <>
struct Dot<bf16, 2> : PairDot<2> {};
template <>
struct Dot<bf16, 4> : PairDot<4> {};
template <>
struct Dot<bf16, 6> : PairDot<6> {};
template <>
struct Dot<bf16, 8> : PairDot<8> {};
#endif

// scores[h][0 : WIDTH] of WIDTH keys, a few at a time; DV vectors a head
template <class T, int DV, int H>
INLINE void dot_products(const T* const* keys, const T* q, int64_t padded, int64_t dim, f32v* scores) {
    typedef Dot<T, DV> D;
    constexpr int AT_ONCE = WIDTH / 4;  // with H rows they fill the registers
    f32v products[H][WIDTH];
    const int64_t end = DV ? DV * WIDTH : padded;
    for (int i = 0; i < WIDTH; i += AT_ONCE) {
        f32v acc[AT_ONCE][H] = {};
        for (int64_t d = 0; d < end; d += D::STEP) {
            typename D::Operand k[AT_ONCE];
            for (int j = 0; j < AT_ONCE; j++) k[j] = D::get(keys[i + j] + d, dim - d);
            for (int h = 0; h < H; h++) {
                typename D::Operand x = D::get(q + h * padded + d, WIDTH);
                for (int j = 0; j < AT_ONCE; j++) D::add(acc[j][h], x, k[j]);
            }
        }
        for (int h = 0; h < H; h++)
            for (int j = 0; j < AT_ONCE; j++) products[h][i + j] = acc[j][h];
    }
    for (int h = 0; h < H; h++) scores[h] = sum_rows(products[h]);
}

// One tile's keys low : high for H rows of one query token, from row `first` of the softmax on
template <class T, int DV, int H>
void attend_tile(const Attention& a, const Keys<T>& keys, int low, int high, const T* q, int64_t padded, Softmax& softmax,
                 int64_t first) {
    constexpr int COLUMNS = DV > (WIDTH == 16 ? 5 : 2) ? 2 : std::max(DV, 1);  // of values at a time: sums in registers
    static_assert(DV % COLUMNS == 0);
    const int64_t dim = a.head_dim, vectors = DV ? DV : padded / WIDTH;
    float weights[H][TILE];
    for (int i = 0; i < TILE; i += WIDTH) {
        if (i + WIDTH <= low || i >= high) continue;
        const T* rows[WIDTH];  // a key that must not be seen is not read
        for (int j = 0; j < WIDTH; j++) rows[j] = keys.k[std::min(std::max(i + j, low), high - 1)];
        f32v scores[H];
        dot_products<T, DV, H>(rows, q, padded, dim, scores);
        for (int h = 0; h < H; h++) store(&weights[h][i], scores[h]);
    }
    float* total = softmax.total.data() + first * padded;
    for (int h = 0; h < H; h++) {
        const float shrink = soften<TILE>(a, weights[h], low, high, softmax.peak[first + h], softmax.mass[first + h]);
        if (shrink != 1.0f)
            for (int64_t d = 0; d < padded; d += WIDTH) store(total + h * padded + d, load(total + h * padded + d) * shrink);
    }
    if (DV) {
        for (int d = 0; d < DV; d += COLUMNS) {
            f32v acc[H][COLUMNS];
            for (int h = 0; h < H; h++)
                for (int c = 0; c < COLUMNS; c++) acc[h][c] = load(total + h * padded + (d + c) * WIDTH);
            for (int i = low; i < high; i++)
                for (int c = 0; c < COLUMNS; c++) {
                    f32v v = load(keys.v[i] + (d + c) * WIDTH);
                    for (int h = 0; h < H; h++) acc[h][c] += weights[h][i] * v;
                }
            for (int h = 0; h < H; h++)
                for (int c = 0; c < COLUMNS; c++) store(total + h * padded + (d + c) * WIDTH, acc[h][c]);
        }
    } else {
        for (int i = low; i < high; i++)
            for (int64_t d = 0; d < vectors; d++) {
                f32v v = load(keys.v[i] + d * WIDTH, dim - d * WIDTH);
                for (int h = 0; h < H; h++) {
                    float* t = total + h * padded + d * WIDTH;
                    store(t, load(t) + weights[h][i] * v);
                }
            }
    }
}

// The tile for all rows of `count` query tokens, added to the softmax from its row `to` on
template <class T, int DV>
void attend_rows(const Attention& a, const Keys<T>& keys, int count, const T* q, int64_t padded, int64_t group, Softmax& softmax,
                 int64_t to) {
    for (int i = 0; i < count; i++) {
        const int low = keys.low[i], high = keys.high[i];
        if (low >= high) continue;
        for (int64_t h = 0; h < group;) {
            const int64_t many = std::min<int64_t>(HEADS, group - h), row = i * group + h;
            const T* x = q + row * padded;
            switch (many) {
                case 1: attend_tile<T, DV, 1>(a, keys, low, high, x, padded, softmax, to + row); break;
                case 2: attend_tile<T, DV, 2>(a, keys, low, high, x, padded, softmax, to + row); break;
                case 3: attend_tile<T, DV, 3>(a, keys, low, high, x, padded, softmax, to + row); break;
                default: attend_tile<T, DV, 4>(a, keys, low, high, x, padded, softmax, to + row);
            }
            h += many;
        }
    }
}

template <class T>
using AttendRows = void (*)(const Attention&, const Keys<T>&, int, const T*, int64_t, int64_t, Softmax&, int64_t);

template <class T>
AttendRows<T> attend_rows_for(int64_t dim) {
    switch (dim) {
        case 32: return attend_rows<T, 32 / WIDTH>;
        case 64: return attend_rows<T, 64 / WIDTH>;
        case 80: return attend_rows<T, 80 / WIDTH>;
        case 96: return attend_rows<T, 96 / WIDTH>;
        case 128: return attend_rows<T, 128 / WIDTH>;
        default: return attend_rows<T, 0>;
    }
}

}  // namespace hybrid
