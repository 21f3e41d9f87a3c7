// The same tile on AMX, for bf16 and head dimensions that are multiples of 32. Scores are exact products with fp32 sums. Weights
// enter the second product as two bf16 numbers, which together hold 16 bits of them; their own sum is taken in fp32.
#pragma once
#include "amx.h"
#include "attention.h"
#if defined(__AMX_BF16__)

namespace hybrid {

// In place: row i of the result is column i of what was there
INLINE void transpose(f32v* rows) {
#pragma GCC unroll 4
    for (int step = 1; step < WIDTH; step *= 2)
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++)
            if (!(i & step)) {
                f32v a = rows[i], b = rows[i + step];
                rows[i] = __builtin_shuffle(a, b, interleaved(step));
                rows[i + step] = __builtin_shuffle(a, b, interleaved(step) + step);
            }
}

class AmxTile {
   public:
    static bool serves(int64_t head_dim) {
        static const bool allowed = may_use_tiles();
        return allowed && head_dim % 32 == 0;
    }

    // Room for `rows` query rows
    AmxTile(int64_t head_dim, int64_t rows)
        : dim(head_dim), keys_copy(TILE * dim), values(TILE * dim), queries((rows + 15) / 16 * 16 * dim), scores(16 * TILE),
          high(16 * TILE), low(16 * TILE) {
        tiles.configure({16, 16, 16, 16, 16, 16, 16, 16});
    }

    // Keys and values to where the tiles read them: keys in rows, values in pairs of keys. False where a value is not finite:
    // it would reach rows that do not see it
    bool take(const Keys<bf16>& keys, int first, int last) {
        const i16x32 zero{};
        i16x32 odd = zero;
        for (int j = 0; j < TILE; j++) {
            const bool seen = j >= first && j < last;
            for (int64_t d = 0; d < dim; d += 32) put(keys_copy.data() + j * dim + d, seen ? get(keys.k[j] + d) : zero);
        }
        for (int j = 0; j < TILE; j += 2)
            for (int64_t d = 0; d < dim; d += 32) {
                i16x32 a = j >= first && j < last ? get(keys.v[j] + d) : zero;
                i16x32 b = j + 1 >= first && j + 1 < last ? get(keys.v[j + 1] + d) : zero;
                odd |= ((a & 0x7f80) == 0x7f80) | ((b & 0x7f80) == 0x7f80);
                bf16* at = values.data() + (j / 2 * dim + d) * 2;  // [TILE / 2][dim][2]
                put(at, __builtin_shuffle(a, b, interleave));
                put(at + 32, __builtin_shuffle(a, b, interleave + 16));
            }
        return !_mm512_test_epi16_mask((__m512i)odd, (__m512i)odd);
    }

    // The unit's query rows, [rows / 16][dim / 2][16][2]: right operands
    void take_queries(const bf16* q, int64_t padded, int64_t rows) {
        for (int64_t row = 0; row < rows; row += 16)
            for (int64_t d = 0; d < dim; d += 16) {
                f32v block[16];
                for (int r = 0; r < 16; r++) block[r] = row + r < rows ? load(q + (row + r) * padded + d) : f32v{};
                transpose(block);  // block[i] holds dimension d + i of 16 rows: bf16 in the upper halves
                for (int p = 0; p < 8; p++) {
                    u32v pair = (u32v)block[2 * p] >> 16 | ((u32v)block[2 * p + 1] & 0xffff0000u);
                    memcpy(queries.data() + row * dim + (d / 2 + p) * 32, &pair, 64);
                }
            }
    }

    // Adds the tile, of which no row sees a key at or behind `last`, to rows `row` : row + rows (at most 16) of the unit. A token
    // has `group` rows. All tiles have 16 rows: what is beyond `rows` is computed, and never read
    void attend(const Attention& a, const Keys<bf16>& keys, int last, int64_t row, int rows, int64_t group, int64_t padded,
                Softmax& softmax) {
        products(queries.data() + row * dim);
        for (int j = 0; j < last; j += 16) {
            f32v block[16];
            for (int i = 0; i < 16; i++) block[i] = load(columns + (j + i) * 16);
            transpose(block);
            for (int i = 0; i < 16; i++) store(scores.data() + i * TILE + j, block[i]);
        }
        float* total = softmax.total.data() + row * padded;
        for (int i = 0; i < rows; i++) {
            const int token = (row + i) / group;
            float *s = scores.data() + i * TILE, shrink = 1.0f;
            if (keys.low[token] < keys.high[token])
                shrink = soften(a, s, keys.low[token], keys.high[token], softmax.peak[row + i], softmax.mass[row + i]);
            else
                std::fill(s, s + TILE, 0.0f);
            if (shrink != 1.0f)
                for (int64_t d = 0; d < dim; d += WIDTH) store(total + i * padded + d, load(total + i * padded + d) * shrink);
            for (int j = 0; j < TILE; j += WIDTH) {
                f32v w = load(s + j), near = rounded<bf16>(w);
                store(high.data() + i * TILE + j, near);
                store(low.data() + i * TILE + j, w - near);
            }
        }
        for (int64_t d = 0; d < dim; d += 32) add_values(total + d, padded * sizeof(float), d, last);
    }

   private:
    // columns[key][row]
    void products(const bf16* q) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const bf16* k = keys_copy.data();
        for (int64_t d = 0; d < dim; d += 32) {
            _tile_loadd(7, q + d * 16, 64);
            _tile_loadd(4, k + d, dim * 2);
            _tile_dpbf16ps(0, 4, 7);
            _tile_loadd(5, k + 16 * dim + d, dim * 2);
            _tile_dpbf16ps(1, 5, 7);
            _tile_loadd(4, k + 32 * dim + d, dim * 2);
            _tile_dpbf16ps(2, 4, 7);
            _tile_loadd(5, k + 48 * dim + d, dim * 2);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, columns, 64);
        _tile_stored(1, columns + 256, 64);
        _tile_stored(2, columns + 512, 64);
        _tile_stored(3, columns + 768, 64);
    }

    // Weights times values, for dimensions d : d + 32
    void add_values(float* total, int64_t stride, int64_t d, int last) {
        _tile_loadd(0, total, stride);
        _tile_loadd(1, total + 16, stride);
        for (int j = 0; j < last; j += 32) {
            _tile_loadd(4, high.data() + j, TILE * 2);
            _tile_loadd(6, values.data() + (j / 2 * dim + d) * 2, dim * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, values.data() + (j / 2 * dim + d + 16) * 2, dim * 4);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, low.data() + j, TILE * 2);
            _tile_dpbf16ps(0, 5, 6);
            _tile_dpbf16ps(1, 5, 7);
        }
        _tile_stored(0, total, stride);
        _tile_stored(1, total + 16, stride);
    }

    typedef int16_t i16x32 __attribute__((vector_size(64)));
    static constexpr i16x32 interleave = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                          8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    static i16x32 get(const bf16* p) {
        i16x32 v;
        memcpy(&v, p, 64);
        return v;
    }
    static void put(bf16* p, i16x32 v) { memcpy(p, &v, 64); }

    TileScope tiles;
    const int64_t dim;
    std::vector<bf16> keys_copy, values, queries;
    std::vector<float> scores;      // [16 rows][TILE], then the weights
    std::vector<bf16> high, low;    // the weights in two parts
    alignas(64) float columns[TILE * 16];
};

}  // namespace hybrid
#endif
