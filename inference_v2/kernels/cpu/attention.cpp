// Causal attention of ragged queries over a paged cache, with an online softmax in fp32 (https://arxiv.org/abs/2205.14135).
//
// A unit of work is a few consecutive query tokens of one request and one kv head. Its keys are walked in tiles of TILE keys
// at absolute positions, in splits of SPLIT keys that are merged in order: what a row computes depends on its own position
// alone, not on the batch, the chunk or the thread that computes it, and a single long request still has work for all threads.
#include <algorithm>
#include <vector>

#include "vec.h"

namespace hybrid {

constexpr int TILE = 64;     // keys
constexpr int SPLIT = 512;   // keys whose running softmax is kept on its own
constexpr int QUERIES = 16;  // query tokens that share a tile's keys and values
constexpr int HEADS = 4;     // heads of one token that are computed together
constexpr float FAR = -1e30f;  // running maximum before any key: finite, so that FAR - FAR is 0

struct Attention {
    const void *q, *k_pool, *v_pool;  // [T, num_heads, head_dim], [blocks, block_size, num_kv_heads, head_dim]
    void* out;                        // [T, num_heads, head_dim]
    const int32_t *cu_query_lens, *context_lens, *block_tables;  // [R + 1], [R], [R, table_width]
    const float* sinks;                                          // [num_heads], or null
    int64_t requests, num_heads, num_kv_heads, head_dim, block_size, table_width;
    int64_t window;  // 0: none
    float scale, softcap;  // softcap 0: none
    float* lse;            // [T, num_heads], or null: log-sum-exp of a query's scores, without the sink
};

struct Unit {
    int32_t request, kv_head, first, count, split;  // query tokens first : first + count of the request; split -1: all of them
};

// The running softmax of the heads of one query token
struct Rows {
    float *peak, *mass, *total;  // [group], [group], [group, padded head_dim]
};

template <class T>
struct Keys {
    const T* k[TILE];
    const T* v[TILE];
    int64_t first;  // absolute position of k[0]
};

// scores[h][0 : 16] of 16 keys, four at a time; DV vectors a head
template <class T, int DV, int H>
INLINE void dot_products(const T* const* keys, const float* q, int64_t padded, int64_t dim, f32x16* scores) {
    f32x16 products[H][WIDTH];
    const int64_t vectors = DV ? DV : padded / WIDTH;
    for (int i = 0; i < WIDTH; i += 4) {
        f32x16 acc[4][H] = {};
        for (int64_t d = 0; d < vectors; d++) {
            f32x16 k[4];
            for (int j = 0; j < 4; j++) k[j] = DV ? load(keys[i + j] + d * WIDTH) : load(keys[i + j] + d * WIDTH, dim - d * WIDTH);
            for (int h = 0; h < H; h++) {
                f32x16 x = load(q + h * padded + d * WIDTH);
                for (int j = 0; j < 4; j++) acc[j][h] += x * k[j];
            }
        }
        for (int h = 0; h < H; h++)
            for (int j = 0; j < 4; j++) products[h][i + j] = acc[j][h];
    }
    for (int h = 0; h < H; h++) scores[h] = sum_rows(products[h]);
}

// One tile's keys low : high (of the tile) for H heads of one query token
template <class T, int DV, int H>
void attend_tile(const Attention& a, const Keys<T>& keys, int low, int high, const float* q, int64_t padded, float* peak,
                 float* mass, float* total) {
    const int64_t dim = a.head_dim, vectors = DV ? DV : padded / WIDTH;
    float weights[H][TILE];
    for (int i = low / WIDTH * WIDTH; i < high; i += WIDTH) {
        const T* rows[WIDTH];  // a key that must not be seen is not read
        for (int j = 0; j < WIDTH; j++) rows[j] = keys.k[std::min(std::max(i + j, low), high - 1)];
        f32x16 scores[H];
        dot_products<T, DV, H>(rows, q, padded, dim, scores);
        for (int h = 0; h < H; h++) store(&weights[h][i], scores[h]);
    }
    f32x16 lanes;
    for (int j = 0; j < WIDTH; j++) lanes[j] = j;
    for (int h = 0; h < H; h++) {
        f32x16 top = splat(FAR);
        for (int i = low / WIDTH * WIDTH; i < high; i += WIDTH) {
            f32x16 s = load(&weights[h][i]) * a.scale, at = lanes + (float)i;
            if (a.softcap != 0)
                for (int j = 0; j < WIDTH; j++) s[j] = std::tanh(s[j] / a.softcap) * a.softcap;
            s = at < (float)low ? splat(-INFINITY) : s;
            s = at >= (float)high ? splat(-INFINITY) : s;
            store(&weights[h][i], s);
            top = maximum(top, s);
        }
        float old = peak[h], now = std::max(old, maximum(top));
        f32x16 sums{};
        for (int i = low / WIDTH * WIDTH; i < high; i += WIDTH) {
            f32x16 w = exp(load(&weights[h][i]) - now);
            store(&weights[h][i], w);
            sums += w;
        }
        float shrink = exp(splat(old - now))[0];
        mass[h] = mass[h] * shrink + sum(sums);
        peak[h] = now;
        if (shrink != 1.0f)
            for (int64_t d = 0; d < padded; d += WIDTH) store(total + h * padded + d, load(total + h * padded + d) * shrink);
    }
    if (DV) {
        f32x16 acc[H][DV ? DV : 1];
        for (int h = 0; h < H; h++)
            for (int d = 0; d < DV; d++) acc[h][d] = load(total + h * padded + d * WIDTH);
        for (int i = low; i < high; i++)
            for (int d = 0; d < DV; d++) {
                f32x16 v = load(keys.v[i] + d * WIDTH);
                for (int h = 0; h < H; h++) acc[h][d] += weights[h][i] * v;
            }
        for (int h = 0; h < H; h++)
            for (int d = 0; d < DV; d++) store(total + h * padded + d * WIDTH, acc[h][d]);
    } else {
        for (int i = low; i < high; i++)
            for (int64_t d = 0; d < vectors; d++) {
                f32x16 v = load(keys.v[i] + d * WIDTH, dim - d * WIDTH);
                for (int h = 0; h < H; h++) {
                    float* t = total + h * padded + d * WIDTH;
                    store(t, load(t) + weights[h][i] * v);
                }
            }
    }
}

template <class T, int DV>
void attend_heads(const Attention& a, const Keys<T>& keys, int low, int high, const float* q, int64_t padded, int64_t group,
                  const Rows& rows) {
    for (int64_t h = 0; h < group;) {
        int64_t many = std::min<int64_t>(HEADS, group - h);
        if (DV > 5) many = std::min<int64_t>(many, 2);  // accumulators must fit the registers
        const float* x = q + h * padded;
        float *peak = rows.peak + h, *mass = rows.mass + h, *total = rows.total + h * padded;
        switch (many) {
            case 1: attend_tile<T, DV, 1>(a, keys, low, high, x, padded, peak, mass, total); break;
            case 2: attend_tile<T, DV, 2>(a, keys, low, high, x, padded, peak, mass, total); break;
            case 3: attend_tile<T, DV, 3>(a, keys, low, high, x, padded, peak, mass, total); break;
            default: attend_tile<T, DV, 4>(a, keys, low, high, x, padded, peak, mass, total);
        }
        h += many;
    }
}

template <class T>
using AttendHeads = void (*)(const Attention&, const Keys<T>&, int, int, const float*, int64_t, int64_t, const Rows&);

template <class T>
AttendHeads<T> attend_heads_for(int64_t dim) {
    switch (dim) {
        case 32: return attend_heads<T, 2>;
        case 64: return attend_heads<T, 4>;
        case 80: return attend_heads<T, 5>;
        case 96: return attend_heads<T, 6>;
        case 128: return attend_heads<T, 8>;
        default: return attend_heads<T, 0>;
    }
}

// Adds the softmax of later keys (part) to that of earlier ones (rows)
INLINE void merge(const Rows& rows, const Rows& part, int64_t group, int64_t padded) {
    for (int64_t h = 0; h < group; h++) {
        float now = std::max(rows.peak[h], part.peak[h]);
        float old_share = exp(splat(rows.peak[h] - now))[0], new_share = exp(splat(part.peak[h] - now))[0];
        rows.mass[h] = rows.mass[h] * old_share + part.mass[h] * new_share;
        rows.peak[h] = now;
        for (int64_t d = h * padded; d < (h + 1) * padded; d += WIDTH)
            store(rows.total + d, load(rows.total + d) * old_share + load(part.total + d) * new_share);
    }
}

template <class T>
class Worker {
   public:
    Worker(const Attention& a)
        : a(a), group(a.num_heads / a.num_kv_heads), padded((a.head_dim + WIDTH - 1) / WIDTH * WIDTH), state(group * (2 + padded)),
          attend(attend_heads_for<T>(a.head_dim)), queries(QUERIES * group * padded), running(QUERIES * state), merged(QUERIES * state) {}

    int64_t state_size() const { return state; }

    Rows rows(float* base, int64_t i) const {
        float* at = base + i * state;
        return {at + group * padded, at + group * padded + group, at};
    }

    void clear(const Rows& r) const {
        std::fill(r.peak, r.peak + group, FAR);
        std::fill(r.mass, r.mass + group, 0.0f);
        std::fill(r.total, r.total + group * padded, 0.0f);
    }

    // All splits of the unit, merged in order, then written
    void run(const Unit& u) {
        begin(u);
        for (int i = 0; i < u.count; i++) clear(rows(merged.data(), i));
        for (int64_t s = lowest / SPLIT; s <= highest / SPLIT; s++) {
            one_split(u, s);
            for (int i = 0; i < u.count; i++)
                if (sees(u, i, s)) merge(rows(merged.data(), i), rows(running.data(), i), group, padded);
        }
        for (int i = 0; i < u.count; i++) finish(u, i, rows(merged.data(), i));
    }

    // One split of a unit of one query, left in `out` [state]
    void run_split(const Unit& u, float* out) {
        begin(u);
        one_split(u, u.split);
        std::copy(running.begin(), running.begin() + state, out);
    }

    // Merge the splits of a unit of one query from `parts` [splits, state]
    void finish_splits(const Unit& u, float* parts, int64_t first, int64_t last) {
        Rows all = rows(merged.data(), 0);
        clear(all);
        for (int64_t s = first; s <= last; s++) merge(all, rows(parts, s - first), group, padded);
        finish(u, 0, all);
    }

    int64_t position(const Unit& u, int i) const {
        int32_t r = u.request, queries = a.cu_query_lens[r + 1] - a.cu_query_lens[r];
        return a.context_lens[r] - queries + u.first + i;
    }
    int64_t first_key(int64_t position) const { return a.window ? std::max<int64_t>(0, position - a.window + 1) : 0; }

   private:
    bool sees(const Unit& u, int i, int64_t split) const {
        int64_t p = position(u, i);
        return first_key(p) < (split + 1) * SPLIT && p >= split * SPLIT;
    }

    void begin(const Unit& u) {
        lowest = first_key(position(u, 0));
        highest = position(u, u.count - 1);
        for (int i = 0; i < u.count; i++) {
            int64_t token = a.cu_query_lens[u.request] + u.first + i;
            for (int64_t h = 0; h < group; h++) {
                const T* q = (const T*)a.q + (token * a.num_heads + u.kv_head * group + h) * a.head_dim;
                float* x = queries.data() + (i * group + h) * padded;
                for (int64_t d = 0; d < padded; d += WIDTH) store(x + d, load(q + d, a.head_dim - d));
            }
        }
    }

    void one_split(const Unit& u, int64_t split) {
        for (int i = 0; i < u.count; i++) clear(rows(running.data(), i));
        int64_t begin = std::max(lowest / TILE * TILE, split * SPLIT), end = std::min(highest + 1, (split + 1) * SPLIT);
        const int32_t* table = a.block_tables + u.request * a.table_width;
        for (int64_t first = begin; first < end; first += TILE) {
            keys.first = first;
            int count = std::min<int64_t>(TILE, end - first);
            for (int j = 0; j < count; j++) {
                int64_t at = first + j, slot = (int64_t)table[at / a.block_size] * a.block_size + at % a.block_size;
                keys.k[j] = (const T*)a.k_pool + (slot * a.num_kv_heads + u.kv_head) * a.head_dim;
                keys.v[j] = (const T*)a.v_pool + (slot * a.num_kv_heads + u.kv_head) * a.head_dim;
            }
            for (int i = 0; i < u.count; i++) {
                int64_t p = position(u, i);
                int low = std::max<int64_t>(0, first_key(p) - first), high = std::min<int64_t>(count, p + 1 - first);
                if (low < high) attend(a, keys, low, high, queries.data() + i * group * padded, padded, group, rows(running.data(), i));
            }
        }
    }

    void finish(const Unit& u, int i, const Rows& r) {
        int64_t token = a.cu_query_lens[u.request] + u.first + i;
        for (int64_t h = 0; h < group; h++) {
            int64_t head = u.kv_head * group + h;
            float share = 1.0f, mass = r.mass[h];
            if (a.lse) a.lse[token * a.num_heads + head] = r.peak[h] + std::log(mass);
            if (a.sinks) {
                float now = std::max(r.peak[h], a.sinks[head]);
                share = exp(splat(r.peak[h] - now))[0];
                mass = mass * share + exp(splat(a.sinks[head] - now))[0];
            }
            T* out = (T*)a.out + (token * a.num_heads + head) * a.head_dim;
            for (int64_t d = 0; d < padded; d += WIDTH)
                store(out + d, load(r.total + h * padded + d) * share / mass, a.head_dim - d);
        }
    }

    const Attention& a;
    int64_t group, padded, state;
    AttendHeads<T> attend;
    std::vector<float> queries, running, merged;
    Keys<T> keys;
    int64_t lowest = 0, highest = 0;
};

template <class T>
void paged_attention(const Attention& a, int threads) {
    std::vector<Unit> units;
    for (int32_t r = 0; r < a.requests; r++)
        for (int32_t h = 0; h < a.num_kv_heads; h++)
            for (int32_t first = 0, n = a.cu_query_lens[r + 1] - a.cu_query_lens[r]; first < n; first += QUERIES)
                units.push_back({r, h, first, std::min(QUERIES, n - first), -1});
    bool spread = (int64_t)units.size() < 4 * threads && threads > 1;  // few decodes: give each thread splits of them
    for (const Unit& u : units) spread = spread && u.count == 1;
    if (!spread) {
#pragma omp parallel if (units.size() > 1)
        {
            Worker<T> worker(a);
#pragma omp for schedule(dynamic, 1)
            for (size_t i = 0; i < units.size(); i++) worker.run(units[i]);
        }
        return;
    }
    Worker<T> planner(a);
    std::vector<Unit> parts;
    std::vector<int64_t> starts, firsts;
    for (const Unit& u : units) {
        int64_t p = planner.position(u, 0), first = planner.first_key(p) / SPLIT;
        starts.push_back(parts.size());
        firsts.push_back(first);
        for (int64_t s = first; s <= p / SPLIT; s++) parts.push_back({u.request, u.kv_head, u.first, 1, (int32_t)s});
    }
    starts.push_back(parts.size());
    const int64_t state = planner.state_size();
    std::vector<float> found(parts.size() * state);
#pragma omp parallel
    {
        Worker<T> worker(a);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < parts.size(); i++) worker.run_split(parts[i], found.data() + i * state);
#pragma omp for schedule(static)
        for (size_t i = 0; i < units.size(); i++)
            worker.finish_splits(units[i], found.data() + starts[i] * state, firsts[i], firsts[i] + starts[i + 1] - starts[i] - 1);
    }
}

}  // namespace hybrid

extern "C" void paged_attention_f32(const hybrid::Attention* a, int threads) { hybrid::paged_attention<float>(*a, threads); }
extern "C" void paged_attention_bf16(const hybrid::Attention* a, int threads) { hybrid::paged_attention<hybrid::bf16>(*a, threads); }
