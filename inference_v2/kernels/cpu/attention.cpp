// Causal attention of ragged queries over a paged cache, with an online softmax in fp32 (https://arxiv.org/abs/2205.14135).
//
// A unit of work is one kv head of a few query tokens: consecutive ones of a request, or the newest ones of several requests
// whose tables begin with the same blocks (samples of a prompt), which then read those keys once. Keys are walked in tiles of
// TILE keys at absolute positions, in splits of SPLIT keys that are merged in order: what a row computes depends on its own
// position alone, not on the batch, the unit, the chunk or the thread, and a single long request still has work for all threads.
#include "attention.h"

#include <memory>
#include <type_traits>

#include "attention_amx.h"
#include "team.h"

namespace hybrid {

constexpr int SPLIT = 512;   // keys whose running softmax is kept on its own
constexpr int QUERIES = 32;  // query tokens that share a tile's keys and values, at most TILE

struct Unit {
    int32_t request, kv_head;
    int32_t requests;      // more than 1: the only query token of each of these requests
    int32_t first, count;  // query tokens first : first + count of the request, or one of each
    int64_t shared;        // keys that several requests have in common, in whole tiles
    int32_t split;         // -1: all of them
};

// Keys begin : end in the table of token `first`, for tokens first : last of a unit
struct Walk {
    int first, last;
    int64_t begin, end;
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
        if (std::is_same<T, bf16>::value && AmxTile::serves(a.head_dim)) amx.reset(new AmxTile(a, most * group));
#endif
    }

    int64_t state_size() const { return group * (padded + 2); }

    // All splits of the unit, merged in order, then written
    void run(const Unit& u) {
        begin(u);
        if (lowest / SPLIT == highest / SPLIT) {
            one_split(u, lowest / SPLIT);
            for (int i = 0; i < u.count; i++) finish(u, i, running);
            return;
        }
        merged.clear(u.count * group, padded);
        for (int64_t s = lowest / SPLIT; s <= highest / SPLIT; s++) {
            one_split(u, s);
            for (int i = 0; i < u.count; i++)
                if (sees(u, i, s)) merge(i * group, running.total.data(), running.peak.data(), running.mass.data(), i * group);
        }
        for (int i = 0; i < u.count; i++) finish(u, i, merged);
    }

    // One split of a unit of one query, left in `out` [group x (total, peak, mass)]
    void run_split(const Unit& u, float* out) {
        begin(u);
        one_split(u, u.split);
        out = std::copy(running.total.data(), running.total.data() + group * padded, out);
        out = std::copy(running.peak.data(), running.peak.data() + group, out);
        std::copy(running.mass.data(), running.mass.data() + group, out);
    }

    // Merge the splits of a unit of one query from `parts` [splits, state]
    void finish_splits(const Unit& u, const float* parts, int64_t splits) {
        merged.clear(group, padded);
        for (int64_t s = 0; s < splits; s++, parts += state_size())
            merge(0, parts, parts + group * padded, parts + group * (padded + 1), 0);
        finish(u, 0, merged);
    }

    int64_t position(const Unit& u, int i) const {
        const int32_t r = request(u, i), count = a.cu_query_lens[r + 1] - a.cu_query_lens[r];
        return a.context_lens[r] - count + u.first + (u.requests > 1 ? 0 : i);
    }
    int64_t first_key(int64_t position) const { return a.window ? std::max<int64_t>(0, position - a.window + 1) : 0; }

   private:
    int32_t request(const Unit& u, int i) const { return u.requests > 1 ? u.request + i : u.request; }
    int64_t token(const Unit& u, int i) const { return a.cu_query_lens[request(u, i)] + u.first + (u.requests > 1 ? 0 : i); }

    bool sees(const Unit& u, int i, int64_t split) const {
        int64_t p = position(u, i);
        return first_key(p) < (split + 1) * SPLIT && p >= split * SPLIT;
    }

    void begin(const Unit& u) {
        lowest = first_key(position(u, 0));
        highest = 0;
        for (int i = 0; i < u.count; i++) {
            highest = std::max(highest, position(u, i));
            for (int64_t h = 0; h < group; h++) {
                const T* q = (const T*)a.q + (token(u, i) * a.num_heads + u.kv_head * group + h) * a.head_dim;
                std::copy(q, q + a.head_dim, queries.data() + (i * group + h) * padded);
            }
        }
    }

    // Where the tile of keys and values from `first` on is
    void locate(const Unit& u, const Walk& w, int64_t first, Keys<T>& found) const {
        const int32_t* table = a.block_tables + request(u, w.first) * a.table_width;
        const int64_t row = a.num_kv_heads * a.head_dim;
        const int count = std::min<int64_t>(TILE, w.end - first);
        int64_t block = first / a.block_size, offset = first % a.block_size;
        for (int j = 0; j < count; block++, offset = 0) {
            const int64_t at = (table[block] * a.block_size + offset) * row + u.kv_head * a.head_dim;
            const int many = std::min<int64_t>(count - j, a.block_size - offset);
            for (int i = 0; i < many; i++, j++) {
                found.k[j] = (const T*)a.k_pool + at + i * row;
                found.v[j] = (const T*)a.v_pool + at + i * row;
            }
        }
        found.count = count;
        for (int i = w.first; i < w.last; i++) {
            int64_t p = position(u, i);
            found.low[i - w.first] = std::min<int64_t>(TILE, std::max<int64_t>(0, first_key(p) - first));
            found.high[i - w.first] = std::max<int64_t>(0, std::min<int64_t>(count, p + 1 - first));
        }
    }

    void one_split(const Unit& u, int64_t split) {
        running.clear(u.count * group, padded);
        const int64_t begin = std::max(lowest / TILE * TILE, split * SPLIT), end = std::min(highest + 1, (split + 1) * SPLIT);
        walks.clear();
        if (u.requests == 1) {
            walks.push_back({0, u.count, begin, end});
        } else {
            const int64_t common = std::min(std::max(u.shared, begin), end);
            if (begin < common) walks.push_back({0, u.count, begin, common});
            for (int i = 0; i < u.count; i++)
                if (int64_t own = std::min(end, position(u, i) + 1); common < own) walks.push_back({i, i + 1, common, own});
        }
        int turn = 0;
        int64_t first = begin;
        locate(u, walks[0], first, keys[0]);
        for (size_t at = 0, next = 0; at < walks.size(); at = next, turn = 1 - turn) {
            const Walk& w = walks[at];
            const int64_t rows = (w.last - w.first) * group;
            const T* q = queries.data() + w.first * group * padded;
#if defined(__AMX_BF16__)
            if constexpr (std::is_same<T, bf16>::value)
                if (amx && first == w.begin) amx->take_queries(q, padded, rows);
#endif
            int64_t later = first + TILE;
            if (later >= w.end && ++next < walks.size()) later = walks[next].begin;
            keys[1 - turn].count = 0;
            if (next < walks.size()) locate(u, walks[next], later, keys[1 - turn]);
            if (!attend_amx(w, keys[turn], keys[1 - turn], rows)) {
                keys[1 - turn].fetch(0, TILE, a.head_dim);
                vector_tile(a, keys[turn], w.last - w.first, q, padded, group, running, w.first * group);
            }
            first = later;
        }
    }

    bool attend_amx(const Walk& w, const Keys<T>& tile, const Keys<T>& next, int64_t rows) {
#if defined(__AMX_BF16__)
        if constexpr (std::is_same<T, bf16>::value) {
            if (!amx) return false;
            int first = TILE, last = 0;  // keys that any row sees
            for (int i = 0; i < w.last - w.first; i++)
                if (tile.low[i] < tile.high[i]) first = std::min(first, tile.low[i]), last = std::max(last, tile.high[i]);
            bool mixed = false;
            for (int i = 0; i < w.last - w.first; i++) mixed = mixed || tile.low[i] != first || tile.high[i] != last;
            if (!amx->take(tile, next, first, last, mixed)) return false;
            for (int64_t row = 0; row < rows; row += 16)
                amx->attend(a, tile, row ? tile : next, last, row, std::min<int64_t>(16, rows - row), group, padded, running, w.first * group + row);
            return true;
        }
#endif
        (void)w, (void)tile, (void)next, (void)rows;
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

    void finish(const Unit& u, int i, const Softmax& softmax) {
        const int64_t token = this->token(u, i);
        for (int64_t h = 0; h < group; h++) {
            const int64_t head = u.kv_head * group + h, r = i * group + h;
            float share = 1.0f, mass = softmax.mass[r];
            if (a.lse) a.lse[token * a.num_heads + head] = softmax.peak[r] + std::log(mass);
            if (a.sinks) {
                float now = std::max(softmax.peak[r], a.sinks[head]);
                share = exp(splat(softmax.peak[r] - now))[0];
                mass = mass * share + exp(splat(a.sinks[head] - now))[0];
            }
            T* out = (T*)a.out + (token * a.num_heads + head) * a.head_dim;
            const float* total = softmax.total.data() + r * padded;
            for (int64_t d = 0; d < padded; d += WIDTH) store(out + d, load(total + d) * share / mass, a.head_dim - d);
        }
    }

    const Attention& a;
    const int64_t group, padded;
    const AttendRows<T> vector_tile;
    Buffer<T> queries;  // [rows, padded]
    Softmax running, merged;
    Keys<T> keys[2];  // of this tile and the next
    std::vector<Walk> walks;
    int64_t lowest = 0, highest = 0;
#if defined(__AMX_BF16__)
    std::unique_ptr<AmxTile> amx;
#endif
};

// Keys that the requests from `first` on have in common, in whole tiles, as long as `few` allows; the requests in `many`
int64_t shared_keys(const Attention& a, int32_t first, int few, int32_t& many) {
    const int32_t* table = a.block_tables + first * a.table_width;
    auto decodes = [&](int32_t r) { return a.cu_query_lens[r + 1] - a.cu_query_lens[r] == 1 && (!a.window || a.context_lens[r] <= a.window); };
    int64_t shared = 0;
    many = 1;
    if (TILE % a.block_size || !decodes(first)) return 0;
    for (int32_t r = first + 1; r < a.requests && many < few && decodes(r); r++, many++) {
        const int64_t longest = std::min(a.context_lens[r] - 1, a.context_lens[r - 1] - 1) / a.block_size;
        const int32_t* other = a.block_tables + r * a.table_width;
        const int64_t alike = (std::mismatch(table, table + longest, other).first - table) * a.block_size / TILE * TILE;
        if (alike == 0 || (many > 1 && alike < shared / 2)) break;
        shared = many > 1 ? std::min(shared, alike) : alike;
    }
    return shared;
}

template <class T>
void paged_attention(const Attention& a) {
    const int threads = team_size();
    const int few = std::min<int64_t>(QUERIES, a.requests * a.num_kv_heads / (2 * threads));  // work for all threads
    std::vector<Unit> units;
    int most = 1;
    for (int32_t r = 0, many; r < a.requests; r += many) {
        const int64_t shared = shared_keys(a, r, few, many);
        for (int32_t h = 0; h < a.num_kv_heads; h++)
            for (int32_t first = 0, n = many > 1 ? many : a.cu_query_lens[r + 1] - a.cu_query_lens[r]; first < n; first += QUERIES) {
                units.push_back({r, h, many, first, std::min(QUERIES, n - first), shared, -1});
                most = std::max(most, units.back().count);
            }
    }
    auto run_units = [&] {
        in_parallel(units.size(), (int64_t)units.size() >= 8 * threads * a.num_kv_heads ? a.num_kv_heads : 1, [&](Pieces& pieces) {
            Worker<T> worker(a, most);
            for (int64_t i, end; pieces.next(i, end);)
                for (; i < end; i++) worker.run(units[i]);
        });
    };
    if (most > 1 || threads == 1 || (int64_t)units.size() >= 4 * threads) return run_units();
    // Few decodes: threads share the splits of each
    Worker<T> planner(a, 1);
    std::vector<Unit> parts;
    std::vector<int64_t> starts;
    for (const Unit& u : units) {
        int64_t p = planner.position(u, 0);
        starts.push_back(parts.size());
        for (int64_t s = planner.first_key(p) / SPLIT; s <= p / SPLIT; s++)
            parts.push_back({u.request, u.kv_head, 1, u.first, 1, 0, (int32_t)s});
    }
    if (parts.size() == units.size()) return run_units();
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

template void hybrid::paged_attention<float>(const Attention&);
template void hybrid::paged_attention<hybrid::bf16>(const Attention&);
extern "C" void paged_attention_f32(const hybrid::Attention* a) { hybrid::paged_attention<float>(*a); }
extern "C" void paged_attention_bf16(const hybrid::Attention* a) { hybrid::paged_attention<hybrid::bf16>(*a); }
