// From fp32 logits to a token and both log-probs: one uniform a row, and an inverse-CDF walk in order of token ids.
// The rules are those of inference_v2/sampler.py; sums over the vocabulary are taken in fp64, 256 tokens at a time.
#include <algorithm>
#include <vector>

#include "team.h"
#include "vec.h"

namespace hybrid {

constexpr int SEGMENT = 256;
constexpr int BUCKETS = 256;         // of (z - max z) / temperature
constexpr float PER_UNIT = 4;        // buckets per nat, so that they reach down to -64
constexpr double MASS_SLACK = 1e-7;  // a mass of top_p up to fp32 rounding is reached

struct Sample {
    const float *logits, *edited;  // [rows, vocab]; edited: what to draw from, null where it is the same
    const float* temperature;      // [rows]; 0: greedy
    const double *uniform, *top_p, *min_p;  // [rows]
    const int64_t* top_k;                   // [rows]; 0: all
    int64_t* ids;                           // [rows]
    float *logprobs, *raw;                  // [rows]
    int64_t rows, vocab;
};

INLINE float highest(const float* z, int64_t n) {
    f32v top = splat(-INFINITY), bad{};
    for (int64_t i = 0; i < n; i += WIDTH) {
        f32v v = load(z + i, n - i);
        if (n - i < WIDTH)
            for (int64_t j = n - i; j < WIDTH; j++) v[j] = -INFINITY;
        top = maximum(top, v);
        bad += v != v ? splat(1.0f) : splat(0.0f);
    }
    return sum(bad) > 0 ? NAN : maximum(top);
}

INLINE float value(const float* z, float peak, float temperature, int64_t i) { return (z[i] - peak) / temperature; }
INLINE double weight(float v) { return exp(splat(v))[0]; }

INLINE f32v weights(const float* z, float peak, float temperature, int64_t n) {
    f32v v = load(z, n) - peak;
    if (temperature != 1) v /= temperature;  // a division takes as long as the rest
    f32v w = exp(v);
    if (n < WIDTH)
        for (int64_t j = n; j < WIDTH; j++) w[j] = 0;
    return w;
}

// Mass of each segment; returns the whole
double segment_masses(const float* z, float peak, float temperature, int64_t n, std::vector<double>& masses) {
    double whole = 0;
    masses.clear();
    for (int64_t s = 0; s < n; s += SEGMENT) {
        Doubles sums{};  // a tail token beside the peak would vanish from an fp32 sum
        for (int64_t i = s; i < std::min<int64_t>(s + SEGMENT, n); i += WIDTH) {
            Doubles w = doubles(weights(z + i, peak, temperature, n - i));
            sums.low += w.low, sums.high += w.high;
        }
        double mass = 0;
        for (int j = 0; j < WIDTH / 2; j++) mass += sums.low[j];
        for (int j = 0; j < WIDTH / 2; j++) mass += sums.high[j];
        masses.push_back(mass);
        whole += mass;
    }
    return whole;
}

int64_t walk(const float* z, float peak, float temperature, int64_t n, const std::vector<double>& masses, double left) {
    size_t s = 0;
    int64_t last = 0;
    for (size_t i = 0; i < masses.size(); i++)
        if (masses[i] > 0) last = i;  // rounding must not leave the tokens that have mass
    while (s < (size_t)last && left >= masses[s]) left -= masses[s++];
    int64_t found = -1;
    for (int64_t i = s * SEGMENT; i < std::min<int64_t>((s + 1) * SEGMENT, n); i++) {
        double w = weight(value(z, peak, temperature, i));
        if (w <= 0) continue;
        found = i;
        if (left < w) break;
        left -= w;
    }
    return found;
}

struct Candidate {
    float value;
    int64_t id;
};

// Top-k, top-p and min-p, then the walk over what is kept: the token, and the mass kept
int64_t truncated_walk(const float* z, float peak, float temperature, int64_t n, double whole, int64_t top_k, double top_p,
                       double min_p, double uniform, double* kept_mass, std::vector<Candidate>& found) {
    if (top_k <= 0 || top_k > n) top_k = n;
    auto bucket = [](float v) { return (int)std::min<float>(-v * PER_UNIT, BUCKETS - 1); };
    std::vector<int64_t> counts(BUCKETS);
    std::vector<double> masses(BUCKETS);
    for (int64_t i = 0; i < n; i += WIDTH) {
        f32v v = (load(z + i, n - i) - peak) / temperature, w = exp(v);
        for (int64_t j = 0; j < std::min<int64_t>(WIDTH, n - i); j++) {
            int b = bucket(v[j]);
            counts[b]++;
            masses[b] += w[j];
        }
    }
    // The buckets from the top that hold every token that counts, and one more so that rounding does not decide. All of the top
    // k count, since top_p is a share of their mass
    int last = 0;
    int64_t count = counts[0];
    double mass = masses[0];
    auto decided = [&] {
        if (top_k < n) return count >= top_k;
        return (top_p < 1 && mass >= top_p * whole) || std::exp(-(last + 1) / PER_UNIT) < min_p;
    };
    while (last < BUCKETS - 1 && !decided()) {
        last++;
        count += counts[last];
        mass += masses[last];
    }
    last = std::min(last + 1, BUCKETS - 1);
    found.clear();
    for (int64_t i = 0; i < n; i++) {
        float v = value(z, peak, temperature, i);
        if (bucket(v) <= last) found.push_back({v, i});
    }
    std::sort(found.begin(), found.end(), [](Candidate a, Candidate b) { return a.value != b.value ? a.value > b.value : a.id < b.id; });
    if ((int64_t)found.size() > top_k) found.resize(top_k);
    double among = whole;
    if (top_k < n) {
        among = 0;
        for (Candidate c : found) among += weight(c.value);
    }
    size_t keep = 0;
    double before = 0;
    for (; keep < found.size(); keep++) {
        double w = weight(found[keep].value);
        if (keep > 0 && ((top_p < 1 && before >= (top_p - MASS_SLACK) * among) || w < min_p)) break;
        before += w;
    }
    found.resize(keep);
    std::sort(found.begin(), found.end(), [](Candidate a, Candidate b) { return a.id < b.id; });
    *kept_mass = 0;
    for (Candidate c : found) *kept_mass += weight(c.value);
    double left = uniform * *kept_mass;
    int64_t id = -1;
    for (Candidate c : found) {
        double w = weight(c.value);
        if (w <= 0) continue;
        id = c.id;
        if (left < w) break;
        left -= w;
    }
    return id;
}

void sample_row(const Sample& a, int64_t row, std::vector<double>& masses, std::vector<Candidate>& candidates) {
    const float *plain = a.logits + row * a.vocab, *z = a.edited ? a.edited + row * a.vocab : plain;
    const bool greedy = a.temperature[row] == 0;
    const float temperature = greedy ? 1.0f : a.temperature[row];
    float peak = highest(z, a.vocab), plain_peak = a.edited ? highest(plain, a.vocab) : peak;
    double mass = segment_masses(z, peak, temperature, a.vocab, masses);
    double plain_mass = mass;
    if (a.edited) {
        std::vector<double> unused;
        plain_mass = segment_masses(plain, plain_peak, temperature, a.vocab, unused);
    }
    int64_t id = -1;
    if (std::isfinite(mass) && mass > 0) {
        if (greedy)
            id = std::find(z, z + a.vocab, peak) - z;
        else if (a.top_k[row] > 0 || a.top_p[row] < 1 || a.min_p[row] > 0)
            id = truncated_walk(z, peak, temperature, a.vocab, mass, a.top_k[row], a.top_p[row], a.min_p[row], a.uniform[row], &mass,
                                candidates);
        else
            id = walk(z, peak, temperature, a.vocab, masses, a.uniform[row] * mass);
    }
    a.ids[row] = std::max<int64_t>(id, 0);
    a.logprobs[row] = id < 0 ? NAN : greedy ? 0.0f : (float)(value(z, peak, temperature, id) - std::log(mass));
    a.raw[row] = id < 0 ? NAN : (float)(value(plain, plain_peak, temperature, id) - std::log(plain_mass));
}

}  // namespace hybrid

extern "C" void sample(const hybrid::Sample* a) {
    hybrid::in_parallel(a->rows, 1, [&](hybrid::Pieces& pieces) {
        std::vector<double> masses;
        std::vector<hybrid::Candidate> candidates;
        for (int64_t row, end; pieces.next(row, end);) hybrid::sample_row(*a, row, masses, candidates);
    });
}
