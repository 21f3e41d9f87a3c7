// Products with fp32 sums over weights that were packed once: bf16 in AMX tiles, in AVX-512's pairs or as floats, and fp32.
//
// A row's sum runs over k in one fixed order, whatever other rows come with it: results do not depend on batch or threads.
#include <algorithm>
#include <memory>

#include "amx.h"
#include "ops.h"
#include "team.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace hybrid {

constexpr int PANEL = 32;  // output features of one packed panel
constexpr int DEPTH = 32;  // input features of one tile
constexpr int HALF = PANEL / 2 * DEPTH;  // values of one tile

INLINE int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// weight [out, in] -> [panels][in / DEPTH][2][DEPTH][16], with zeros at the edges; two k of bf16 lie side by side, in one word
template <class T>
void pack(const T* weight, T* packed, int64_t out, int64_t in) {
    constexpr int WORD = sizeof(float) / sizeof(T);
    const int64_t depth = up(in, DEPTH);
    for_each(up(out, PANEL) / PANEL, 1, [&](int64_t panel) {
        const int64_t n0 = panel * PANEL;
        T* at = packed + n0 * depth;
        for (int64_t k0 = 0; k0 < depth; k0 += DEPTH)
            for (int half = 0; half < 2; half++, at += HALF)
                for (int n = 0; n < 16; n++) {
                    int64_t feature = n0 + half * 16 + n;
                    for (int k = 0; k < DEPTH; k++) {
                        bool inside = feature < out && k0 + k < in;
                        at[(k / WORD * 16 + n) * WORD + k % WORD] = inside ? weight[feature * in + k0 + k] : T{};
                    }
                }
    });
}

// The sums of one row and WIDTH features -> y, with bias
template <class T>
INLINE void write(const Linear<T>& a, int64_t row, int64_t feature, f32v v) {
    int64_t n = a.out - feature;
    if (n <= 0) return;
    if (a.bias) v += load(a.bias + feature, n);
    if (a.y_is_float)
        store((float*)a.y + row * a.y_stride + feature, v, n);
    else
        store((T*)a.y + row * a.y_stride + feature, v, n);
}

// The activations that a block of rows is computed from
template <class V>
struct Rows {
    const V* start;
    int64_t stride;
    const V* at(int64_t row) const { return start + row * stride; }
};

// A panel comes from memory once; the hardware does not run ahead far enough
constexpr int AHEAD = 8192;  // bytes
template <class T>
INLINE void fetch_ahead(const T* panel) {
    for (int line = 0; line < 2 * HALF * (int)sizeof(T); line += 64) __builtin_prefetch((const char*)panel + AHEAD + line, 0, 2);
}

// In floats, for any CPU. Of a word with two bf16, either becomes a float by itself
template <class T>
struct Floats {
    typedef float Value;  // of a row of x as it is read
    static constexpr int ROW_BLOCK = WIDTH == 16 ? 12 : 6, X_BYTES = 1 << 18;
    static constexpr int WORD = sizeof(float) / sizeof(T);  // values of T in a word

    void panel_rows(const Linear<T>& a, Rows<float> x, const T* panel, int64_t depth, int64_t n0, int64_t row, int rows, bool fetch) {
        exactly<ROW_BLOCK>(a, x, panel, depth, n0, row, rows, fetch);
    }

   private:
    template <int ROWS>
    INLINE void exactly(const Linear<T>& a, Rows<float> x, const T* panel, int64_t depth, int64_t n0, int64_t row, int rows, bool fetch) {
        if constexpr (ROWS > 1)
            if (rows < ROWS) return exactly<ROWS - 1>(a, x, panel, depth, n0, row, rows, fetch);
        constexpr int COLUMNS = ROWS <= 2 ? PANEL / WIDTH : 2;  // vectors of features at a time: many sums, that fit the registers
        for (int n = 0; n < PANEL; n += COLUMNS * WIDTH) some_columns<ROWS, COLUMNS>(a, x, panel, depth, n0, n, row, fetch && n == 0);
    }

    template <int ROWS, int COLUMNS>
    INLINE void some_columns(const Linear<T>& a, Rows<float> x, const T* panel, int64_t depth, int64_t n0, int n, int64_t row, bool fetch) {
        f32v acc[ROWS][COLUMNS] = {};
        const float* at = x.at(row);
        for (int64_t k = 0; k < depth; k += DEPTH, panel += 2 * HALF) {
            if (fetch) fetch_ahead(panel);
            for (int p = 0; p < DEPTH; p += WORD) {
                u32v words[COLUMNS];
#pragma GCC unroll 4
                for (int v = 0; v < COLUMNS; v++) {
                    const int feature = n + v * WIDTH;
                    memcpy(&words[v], panel + feature / 16 * HALF + p * 16 + feature % 16 * WORD, sizeof(u32v));
                }
#pragma GCC unroll 2
                for (int part = 0; part < WORD; part++) {
                    f32v w[COLUMNS];
#pragma GCC unroll 4
                    for (int v = 0; v < COLUMNS; v++)
                        w[v] = (f32v)(WORD == 1 ? words[v] : part ? words[v] & 0xffff0000u : words[v] << 16);
#pragma GCC unroll 12
                    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
                        for (int v = 0; v < COLUMNS; v++) acc[i][v] += at[i * x.stride + k + p + part] * w[v];
                }
            }
        }
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < COLUMNS; v++) write(a, row + i, n0 + n + v * WIDTH, acc[i][v]);
    }
};

#if defined(__AMX_BF16__)

struct Tiles {
    typedef bf16 Value;
    static constexpr int ROW_BLOCK = 32, X_BYTES = 1 << 20;

    // Up to 32 rows of one panel; `fetch`: the first to read it
    INLINE void panel_rows(const Linear<bf16>& a, Rows<bf16> x, const bf16* panel, int64_t depth, int64_t n0, int64_t row, int rows, bool fetch) {
        const int first = std::min(rows, 16), second = rows - first;
        const bf16 *x0 = x.at(row), *x1 = x.at(row + 16);
        const int64_t stride = x.stride * sizeof(bf16);
        alignas(64) float sums[16 * 16];
        configure(first, second);
        _tile_zero(0);
        _tile_zero(1);
        if (second) {
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t k = 0; k < depth; k += DEPTH, panel += 2 * HALF) {
                if (fetch) fetch_ahead(panel);
                _tile_loadd(6, panel, 64);
                _tile_loadd(4, x0 + k, stride);
                _tile_loadd(7, panel + HALF, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(5, x1 + k, stride);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        } else {
            for (int64_t k = 0; k < depth; k += DEPTH, panel += 2 * HALF) {
                if (fetch) fetch_ahead(panel);
                _tile_loadd(4, x0 + k, stride);
                _tile_loadd(6, panel, 64);
                _tile_loadd(7, panel + HALF, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
            }
        }
        _tile_stored(0, sums, 64);
        write_tile(a, sums, row, first, n0);
        _tile_stored(1, sums, 64);
        write_tile(a, sums, row, first, n0 + 16);
        if (second) {
            _tile_stored(2, sums, 64);
            write_tile(a, sums, row + 16, second, n0);
            _tile_stored(3, sums, 64);
            write_tile(a, sums, row + 16, second, n0 + 16);
        }
    }

   private:
    // tiles 0 to 3: sums (two row blocks x two halves); 4, 5: x; 6, 7: weight
    void configure(uint8_t first, uint8_t second) {
        second = std::max<uint8_t>(second, 1);
        tiles.configure({first, first, second, second, first, second, 16, 16});
    }

    INLINE void write_tile(const Linear<bf16>& a, const float* sums, int64_t row, int rows, int64_t feature) {
        for (int i = 0; i < rows; i++) write(a, row + i, feature, load(sums + i * 16));
    }

    TileScope tiles;
};

#elif defined(__AVX512BF16__)

struct Pairs {
    typedef bf16 Value;
    static constexpr int ROW_BLOCK = 12, X_BYTES = 1 << 20;

    void panel_rows(const Linear<bf16>& a, Rows<bf16> x, const bf16* panel, int64_t depth, int64_t n0, int64_t row, int rows, bool) {
        while (rows >= 12) few_rows<12>(a, x, panel, depth, n0, row), row += 12, rows -= 12;
        while (rows >= 4) few_rows<4>(a, x, panel, depth, n0, row), row += 4, rows -= 4;
        while (rows >= 1) few_rows<1>(a, x, panel, depth, n0, row), row += 1, rows -= 1;
    }

   private:
    template <int ROWS>
    INLINE void few_rows(const Linear<bf16>& a, Rows<bf16> x, const bf16* panel, int64_t depth, int64_t n0, int64_t row) {
        __m512 acc[ROWS][2];
        for (int i = 0; i < ROWS; i++) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
        for (int64_t k = 0; k < depth; k += DEPTH, panel += 2 * HALF)
            for (int p = 0; p < DEPTH / 2; p++) {
                __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel + p * 32), w1 = (__m512bh)_mm512_loadu_si512(panel + HALF + p * 32);
                for (int i = 0; i < ROWS; i++) {
                    int32_t pair;
                    memcpy(&pair, x.at(row + i) + k + 2 * p, 4);
                    __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
                    acc[i][0] = _mm512_dpbf16_ps(acc[i][0], both, w0);
                    acc[i][1] = _mm512_dpbf16_ps(acc[i][1], both, w1);
                }
            }
        for (int i = 0; i < ROWS; i++) {
            write(a, row + i, n0, (f32v)acc[i][0]);
            write(a, row + i, n0 + 16, (f32v)acc[i][1]);
        }
    }
};

#endif

// A row of x as the panels' loops read it: whole tiles, so zeros beyond its end and not the next row
template <class T, class V>
INLINE void copy_row(const T* x, V* copy, int64_t in, int64_t depth) {
    int64_t k = 0;
    for (; k < in; k += WIDTH) store(copy + k, load(x + k, in - k));
    for (; k < depth; k += WIDTH) store(copy + k, splat(0.0f));
}

// each(work, x, panel, first row, rows, whether the panel is met for the first time), for `panels` panels and all rows
template <class Panels, class T, class F>
void over_panels(const Linear<T>& a, int64_t panels, const F& each) {
    typedef typename Panels::Value Value;
    constexpr int unit = Panels::ROW_BLOCK;
    const int64_t depth = up(a.in, DEPTH);
    const int64_t block = up(std::max<int64_t>(unit, Panels::X_BYTES / (depth * sizeof(Value))), unit);  // x stays in the L2 cache
    const bool copied = sizeof(Value) != sizeof(T) || a.in % DEPTH;
    std::unique_ptr<Value[]> copy(copied ? new Value[std::min(block, a.rows) * depth] : nullptr);
    for (int64_t m0 = 0; m0 < a.rows; m0 += block) {
        const int64_t m1 = std::min(m0 + block, a.rows);
        const Rows<Value> x = copied ? Rows<Value>{copy.get() - m0 * depth, depth} : Rows<Value>{(const Value*)a.x, a.x_stride};
        if (copied)
            for_each(m1 - m0, std::max<int64_t>(1, (1 << 14) / depth), [&](int64_t i) {
                copy_row(a.x + (m0 + i) * a.x_stride, copy.get() + i * depth, a.in, depth);
            });
        in_parallel(panels, std::min<int64_t>(8, std::max<int64_t>(1, panels / (4 * team_size()))), [&](Pieces& pieces) {
            Panels work;
            for (int64_t p, end; pieces.next(p, end);)
                for (; p < end; p++)
                    for (int64_t m = m0; m < m1; m += unit) each(work, x, p, m, std::min<int64_t>(unit, m1 - m), m == m0);
        });
    }
}

// The fastest way of this CPU
template <class Panels>
struct With {
    typedef Panels Type;
};
template <class F>
void choose_panels(const Linear<float>&, const F& f) {
    f(With<Floats<float>>{});
}
template <class F>
void choose_panels(const Linear<bf16>&, const F& f) {
#if defined(__AMX_BF16__)
    static const bool allowed = may_use_tiles();
    if (allowed) return f(With<Tiles>{});
#elif defined(__AVX512BF16__)
    return f(With<Pairs>{});
#endif
    f(With<Floats<bf16>>{});
}

template <class T>
void linear(const Linear<T>& a) {
    const int64_t depth = up(a.in, DEPTH);
    choose_panels(a, [&](auto with) {
        typedef typename decltype(with)::Type Panels;
        over_panels<Panels>(a, up(a.out, PANEL) / PANEL, [&](Panels& work, auto x, int64_t p, int64_t row, int rows, bool first) {
            work.panel_rows(a, x, a.packed + p * PANEL * depth, depth, p * PANEL, row, rows, first);
        });
    });
}

template <class T>
void gated_linear(const Linear<T>& a) {
    const int64_t depth = up(a.in, DEPTH), half = a.out / 2;
    choose_panels(a, [&](auto with) {
        typedef typename decltype(with)::Type Panels;
        over_panels<Panels>(a, half / PANEL, [&](Panels& work, auto x, int64_t p, int64_t row, int rows, bool first) {
            T found[2][Panels::ROW_BLOCK * PANEL];
            for (int part = 0; part < 2; part++) {
                const int64_t n0 = part * half + p * PANEL;
                const Linear<T> block{nullptr, nullptr, a.bias ? a.bias + n0 : nullptr, found[part], rows, a.in, PANEL, 0, PANEL, false};
                work.panel_rows(block, {x.at(row), x.stride}, a.packed + n0 * depth, depth, 0, 0, rows, first);
            }
            for (int i = 0; i < rows; i++)
                for (int n = 0; n < PANEL; n += WIDTH)
                    store((T*)a.y + (row + i) * half + p * PANEL + n, gated<T>(load(found[0] + i * PANEL + n), load(found[1] + i * PANEL + n)));
        });
    });
}

}  // namespace hybrid

extern "C" int64_t linear_packed_size(int64_t out, int64_t in) { return hybrid::up(out, hybrid::PANEL) * hybrid::up(in, hybrid::DEPTH); }
#define EXPORT(T, name)                                                                       \
    extern "C" void linear_pack_##name(const T* weight, T* packed, int64_t out, int64_t in) { \
        hybrid::pack(weight, packed, out, in);                                                \
    }                                                                                         \
    extern "C" void linear_##name(const hybrid::Linear<T>* a) { hybrid::linear(*a); }   \
    template void hybrid::linear(const Linear<T>&);                                           \
    template void hybrid::gated_linear(const Linear<T>&);
EXPORT(float, f32)
EXPORT(hybrid::bf16, bf16)
