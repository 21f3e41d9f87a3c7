// Norms and activation, forward and backward, and what lies between the qkv projection and attention. Rounding follows reference.py step by step.
#include <algorithm>

#include "ops.h"
#include "team.h"

namespace hybrid {

// each(i) for all rows, in pieces of so many values that it pays to hand them to another thread
template <class F>
void for_each_row(int64_t rows, int64_t row_size, const F& each) {
    for_each(rows, std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(1, row_size)), each);
}

// y = weight * (x / rms(x)); x is rounded to T after the division, as the Hugging Face modules do
template <class T>
INLINE void norm_row(const T* x, const T* weight, float eps, T* y, int64_t dim) {
    f32v squares{};
    for (int64_t d = 0; d < dim; d += WIDTH) {
        f32v v = load(x + d, dim - d);
        squares += v * v;
    }
    float scale = 1.0f / std::sqrt(sum(squares) / (float)dim + eps);
    for (int64_t d = 0; d < dim; d += WIDTH) {
        f32v v = rounded<T>(load(x + d, dim - d) * scale);
        store(y + d, load(weight + d, dim - d) * v, dim - d);
    }
}

template <class T>
void rms_norm(const T* x, const T* weight, float eps, T* y, int64_t rows, int64_t dim, int64_t x_stride) {
    for_each_row(rows, dim, [&](int64_t i) { norm_row(x + i * x_stride, weight, eps, y + i * dim, dim); });
}

template <class T>
void add_rms_norm(const T* x, const T* residual, const T* weight, float eps, T* y, T* total, int64_t rows, int64_t dim) {
    for_each_row(rows, dim, [&](int64_t i) {
        const T *a = x + i * dim, *b = residual + i * dim;
        T* s = total + i * dim;
        for (int64_t d = 0; d < dim; d += WIDTH) store(s + d, load(b + d, dim - d) + load(a + d, dim - d), dim - d);
        norm_row(s, weight, eps, y + i * dim, dim);
    });
}

template <class T>
struct GatedRows {  // row i begins at gate + i * gate_stride, and so on
    const T *gate, *up;
    int64_t rows, dim, gate_stride, up_stride;
};

template <class T>
void silu_and_mul(const GatedRows<T>& a, T* y) {
    const int64_t dim = a.dim;
    for_each_row(a.rows, dim, [&](int64_t i) {
        const T *gate = a.gate + i * a.gate_stride, *up = a.up + i * a.up_stride;
        for (int64_t d = 0; d < dim; d += WIDTH) {
            store(y + i * dim + d, gated<T>(load(gate + d, dim - d), load(up + d, dim - d)), dim - d);
        }
    });
}

// d_gate and d_up are dense [rows, dim]
template <class T>
void silu_and_mul_backward(const GatedRows<T>& a, const T* dy, T* d_gate, T* d_up) {
    const int64_t dim = a.dim;
    for_each_row(a.rows, dim, [&](int64_t i) {
        const T *gate = a.gate + i * a.gate_stride, *up = a.up + i * a.up_stride;
        for (int64_t d = 0; d < dim; d += WIDTH) {
            f32v g = load(gate + d, dim - d), u = load(up + d, dim - d), slope = load(dy + i * dim + d, dim - d);
            f32v s = 1.0f / (1.0f + exp(-g));
            store(d_up + i * dim + d, slope * rounded<T>(g * s), dim - d);
            store(d_gate + i * dim + d, slope * u * (s * (1.0f + g * (1.0f - s))), dim - d);
        }
    });
}

// d_weight is the sum of the parts, each of PART_ROWS rows: the same for any number of threads
constexpr int64_t PART_ROWS = 32;
template <class T>
void rms_norm_backward(const T* x, const T* weight, const T* dy, float eps, T* dx, float* parts, int64_t rows, int64_t dim) {
    for_each_row((rows + PART_ROWS - 1) / PART_ROWS, PART_ROWS * dim, [&](int64_t part) {
        float* d_weight = parts + part * dim;
        std::fill(d_weight, d_weight + dim, 0.0f);
        for (int64_t i = part * PART_ROWS; i < std::min(rows, (part + 1) * PART_ROWS); i++) {
            f32v squares{}, dots{};
            for (int64_t d = 0; d < dim; d += WIDTH) {
                f32v v = load(x + i * dim + d, dim - d);
                squares += v * v;
                dots += v * load(weight + d, dim - d) * load(dy + i * dim + d, dim - d);
            }
            const float scale = 1.0f / std::sqrt(sum(squares) / (float)dim + eps);
            const float along = sum(dots) / (float)dim * scale * scale * scale;
            for (int64_t d = 0; d < dim; d += WIDTH) {
                f32v v = load(x + i * dim + d, dim - d), slope = load(dy + i * dim + d, dim - d);
                store(dx + i * dim + d, slope * load(weight + d, dim - d) * scale - v * along, dim - d);
                store(d_weight + d, load(d_weight + d, dim - d) + slope * rounded<T>(v * scale), dim - d);
            }
        }
    });
}

// Rotates x [dim] in place, half-split pairing
template <class T>
INLINE void rotate(T* x, const T* cos, const T* sin, int64_t half) {
    for (int64_t d = 0; d < half; d += WIDTH) {
        int64_t n = half - d;
        f32v a = load(x + d, n), b = load(x + half + d, n), c = load(cos + d, n), s = load(sin + d, n);
        store(x + d, rounded<T>(a * c) - rounded<T>(b * s), n);
        store(x + half + d, rounded<T>(b * c) + rounded<T>(a * s), n);
    }
}

template <class T>
void enter_attention(const EnterAttention& a) {
    const int64_t dim = a.head_dim;
    auto enter = [&](const T* x, const T* norm, T* y, int64_t token) {
        if (norm)
            norm_row(x, norm, a.eps, y, dim);
        else
            memcpy(y, x, dim * sizeof(T));
        if (a.cos) {
            int64_t row = a.positions[token] * a.half;
            rotate(y, (const T*)a.cos + row, (const T*)a.sin + row, a.half);
        }
    };
    for_each_row(a.tokens, (a.num_heads + 2 * a.num_kv_heads) * dim, [&](int64_t t) {
        const T *q = (const T*)a.q + t * a.q_stride, *k = (const T*)a.k + t * a.k_stride, *v = (const T*)a.v + t * a.v_stride;
        T* q_out = (T*)a.q_out + t * a.num_heads * dim;
        T* k_out = (T*)a.k_pool + a.slots[t] * a.num_kv_heads * dim;
        T* v_out = (T*)a.v_pool + a.slots[t] * a.num_kv_heads * dim;
        for (int64_t h = 0; h < a.num_heads; h++) enter(q + h * dim, (const T*)a.q_norm, q_out + h * dim, t);
        for (int64_t h = 0; h < a.num_kv_heads; h++) enter(k + h * dim, (const T*)a.k_norm, k_out + h * dim, t);
        memcpy(v_out, v, a.num_kv_heads * dim * sizeof(T));
    });
}

}  // namespace hybrid

#define FOR_EACH_DTYPE(X) X(float, f32) X(hybrid::bf16, bf16)
#define EXPORT(T, name)                                                                                                        \
    extern "C" void rms_norm_##name(const T* x, const T* weight, float eps, T* y, int64_t rows, int64_t dim, int64_t stride) { \
        hybrid::rms_norm(x, weight, eps, y, rows, dim, stride);                                                                \
    }                                                                                                                          \
    extern "C" void add_rms_norm_##name(const T* x, const T* residual, const T* weight, float eps, T* y, T* total,             \
                                        int64_t rows, int64_t dim) {                                                           \
        hybrid::add_rms_norm(x, residual, weight, eps, y, total, rows, dim);                                                   \
    }                                                                                                                          \
    extern "C" void silu_and_mul_##name(const hybrid::GatedRows<T>* a, T* y) { hybrid::silu_and_mul(*a, y); }                  \
    extern "C" void silu_and_mul_backward_##name(const hybrid::GatedRows<T>* a, const T* dy, T* d_gate, T* d_up) {             \
        hybrid::silu_and_mul_backward(*a, dy, d_gate, d_up);                                                                   \
    }                                                                                                                          \
    extern "C" void rms_norm_backward_##name(const T* x, const T* weight, const T* dy, float eps, T* dx, float* parts,         \
                                             int64_t rows, int64_t dim) {                                                      \
        hybrid::rms_norm_backward(x, weight, dy, eps, dx, parts, rows, dim);                                                   \
    }                                                                                                                          \
    extern "C" void enter_attention_##name(const hybrid::EnterAttention* a) { hybrid::enter_attention<T>(*a); }                \
    template void hybrid::rms_norm(const T*, const T*, float, T*, int64_t, int64_t, int64_t);                                  \
    template void hybrid::add_rms_norm(const T*, const T*, const T*, float, T*, T*, int64_t, int64_t);                         \
    template void hybrid::enter_attention<T>(const EnterAttention&);
FOR_EACH_DTYPE(EXPORT)
