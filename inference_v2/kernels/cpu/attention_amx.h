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

// Rows are 16 lanes long, [16][4] in memory; rows[i] becomes column i
INLINE void transpose_tall(f32v* rows) {
    const i32v step = (lane_numbers() & 7) * 4 + lane_numbers() / 8;  // columns 0 and 1 of eight rows
    f32v a = __builtin_shuffle(rows[0], rows[1], step), b = __builtin_shuffle(rows[2], rows[3], step);
    f32v c = __builtin_shuffle(rows[0], rows[1], step + 2), d = __builtin_shuffle(rows[2], rows[3], step + 2);
    const i32v halves = lane_numbers() + (lane_numbers() & 8);  // low halves of both
    rows[0] = __builtin_shuffle(a, b, halves), rows[1] = __builtin_shuffle(a, b, halves + 8);
    rows[2] = __builtin_shuffle(c, d, halves), rows[3] = __builtin_shuffle(c, d, halves + 8);
}

// The way back: four rows of 16 lanes become [16][4] in memory
INLINE void transpose_wide(f32v* rows) {
    const i32v lane = lane_numbers(), pair = lane / 2 + (lane & 1) * 16;  // a0 b0 a1 b1 ...
    f32v a = __builtin_shuffle(rows[0], rows[1], pair), b = __builtin_shuffle(rows[0], rows[1], pair + 8);
    f32v c = __builtin_shuffle(rows[2], rows[3], pair), d = __builtin_shuffle(rows[2], rows[3], pair + 8);
    const i32v quad = lane / 4 * 2 + (lane & 1) + (lane & 2) * 8;  // a0 b0 c0 d0 a1 ...
    rows[0] = __builtin_shuffle(a, c, quad), rows[1] = __builtin_shuffle(a, c, quad + 8);
    rows[2] = __builtin_shuffle(b, d, quad), rows[3] = __builtin_shuffle(b, d, quad + 8);
}

class AmxTile {
   public:
    static bool serves(int64_t head_dim) {
        static const bool allowed = may_use_tiles();
        return allowed && head_dim % 32 == 0;
    }

    // For at most `rows` query rows
    AmxTile(const Attention& a, int64_t rows)
        : dim(a.head_dim), in_place(a.block_size % 16 == 0), key_bytes((in_place ? a.num_kv_heads : 1) * a.head_dim * sizeof(bf16)),
          keys_copy(in_place ? 0 : TILE * dim), values(TILE * dim), queries((rows + 15) / 16 * 16 * dim), scores(16 * TILE),
          high(16 * TILE), low(16 * TILE) {}

    // Keys and values first : last to where the tiles read them: keys in rows, values in pairs of keys. Others may be read, and
    // reach no row that does not see them. False where a value that only some rows see (`mixed`) is not finite: it would. Part
    // of the next tile is fetched meanwhile, the rest by `attend`, unless it is the same: memory is busy while we compute
    bool take(const Keys<bf16>& keys, const Keys<bf16>& next, int first, int last, bool mixed) {
        if (!in_place)
            for (int j = first; j < last; j++) memcpy(keys_copy.data() + j * dim, keys.k[j], dim * sizeof(bf16));
        const __m512i zero = _mm512_setzero_si512(), quads = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        const __m512i magnitude = _mm512_set1_epi16(0x7fff);
        __m512i largest = zero;
        auto get = [&](int j, int64_t d) {
            if (j < first || j >= last) return zero;
            const __m512i v = _mm512_loadu_si512(keys.v[j] + d);
            largest = _mm512_max_epi16(largest, _mm512_and_si512(v, magnitude));
            return _mm512_permutexvar_epi64(quads, v);
        };
        for (int j = 0; j < last; j += 32)  // what one product adds
            for (int i = j; i < j + 32; i += 2) {
                next.fetch(i / 2, i / 2 + 1, dim);
                for (int64_t d = 0; d < dim; d += 32) {
                    const __m512i a = get(i, d), b = get(i + 1, d);
                    bf16* at = values.data() + (i / 2 * dim + d) * 2;  // [TILE / 2][dim][2]
                    _mm512_storeu_si512(at, _mm512_unpacklo_epi16(a, b));
                    _mm512_storeu_si512(at + 32, _mm512_unpackhi_epi16(a, b));
                }
            }
        return !mixed || !_mm512_cmpge_epi16_mask(largest, _mm512_set1_epi16(0x7f80));
    }

    // The query rows of the tiles to come, as right operands [rows / columns][dim / 2][columns][2]. A few rows, those of a decode,
    // have tiles of their own size
    void take_queries(const bf16* q, int64_t padded, int64_t rows) {
        columns = rows <= 4 ? 4 : 16;
        // tiles 0, 1: scores; 2: queries; 3, 7: keys or values; 4, 5: sums of values; 6: weights
        const uint8_t few = std::min<int64_t>(rows, 16), narrow = columns * sizeof(float);
        tiles.configure({16, 16, 16, 16, few, few, few, 16}, {narrow, narrow, narrow, 64, 64, 64, 64, 64});
        for (int64_t row = 0; row < rows; row += columns)
            for (int64_t d = 0; d < dim; d += 32) {
                f32v block[16];  // a lane holds two dimensions
                for (int r = 0; r < columns; r++) block[r] = row + r < rows ? load((const float*)(q + (row + r) * padded + d)) : f32v{};
                float* at = (float*)(queries.data() + row * dim + d * columns);
                if (columns == 4) {
                    transpose_wide(block);
                    for (int i = 0; i < 4; i++) store(at + i * 16, block[i]);
                } else {
                    transpose(block);
                    for (int i = 0; i < 16; i++) store(at + i * 16, block[i]);
                }
            }
    }

    // Adds the tile, of which no row sees a key at or behind `last`, for query rows `row` : row + rows (at most 16) to the softmax
    // from its row `to` on. A token has `group` rows. What the tiles hold beyond `rows` is computed, and never read
    void attend(const Attention& a, const Keys<bf16>& keys, const Keys<bf16>& next, int last, int64_t row, int rows, int64_t group,
                int64_t padded, Softmax& softmax, int64_t to) {
        for (int j = 0; j < last; j += 32) products(queries.data() + row * dim, keys, j, j + 16 < last);
        float* total = softmax.total.data() + to * padded;
        const int whole = last > 32 ? TILE : 32;
        for (int i = 0; i < rows; i++) {
            if (&next != &keys) next.fetch(32 + 32 * i / rows, 32 + 32 * (i + 1) / rows, dim);
            const int token = (row + i) / group, first_seen = keys.low[token], end_seen = keys.high[token];
            float *s = scores.data() + i * TILE, shrink = 1.0f, &peak = softmax.peak[to + i], &mass = softmax.mass[to + i];
            if (first_seen >= end_seen)
                std::fill(s, s + whole, 0.0f);
            else if (whole == TILE)
                shrink = soften<TILE>(a, s, first_seen, end_seen, peak, mass);
            else
                shrink = soften<32>(a, s, first_seen, end_seen, peak, mass);
            if (shrink != 1.0f)
                for (int64_t d = 0; d < dim; d += WIDTH) store(total + i * padded + d, load(total + i * padded + d) * shrink);
            for (int j = 0; j < whole; j += WIDTH) split(load(s + j), high.data() + i * TILE + j, low.data() + i * TILE + j);
        }
        for (int64_t d = 0; d < dim; d += 32) add_values(total + d, padded * sizeof(float), d, last);
    }

   private:
    // Scores [row][key] of keys j : j + 16, and of the next 16
    void products(const bf16* q, const Keys<bf16>& keys, int j, bool both) {
        const bf16* k0 = in_place ? keys.k[j] : keys_copy.data() + j * dim;
        const bf16* k1 = in_place && both ? keys.k[j + 16] : k0 + 16 * dim;
        alignas(64) float found[2][256];  // [key][row]
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t d = 0; d < dim; d += 32) {
            _tile_loadd(2, q + d * columns, columns * sizeof(float));
            _tile_loadd(3, k0 + d, key_bytes);
            _tile_dpbf16ps(0, 3, 2);
            if (both) {
                _tile_loadd(7, k1 + d, key_bytes);
                _tile_dpbf16ps(1, 7, 2);
            }
        }
        _tile_stored(0, found[0], columns * sizeof(float));
        if (both) _tile_stored(1, found[1], columns * sizeof(float));
        for (int half = 0; half < 1 + both; half++) {
            f32v block[16];
            for (int i = 0; i < columns; i++) block[i] = load(found[half] + i * 16);
            columns == 4 ? transpose_tall(block) : transpose(block);
            for (int i = 0; i < columns; i++) store(scores.data() + i * TILE + j + half * 16, block[i]);
        }
    }

    // Weights times values, for dimensions d : d + 32
    void add_values(float* total, int64_t stride, int64_t d, int last) {
        _tile_loadd(4, total, stride);
        _tile_loadd(5, total + 16, stride);
        for (int j = 0; j < last; j += 32) {
            _tile_loadd(6, high.data() + j, TILE * 2);
            _tile_loadd(3, values.data() + (j / 2 * dim + d) * 2, dim * 4);
            _tile_dpbf16ps(4, 6, 3);
            _tile_loadd(7, values.data() + (j / 2 * dim + d + 16) * 2, dim * 4);
            _tile_dpbf16ps(5, 6, 7);
            _tile_loadd(6, low.data() + j, TILE * 2);
            _tile_dpbf16ps(4, 6, 3);
            _tile_dpbf16ps(5, 6, 7);
        }
        _tile_stored(4, total, stride);
        _tile_stored(5, total + 16, stride);
    }

    // w = high + low, up to 2^-16 of it
    static INLINE void split(f32v w, bf16* high, bf16* low) {
        const __m256bh near = _mm512_cvtneps_pbh((__m512)w);
        const f32v rest = w - (f32v)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)near), 16);
        const __m256bh far = _mm512_cvtneps_pbh((__m512)rest);
        memcpy(high, &near, sizeof near);
        memcpy(low, &far, sizeof far);
    }

    TileScope tiles;
    const int64_t dim;
    const bool in_place;      // 16 keys lie evenly in the cache
    const int64_t key_bytes;  // from one to the next
    int columns = 16;         // query rows of a product
    Buffer<bf16> keys_copy, values, queries;
    Buffer<float> scores;    // [16 rows][TILE], then the weights
    Buffer<bf16> high, low;  // the weights in two parts
};

}  // namespace hybrid
#endif
