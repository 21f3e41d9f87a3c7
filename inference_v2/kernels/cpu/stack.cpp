// All layers of a decoder in one call, of the kernels that Python would call one by one: at a few rows the way through Python takes
// longer than the work between two products. models/decoder.py says the same in a few lines.
#include <algorithm>

#include "ops.h"
#include "team.h"

namespace hybrid {

struct Layer {
    const void *qkv, *o, *gate_up, *down;                      // packed
    const void *qkv_bias, *o_bias, *gate_up_bias, *down_bias;  // or null, as all norms
    const void *pre_attention_norm, *post_attention_norm, *pre_mlp_norm, *post_mlp_norm, *q_norm, *k_norm;
    int64_t group, window, rope;  // of the step's groups; 0: none; whether it rotates
};

struct Group {
    const int64_t* slots;
    const int32_t* block_tables;
    int64_t table_width;
};

struct Stack {
    const Layer* layers;
    const Group* groups;
    void* const* pools;  // keys and values of each layer
    const int64_t* positions;
    const int32_t *cu_query_lens, *context_lens;
    const void *cos, *sin;
    void *residual, *branch;  // [tokens, hidden], written: what comes in, with all but the last branch added; the last branch
    void* scratch;            // [tokens, hidden + (3 num_heads + 2 num_kv_heads) head_dim + intermediate]
    int64_t num_layers, tokens, requests, hidden, intermediate, num_heads, num_kv_heads, head_dim, half, block_size;
    float eps, scale;
};

template <class T>
class StackRun {
   public:
    explicit StackRun(const Stack& a) : a(a), residual((T*)a.residual), branch((T*)a.branch) {
        T* at = (T*)a.scratch;
        auto take = [&](int64_t size) { return at += a.tokens * size, at - a.tokens * size; };
        normed = take(a.hidden);
        qkv = take((a.num_heads + 2 * a.num_kv_heads) * a.head_dim);
        q = take(a.num_heads * a.head_dim);
        seen = take(a.num_heads * a.head_dim);
        active = take(a.intermediate);
    }

    void layer(int64_t i) {
        const Layer& w = a.layers[i];
        const Group& g = a.groups[w.group];
        void *keys = a.pools[2 * i], *values = a.pools[2 * i + 1];
        const int64_t attended = a.num_heads * a.head_dim, kv = a.num_kv_heads * a.head_dim, row = attended + 2 * kv;
        const T* x = enter((const T*)w.pre_attention_norm, i > 0);
        linear(product(x, w.qkv, w.qkv_bias, qkv, a.hidden, row));
        enter_attention<T>({qkv, qkv + attended, qkv + attended + kv, q, keys, values, g.slots, a.positions, w.rope ? a.cos : nullptr,
                            a.sin, w.q_norm, w.k_norm, a.tokens, a.num_heads, a.num_kv_heads, a.head_dim, a.half, row, row, row, a.eps});
        paged_attention<T>({q, keys, values, seen, a.cu_query_lens, a.context_lens, g.block_tables, nullptr, a.requests, a.num_heads,
                            a.num_kv_heads, a.head_dim, a.block_size, g.table_width, w.window, a.scale, 0.0f, nullptr});
        linear(product(seen, w.o, w.o_bias, branch, attended, a.hidden));
        leave((const T*)w.post_attention_norm);
        x = enter((const T*)w.pre_mlp_norm, true);
        gated_linear(product(x, w.gate_up, w.gate_up_bias, active, a.hidden, 2 * a.intermediate));
        linear(product(active, w.down, w.down_bias, branch, a.intermediate, a.hidden));
        leave((const T*)w.post_mlp_norm);
    }

   private:
    Linear<T> product(const T* x, const void* packed, const void* bias, T* y, int64_t in, int64_t out) const {
        return {x, (const T*)packed, (const T*)bias, y, a.tokens, in, out, in, out, false};
    }

    // The residual with the last branch added, normed: the input of the next branch
    const T* enter(const T* norm, bool add) {
        if (add && norm) {
            add_rms_norm(branch, residual, norm, a.eps, normed, residual, a.tokens, a.hidden);
        } else if (add) {
            for_each(a.tokens, std::max<int64_t>(1, (1 << 14) / a.hidden), [&](int64_t i) {
                T *r = residual + i * a.hidden, *b = branch + i * a.hidden;
                for (int64_t d = 0; d < a.hidden; d += WIDTH)
                    store(r + d, load(r + d, a.hidden - d) + load(b + d, a.hidden - d), a.hidden - d);
            });
        } else if (norm) {
            rms_norm(residual, norm, a.eps, normed, a.tokens, a.hidden, a.hidden);
        }
        return norm ? normed : residual;
    }

    void leave(const T* norm) {
        if (norm) rms_norm(branch, norm, a.eps, branch, a.tokens, a.hidden, a.hidden);
    }

    const Stack& a;
    T *residual, *branch, *normed, *qkv, *q, *seen, *active;
};

template <class T>
void run_stack(const Stack& a) {
    StackRun<T> run(a);
    for (int64_t i = 0; i < a.num_layers; i++) run.layer(i);
}

}  // namespace hybrid

extern "C" void stack_f32(const hybrid::Stack* a) { hybrid::run_stack<float>(*a); }
extern "C" void stack_bf16(const hybrid::Stack* a) { hybrid::run_stack<hybrid::bf16>(*a); }
