// What the kernels are called with, from Python and from one another. T is float or bf16; pointers of `void` are to T.
#pragma once
#include <cstdint>

#include "vec.h"

namespace hybrid {

template <class T>
struct Linear {
    const T *x, *packed, *bias;  // [rows, in] rows x_stride apart; see `pack`; [out] or null
    void* y;                     // [rows, out] of T, or fp32, rows y_stride apart
    int64_t rows, in, out, x_stride, y_stride;
    int32_t y_is_float;
};

struct EnterAttention {
    const void *q, *k, *v;             // [T, heads, head_dim], rows `*_stride` apart
    void *q_out, *k_pool, *v_pool;     // [T, num_heads, head_dim], [slots, num_kv_heads, head_dim]
    const int64_t *slots, *positions;  // [T]
    const void *cos, *sin;             // [P, half], or null
    const void *q_norm, *k_norm;       // [head_dim], or null
    int64_t tokens, num_heads, num_kv_heads, head_dim, half, q_stride, k_stride, v_stride;
    float eps;
};

struct Attention {
    const void *q, *k_pool, *v_pool;  // [T, num_heads, head_dim], [blocks, block_size, num_kv_heads, head_dim]
    void* out;                        // [T, num_heads, head_dim]
    const int32_t *cu_query_lens, *context_lens, *block_tables;  // [R + 1], [R], [R, table_width]
    const float* sinks;                                          // [num_heads], or null
    int64_t requests, num_heads, num_kv_heads, head_dim, block_size, table_width;
    int64_t window;        // 0: none
    float scale, softcap;  // softcap 0: none
    float* lse;            // [T, num_heads], or null: log-sum-exp of a query's scores, without the sink
};

template <class T>
void linear(const Linear<T>& a);
// silu(gate) * up -> y [rows, out / 2], of rows that are packed as gate | up: what silu_and_mul makes of the product, with the
// same rounding. out / 2 is a multiple of 32
template <class T>
void gated_linear(const Linear<T>& a);
template <class T>
void rms_norm(const T* x, const T* weight, float eps, T* y, int64_t rows, int64_t dim, int64_t x_stride);
template <class T>
void add_rms_norm(const T* x, const T* residual, const T* weight, float eps, T* y, T* total, int64_t rows, int64_t dim);
template <class T>
void enter_attention(const EnterAttention& a);
template <class T>
void paged_attention(const Attention& a);

// silu(gate) * up, rounded as two operations
template <class T>
INLINE f32v gated(f32v gate, f32v up) {
    return rounded<T>(gate / (1.0f + exp(-gate))) * up;
}

}  // namespace hybrid
