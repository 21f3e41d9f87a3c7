// Causal attention of ragged queries over a paged cache, with an online softmax in fp32 (https://arxiv.org/abs/2205.14135).
//
// A unit of work is a few consecutive query tokens of one request and one kv head. Its keys are walked in tiles of TILE keys
// at absolute positions, in splits of SPLIT keys that are merged in order: what a row computes depends on its own position
// alone, not on the batch, the chunk or the thread that computes it, and a single long request still has work for all threads.
#include "attention.h"

#include <memory>
#include <type_traits>

#include "attention_amx.h"
#include "team.h"

namespace hybrid {

constexpr int SPLIT = 512;   // keys whose running softmax is kept on its own
constexpr int QUERIES = 32;  // query tokens that share a tile's keys and values, at most TILE

struct Unit {
    int32_t request, kv_head, first, count, split;  // query tokens first : first + count of the request; split -1: all of them
};

template <class T>
class Worker {
   public:
    // For units of at most `most` query tokens
    Worker(const Attention& a, int most)
        : a(a), group(a.num_heads / a.num_kv_heads), padded((a.head_dim + WIDTH - 1) / WIDTH * WIDTH),
          vector_tile(attend_rows_for<T>(a.head_dim)), queries(most * group * padded), running(most * group + 15, padded),
          merged(most * group, padded) {
#if defined(__AMX_BF16__)
        if (std::is_same<T, bf16>::value && AmxTile::serves(a.head_dim)) {
            amx.reset(new AmxTile(a.head_dim, most * group));
        }
#endif
    }

    int64_t state_size() const { return group * (padded + 2); }

    // All splits of the unit, merged in order, then written
    void run(const Unit& u) {
        begin(u);
        merged.clear(u.count * group, padded);
        for (int64_t s = lowest / SPLIT; s <= highest / SPLIT; s++) {
            one_split(u, s);
            for (int i = 0; i < u.count; i++)
                if (sees(u, i, s)) merge(i * group, running.total.data(), running.peak.data(), running.mass.data(), i * group);
        }
        for (int i = 0; i < u.count; i++) finish(u, i);
    }

    // One split of a unit of one query, left in `out` [group x (total, peak, mass)]
    void run_split(const Unit& u, float* out) {
        begin(u);
        one_split(u, u.split);
        out = std::copy(running.total.begin(), running.total.begin() + group * padded, out);
        out = std::copy(running.peak.begin(), running.peak.begin() + group, out);
        std::copy(running.mass.begin(), running.mass.begin() + group, out);
    }

    // Merge the splits of a unit of one query from `parts` [splits, state]
    void finish_splits(const Unit& u, const float* parts, int64_t splits) {
        merged.clear(group, padded);
        for (int64_t s = 0; s < splits; s++, parts += state_size())
            merge(0, parts, parts + group * padded, parts + group * (padded + 1), 0);
        finish(u, 0);
    }

    int64_t position(const Unit& u, int i) const {
        int32_t r = u.request, count = a.cu_query_lens[r + 1] - a.cu_query_lens[r];
        return a.context_lens[r] - count + u.first + i;
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
                std::copy(q, q + a.head_dim, queries.data() + (i * group + h) * padded);
            }
        }
#if defined(__AMX_BF16__)
        if constexpr (std::is_same<T, bf16>::value)
            if (amx) amx->take_queries(queries.data(), padded, u.count * group);
#endif
    }

    // Where the keys and values first : first + count are, on their way to the cache
    void locate(const Unit& u, int64_t first, int count, Keys<T>& found) const {
        const int32_t* table = a.block_tables + u.request * a.table_width;
        const int64_t row = a.num_kv_heads * a.head_dim, bytes = a.head_dim * sizeof(T);
        int64_t block = first / a.block_size, offset = first % a.block_size;
        for (int j = 0; j < count; block++, offset = 0) {
            const int64_t at = (table[block] * a.block_size + offset) * row + u.kv_head * a.head_dim;
            const int many = std::min<int64_t>(count - j, a.block_size - offset);
            for (int i = 0; i < many; i++, j++) {
                found.k[j] = (const T*)a.k_pool + at + i * row;
                found.v[j] = (const T*)a.v_pool + at + i * row;
                for (int64_t line = 0; line < bytes; line += 64) {
                    __builtin_prefetch((const char*)found.k[j] + line);
                    __builtin_prefetch((const char*)found.v[j] + line);
                }
            }
        }
        for (int i = 0; i < u.count; i++) {
            int64_t p = position(u, i);
            found.low[i] = std::min<int64_t>(TILE, std::max<int64_t>(0, first_key(p) - first));
            found.high[i] = std::max<int64_t>(0, std::min<int64_t>(count, p + 1 - first));
        }
    }

    void one_split(const Unit& u, int64_t split) {
        running.clear(u.count * group, padded);
        int64_t begin = std::max(lowest / TILE * TILE, split * SPLIT), end = std::min(highest + 1, (split + 1) * SPLIT);
        auto count = [&](int64_t first) { return (int)std::max<int64_t>(0, std::min<int64_t>(TILE, end - first)); };
        locate(u, begin, count(begin), keys[0]);
        for (int64_t first = begin, turn = 0; first < end; first += TILE, turn = 1 - turn) {
            locate(u, first + TILE, count(first + TILE), keys[1 - turn]);
            if (!attend_amx(u, keys[turn])) vector_tile(a, keys[turn], u.count, queries.data(), padded, group, running);
        }
    }

    bool attend_amx(const Unit& u, const Keys<T>& tile) {
#if defined(__AMX_BF16__)
        if constexpr (std::is_same<T, bf16>::value) {
            if (!amx || a.cu_query_lens[u.request + 1] - a.cu_query_lens[u.request] < a.tiles_from) return false;
            int first = TILE, last = 0;  // keys that any row sees
            for (int i = 0; i < u.count; i++)
                if (tile.low[i] < tile.high[i]) first = std::min(first, tile.low[i]), last = std::max(last, tile.high[i]);
            if (!amx->take(tile, first, last)) return false;
            const int64_t rows = u.count * group;
            for (int64_t row = 0; row < rows; row += 16)
                amx->attend(a, tile, last, row, std::min<int64_t>(16, rows - row), group, padded, running);
            return true;
        }
#endif
        (void)u, (void)tile;
        return false;
    }

    // Adds the softmax of later keys, a token's `group` rows from `from` on, to that of earlier ones in rows `row` on
    void merge(int64_t row, const float* total, const float* peak, const float* mass, int64_t from) {
        for (int64_t h = 0; h < group; h++) {
            const int64_t r = row + h, s = from + h;
            const float now = std::max(merged.peak[r], peak[s]);
            const float old_share = exp(splat(merged.peak[r] - now))[0], new_share = exp(splat(peak[s] - now))[0];
            merged.mass[r] = merged.mass[r] * old_share + mass[s] * new_share;
            merged.peak[r] = now;
            float* t = merged.total.data() + r * padded;
            for (int64_t d = 0; d < padded; d += WIDTH) store(t + d, load(t + d) * old_share + load(total + s * padded + d) * new_share);
        }
    }

    void finish(const Unit& u, int i) {
        const int64_t token = a.cu_query_lens[u.request] + u.first + i;
        for (int64_t h = 0; h < group; h++) {
            const int64_t head = u.kv_head * group + h, r = i * group + h;
            float share = 1.0f, mass = merged.mass[r];
            if (a.lse) a.lse[token * a.num_heads + head] = merged.peak[r] + std::log(mass);
            if (a.sinks) {
                float now = std::max(merged.peak[r], a.sinks[head]);
                share = exp(splat(merged.peak[r] - now))[0];
                mass = mass * share + exp(splat(a.sinks[head] - now))[0];
            }
            T* out = (T*)a.out + (token * a.num_heads + head) * a.head_dim;
            const float* total = merged.total.data() + r * padded;
            for (int64_t d = 0; d < padded; d += WIDTH) store(out + d, load(total + d) * share / mass, a.head_dim - d);
        }
    }

    const Attention& a;
    const int64_t group, padded;
    const AttendRows<T> vector_tile;
    std::vector<T> queries;  // [rows, padded]
    Softmax running, merged;
    Keys<T> keys[2];  // of this tile and the next
    int64_t lowest = 0, highest = 0;
#if defined(__AMX_BF16__)
    std::unique_ptr<AmxTile> amx;
#endif
};

template <class T>
void paged_attention(const Attention& a) {
    const int threads = team_size();
    std::vector<Unit> units;  // samples of one prompt, which share its keys, come one behind the other
    for (int32_t h = 0; h < a.num_kv_heads; h++)
        for (int32_t r = 0; r < a.requests; r++)
            for (int32_t first = 0, n = a.cu_query_lens[r + 1] - a.cu_query_lens[r]; first < n; first += QUERIES)
                units.push_back({r, h, first, std::min(QUERIES, n - first), -1});
    int most = 1;
    for (const Unit& u : units) most = std::max(most, u.count);
    if (most > 1 || threads == 1 || (int64_t)units.size() >= 4 * threads) {
        const int many = most == 1 && (int64_t)units.size() >= 32 * threads ? 4 : 1;
        in_parallel(units.size(), many, [&](Pieces& pieces) {
            Worker<T> worker(a, most);
            for (int64_t i, end; pieces.next(i, end);)
                for (; i < end; i++) worker.run(units[i]);
        });
        return;
    }
    // Few decodes: threads share the splits of each
    Worker<T> planner(a, 1);
    std::vector<Unit> parts;
    std::vector<int64_t> starts;
    for (const Unit& u : units) {
        int64_t p = planner.position(u, 0);
        starts.push_back(parts.size());
        for (int64_t s = planner.first_key(p) / SPLIT; s <= p / SPLIT; s++)
            parts.push_back({u.request, u.kv_head, u.first, 1, (int32_t)s});
    }
    starts.push_back(parts.size());
    const int64_t state = planner.state_size();
    std::vector<float> found(parts.size() * state);
    in_parallel(parts.size(), 1, [&](Pieces& pieces) {
        Worker<T> worker(a, 1);
        for (int64_t i, end; pieces.next(i, end);) worker.run_split(parts[i], found.data() + i * state);
    });
    for (size_t i = 0; i < units.size(); i++)
        planner.finish_splits(units[i], found.data() + starts[i] * state, starts[i + 1] - starts[i]);
}

}  // namespace hybrid

extern "C" void paged_attention_f32(const hybrid::Attention* a) { hybrid::paged_attention<float>(*a); }
extern "C" void paged_attention_bf16(const hybrid::Attention* a) { hybrid::paged_attention<hybrid::bf16>(*a); }
