// bf16 x bf16 products with fp32 sums, over weights that were packed once: for CPUs with AMX or AVX-512 bf16.
//
// A row's sum runs over k in one fixed order, whatever other rows come with it: results do not depend on batch or threads.
#include <algorithm>
#include <vector>

#include "vec.h"
#include "amx.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace hybrid {

constexpr int PANEL = 32;  // output features of one packed panel
constexpr int DEPTH = 32;  // input features of one tile
constexpr int HALF = PANEL / 2 * DEPTH;  // values of one tile: [DEPTH / 2][16][2]

struct Linear {
    const bf16 *x, *packed, *bias;  // [rows, in] rows x_stride apart; [panels][in / DEPTH][2][DEPTH / 2][16][2]; [out] or null
    void* y;                        // [rows, out], bf16 or fp32
    int64_t rows, in, out, x_stride;
    int32_t y_is_float;
};

INLINE int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// weight [out, in] -> panels of 32 features, pairs of k side by side, zeros at the edges
void pack(const bf16* weight, bf16* packed, int64_t out, int64_t in) {
    const int64_t depth = up(in, DEPTH);
#pragma omp parallel for schedule(static)
    for (int64_t n0 = 0; n0 < out; n0 += PANEL) {
        bf16* at = packed + n0 * depth;
        for (int64_t k0 = 0; k0 < depth; k0 += DEPTH)
            for (int half = 0; half < 2; half++, at += HALF)
                for (int n = 0; n < 16; n++) {
                    int64_t feature = n0 + half * 16 + n;
                    for (int k = 0; k < DEPTH; k++) {
                        bool inside = feature < out && k0 + k < in;
                        at[(k / 2 * 16 + n) * 2 + k % 2] = inside ? weight[feature * in + k0 + k] : bf16{0};
                    }
                }
    }
}

// 16 sums of one row -> y, with bias
INLINE void write(const Linear& a, int64_t row, int64_t feature, f32x16 v) {
    int64_t n = a.out - feature;
    if (n <= 0) return;
    if (a.bias) v += load(a.bias + feature, n);
    if (a.y_is_float)
        store((float*)a.y + row * a.out + feature, v, n);
    else
        store((bf16*)a.y + row * a.out + feature, v, n);
}

#if defined(__AMX_BF16__)

// tiles 0 to 3: sums (two row blocks x two halves); 4, 5: x; 6, 7: weight
INLINE void configure(TileScope& tiles, uint8_t first, uint8_t second) {
    second = std::max<uint8_t>(second, 1);
    tiles.configure({first, first, second, second, first, second, 16, 16});
}

// A panel comes from memory once; the hardware does not run ahead far enough
constexpr int AHEAD = 8192;  // bytes
INLINE void fetch_ahead(const bf16* panel) {
    for (int line = 0; line < 2 * HALF * (int)sizeof(bf16); line += 64) _mm_prefetch((const char*)panel + AHEAD + line, _MM_HINT_T1);
}

INLINE void write_tile(const Linear& a, const float* sums, int64_t row, int rows, int64_t feature) {
    for (int i = 0; i < rows; i++) write(a, row + i, feature, load(sums + i * 16));
}

// Up to 32 rows of one panel; `fetch`: the first to read it
INLINE void panel_rows(const Linear& a, const bf16* panel, int64_t depth, int64_t n0, int64_t row, int rows, bool fetch,
                       TileScope& tiles) {
    const int first = std::min(rows, 16), second = rows - first;
    const bf16 *x0 = a.x + row * a.x_stride, *x1 = x0 + 16 * a.x_stride;
    const int64_t stride = a.x_stride * sizeof(bf16);
    alignas(64) float sums[16 * 16];
    configure(tiles, first, second);
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

constexpr int ROW_BLOCK = 32;

bool prepare() { return may_use_tiles(); }
const char* kind() { return "amx"; }

#elif defined(__AVX512BF16__)

struct TileScope {};

template <int ROWS>
INLINE void few_rows(const Linear& a, const bf16* panel, int64_t depth, int64_t n0, int64_t row) {
    __m512 acc[ROWS][2];
    for (int i = 0; i < ROWS; i++) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k += DEPTH, panel += 2 * HALF)
        for (int p = 0; p < DEPTH / 2; p++) {
            __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel + p * 32), w1 = (__m512bh)_mm512_loadu_si512(panel + HALF + p * 32);
            for (int i = 0; i < ROWS; i++) {
                int32_t pair;
                memcpy(&pair, a.x + (row + i) * a.x_stride + k + 2 * p, 4);
                __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
                acc[i][0] = _mm512_dpbf16_ps(acc[i][0], x, w0);
                acc[i][1] = _mm512_dpbf16_ps(acc[i][1], x, w1);
            }
        }
    for (int i = 0; i < ROWS; i++) {
        write(a, row + i, n0, (f32x16)acc[i][0]);
        write(a, row + i, n0 + 16, (f32x16)acc[i][1]);
    }
}

constexpr int ROW_BLOCK = 12;

INLINE void panel_rows(const Linear& a, const bf16* panel, int64_t depth, int64_t n0, int64_t row, int rows, bool, TileScope&) {
    while (rows >= 12) few_rows<12>(a, panel, depth, n0, row), row += 12, rows -= 12;
    while (rows >= 4) few_rows<4>(a, panel, depth, n0, row), row += 4, rows -= 4;
    while (rows >= 1) few_rows<1>(a, panel, depth, n0, row), row += 1, rows -= 1;
}

bool prepare() { return true; }
const char* kind() { return "avx512_bf16"; }

#else

struct TileScope {};
constexpr int ROW_BLOCK = 1;
INLINE void panel_rows(const Linear&, const bf16*, int64_t, int64_t, int64_t, int, bool, TileScope&) {}
bool prepare() { return false; }
const char* kind() { return "none"; }

#endif

void linear(Linear a) {
    const int64_t depth = up(a.in, DEPTH), panels = up(a.out, PANEL) / PANEL;
    std::vector<bf16> widened;
    if (a.in % DEPTH) {  // whole tiles are read: zeros beyond the row's end, not the next row
        widened.assign(a.rows * depth, bf16{0});
        for (int64_t i = 0; i < a.rows; i++) std::copy(a.x + i * a.x_stride, a.x + i * a.x_stride + a.in, widened.data() + i * depth);
        a.x = widened.data();
        a.x_stride = depth;
    }
    const int64_t block = up(std::max<int64_t>(ROW_BLOCK, (1 << 19) / depth), ROW_BLOCK);  // rows of x that stay in the L2 cache
    for (int64_t m0 = 0; m0 < a.rows; m0 += block) {
        const int64_t m1 = std::min(m0 + block, a.rows);
#pragma omp parallel
        {
            TileScope tiles;
#pragma omp for schedule(static)
            for (int64_t p = 0; p < panels; p++)
                for (int64_t m = m0; m < m1; m += ROW_BLOCK)
                    panel_rows(a, a.packed + p * PANEL * depth, depth, p * PANEL, m, std::min<int64_t>(ROW_BLOCK, m1 - m), m == m0,
                               tiles);
        }
    }
}

}  // namespace hybrid

extern "C" const char* linear_kind() { return hybrid::prepare() ? hybrid::kind() : "none"; }
extern "C" int64_t linear_packed_size(int64_t out, int64_t in) { return hybrid::up(out, hybrid::PANEL) * hybrid::up(in, hybrid::DEPTH); }
extern "C" void linear_pack(const hybrid::bf16* weight, hybrid::bf16* packed, int64_t out, int64_t in) {
    hybrid::pack(weight, packed, out, in);
}
extern "C" void linear(const hybrid::Linear* a) { hybrid::linear(*a); }
