// Backward of causal attention over packed sequences (https://arxiv.org/abs/2307.08691, section 3.1): the weights are made again
// from q, k and the forward's log-sum-exp, tile by tile, and everything is summed in fp32.
//
// A unit of work is one sequence and one kv head. It walks its tiles in one order and writes only its own rows and heads, so the
// result's bits do not depend on the number of threads. Tiles that no query sees (later keys, keys behind the window) are not
// touched. The forward is `paged_attention` itself, which reads the packed keys as blocks of one token.
#include <algorithm>
#include <vector>

#include "team.h"
#include "vec.h"

namespace hybrid {

constexpr int64_t QUERY_TILE = 64, KEY_TILE = 64;

struct VarlenBackward {
    const void *q, *k, *v, *out, *d_out;  // [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]
    const float* lse;                     // [T, num_heads]
    void *dq, *dk, *dv;                   // as q, k, v
    const int32_t* cu_seqlens;            // [sequences + 1]
    int64_t sequences, num_heads, num_kv_heads, head_dim;
    int64_t window;         // 0: none
    float scale, softcap;  // softcap 0: none
};

// c[M, WIDTH V] += a b over `depth` terms: a(m, i) = a[m * row + i * step], b(i, n) = b[i * ldb + n]
template <int M, int V>
INLINE void multiply_block(const float* a, int64_t row, int64_t step, const float* b, int64_t ldb, int64_t depth, float* c, int64_t ldc) {
    f32v acc[M][V];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < V; n++) acc[m][n] = load(c + m * ldc + n * WIDTH);
    for (int64_t i = 0; i < depth; i++) {
        f32v right[V];
        for (int n = 0; n < V; n++) right[n] = load(b + i * ldb + n * WIDTH);
        for (int m = 0; m < M; m++) {
            const float left = a[m * row + i * step];
            for (int n = 0; n < V; n++) acc[m][n] += left * right[n];
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < V; n++) store(c + m * ldc + n * WIDTH, acc[m][n]);
}

template <int V>
void multiply_columns(const float* a, int64_t row, int64_t step, const float* b, int64_t ldb, int64_t rows, int64_t depth, float* c,
                      int64_t ldc) {
    int64_t m = 0;
    for (; m + 4 <= rows; m += 4) multiply_block<4, V>(a + m * row, row, step, b, ldb, depth, c + m * ldc, ldc);
    for (; m < rows; m++) multiply_block<1, V>(a + m * row, row, step, b, ldb, depth, c + m * ldc, ldc);
}

// The same for any number of rows, and of columns that is a multiple of WIDTH
void multiply(const float* a, int64_t row, int64_t step, const float* b, int64_t ldb, int64_t rows, int64_t columns, int64_t depth,
              float* c, int64_t ldc) {
    int64_t n = 0;
    for (; n + 4 * WIDTH <= columns; n += 4 * WIDTH) multiply_columns<4>(a, row, step, b + n, ldb, rows, depth, c + n, ldc);
    if (columns - n >= 2 * WIDTH) {
        multiply_columns<2>(a, row, step, b + n, ldb, rows, depth, c + n, ldc);
        n += 2 * WIDTH;
    }
    if (n < columns) multiply_columns<1>(a, row, step, b + n, ldb, rows, depth, c + n, ldc);
}

template <class T>
class BackwardWorker {
   public:
    BackwardWorker(const VarlenBackward& a)
        : a(a), group(a.num_heads / a.num_kv_heads), dim(a.head_dim), padded((dim + WIDTH - 1) / WIDTH * WIDTH),
          k(KEY_TILE * padded), k_columns(padded * KEY_TILE), v_columns(padded * KEY_TILE), q(QUERY_TILE * padded),
          d_out(QUERY_TILE * padded), weights(QUERY_TILE * KEY_TILE), d_scores(QUERY_TILE * KEY_TILE), dk(KEY_TILE * padded),
          dv(KEY_TILE * padded) {}

    void run(int64_t sequence, int64_t kv_head) {
        start = a.cu_seqlens[sequence];
        length = a.cu_seqlens[sequence + 1] - start;
        head = kv_head;
        dq.assign(length * group * padded, 0.0f);
        sum_rows_of_out();
        for (int64_t first = 0; first < length; first += KEY_TILE) one_key_tile(first, std::min(KEY_TILE, length - first));
        for (int64_t h = 0; h < group; h++)
            for (int64_t i = 0; i < length; i++) write((T*)a.dq + query_offset(i, h), dq.data() + (h * length + i) * padded);
    }

   private:
    int64_t query_offset(int64_t i, int64_t h) const { return ((start + i) * a.num_heads + head * group + h) * dim; }
    int64_t key_offset(int64_t j) const { return ((start + j) * a.num_kv_heads + head) * dim; }

    void read(const void* base, int64_t offset, float* row) const {
        for (int64_t d = 0; d < padded; d += WIDTH) store(row + d, load((const T*)base + offset + d, dim - d));
    }
    void write(T* to, const float* row) const {
        for (int64_t d = 0; d < padded; d += WIDTH) store(to + d, load(row + d), dim - d);
    }

    // For each query the inner product of its output and that output's gradient: what softmax's backward subtracts
    void sum_rows_of_out() {
        delta.resize(group * length);
        for (int64_t h = 0; h < group; h++)
            for (int64_t i = 0; i < length; i++) {
                const T *o = (const T*)a.out + query_offset(i, h), *g = (const T*)a.d_out + query_offset(i, h);
                f32v products{};
                for (int64_t d = 0; d < padded; d += WIDTH) products += load(o + d, dim - d) * load(g + d, dim - d);
                delta[h * length + i] = sum(products);
            }
    }

    void one_key_tile(int64_t first, int64_t keys) {
        const int64_t columns = (keys + WIDTH - 1) / WIDTH * WIDTH;
        std::fill(k_columns.begin(), k_columns.end(), 0.0f);
        std::fill(v_columns.begin(), v_columns.end(), 0.0f);
        std::fill(dk.begin(), dk.end(), 0.0f);
        std::fill(dv.begin(), dv.end(), 0.0f);
        std::vector<float>& row = q;  // free until the queries are read
        for (int64_t j = 0; j < keys; j++) {
            read(a.k, key_offset(first + j), k.data() + j * padded);
            read(a.v, key_offset(first + j), row.data());
            for (int64_t d = 0; d < padded; d++) {
                k_columns[d * KEY_TILE + j] = k[j * padded + d];
                v_columns[d * KEY_TILE + j] = row[d];
            }
        }
        const int64_t end = a.window ? std::min(length, first + keys - 1 + a.window) : length;  // behind the last query that sees one
        for (int64_t h = 0; h < group; h++)
            for (int64_t i = first; i < end; i += QUERY_TILE) {
                const int64_t queries = std::min(QUERY_TILE, end - i);
                one_tile(h, i, queries, first, keys, columns);
            }
        for (int64_t j = 0; j < keys; j++) {
            write((T*)a.dk + key_offset(first + j), dk.data() + j * padded);
            write((T*)a.dv + key_offset(first + j), dv.data() + j * padded);
        }
    }

    void one_tile(int64_t h, int64_t i, int64_t queries, int64_t first, int64_t keys, int64_t columns) {
        for (int64_t m = 0; m < queries; m++) {
            read(a.q, query_offset(i + m, h), q.data() + m * padded);
            read(a.d_out, query_offset(i + m, h), d_out.data() + m * padded);
        }
        std::fill(weights.begin(), weights.end(), 0.0f);
        std::fill(d_scores.begin(), d_scores.end(), 0.0f);
        multiply(q.data(), padded, 1, k_columns.data(), KEY_TILE, queries, columns, padded, weights.data(), KEY_TILE);
        multiply(d_out.data(), padded, 1, v_columns.data(), KEY_TILE, queries, columns, padded, d_scores.data(), KEY_TILE);
        for (int64_t m = 0; m < queries; m++) softmax_backward(h, i + m, m, first, keys, columns);
        multiply(weights.data(), 1, KEY_TILE, d_out.data(), padded, keys, padded, queries, dv.data(), padded);
        multiply(d_scores.data(), 1, KEY_TILE, q.data(), padded, keys, padded, queries, dk.data(), padded);
        multiply(d_scores.data(), KEY_TILE, 1, k.data(), padded, queries, padded, keys, dq.data() + (h * length + i) * padded, padded);
    }

    // Row m of the tile, query `at` of the sequence: products become weights, gradients of weights those of products
    void softmax_backward(int64_t h, int64_t at, int64_t m, int64_t first, int64_t keys, int64_t columns) {
        const float lse = a.lse[(start + at) * a.num_heads + head * group + h], minus = delta[h * length + at];
        const float low = a.window ? std::max<int64_t>(0, at - a.window + 1 - first) : 0, high = std::min(keys, at + 1 - first);
        f32v lanes;
        for (int j = 0; j < WIDTH; j++) lanes[j] = j;
        for (int64_t j = 0; j < columns; j += WIDTH) {
            float *weight = &weights[m * KEY_TILE + j], *d_score = &d_scores[m * KEY_TILE + j];
            f32v s = load(weight) * a.scale, slope = splat(a.scale), number = lanes + (float)j;
            if (a.softcap != 0) {
                f32v t;
                for (int l = 0; l < WIDTH; l++) t[l] = std::tanh(s[l] / a.softcap);
                s = t * a.softcap;
                slope *= 1.0f - t * t;
            }
            f32v p = exp(s - lse), d = p * (load(d_score) - minus) * slope;
            for (f32v* x : {&p, &d}) {  // chosen, not multiplied: e^x of an unseen score may be infinite
                *x = number < low ? splat(0.0f) : *x;
                *x = number >= high ? splat(0.0f) : *x;
            }
            store(weight, p);
            store(d_score, d);
        }
    }

    const VarlenBackward& a;
    const int64_t group, dim, padded;
    int64_t start = 0, length = 0, head = 0;
    std::vector<float> k, k_columns, v_columns;  // one tile of keys: [keys, padded], and transposed
    std::vector<float> q, d_out;                 // one tile of queries of one head: [queries, padded]
    std::vector<float> weights, d_scores;        // [queries, keys]
    std::vector<float> dk, dv;                   // [keys, padded]
    std::vector<float> dq, delta;                // of the whole sequence: [group, length, padded], [group, length]
};

template <class T>
void varlen_backward(const VarlenBackward& a) {
    std::vector<std::pair<int64_t, int64_t>> units;  // (-length, sequence and kv head): the longest first
    for (int64_t s = 0; s < a.sequences; s++)
        for (int64_t h = 0; h < a.num_kv_heads; h++)
            units.push_back({a.cu_seqlens[s] - a.cu_seqlens[s + 1], s * a.num_kv_heads + h});
    std::sort(units.begin(), units.end());
    in_parallel(units.size(), 1, [&](Pieces& pieces) {
        BackwardWorker<T> worker(a);
        for (int64_t i, end; pieces.next(i, end);) worker.run(units[i].second / a.num_kv_heads, units[i].second % a.num_kv_heads);
    });
}

}  // namespace hybrid

extern "C" void varlen_backward_f32(const hybrid::VarlenBackward* a) { hybrid::varlen_backward<float>(*a); }
extern "C" void varlen_backward_bf16(const hybrid::VarlenBackward* a) { hybrid::varlen_backward<hybrid::bf16>(*a); }
