// Losses of a chunk of fp32 logits and their gradients, row by row while a row is in the cache: cross-entropy, and the two KL
// divergences between a student and a teacher. trainers/losses says the same in PyTorch. Sums over the vocabulary are fp32 within
// 256 tokens and fp64 beyond.
#include <algorithm>
#include <cmath>

#include "team.h"
#include "vec.h"

namespace hybrid {

struct TokenLoss {
    const float* student;    // [rows, vocab], rows student_stride apart
    float* teacher;          // [rows, vocab]; written over with the gradient in the student's logits. Cross-entropy: only written
    const int64_t* targets;  // [rows]
    float *loss, *teacher_entropy, *student_entropy, *agreement, *teacher_logprob, *student_logprob;  // [rows]
    int64_t rows, vocab, student_stride, teacher_stride;
    int64_t kind;  // 0: -log S(target); 1: KL(T || S); 2: KL(S || T)
    float temperature;
};

constexpr int64_t SEGMENT = 256;

// log softmax(z / temperature), as vectors of it
class LogSoftmax {
   public:
    LogSoftmax(const float* z, int64_t n, float temperature) : z(z), n(n), temperature(temperature) {
        f32v top = splat(-INFINITY);
        for (int64_t i = 0; i < n; i += WIDTH) top = hybrid::maximum(top, at(i));
        peak = hybrid::maximum(top);
        double mass = 0;
        over_segments(n, [&](int64_t i, f32v* sums) { sums[0] += exp(scaled(at(i))); }, &mass, 1);
        log_mass = (float)std::log(mass);
    }
    f32v operator()(int64_t i) const { return scaled(at(i)) - log_mass; }
    float single(int64_t i) const { return (*this)(i / WIDTH * WIDTH)[i % WIDTH]; }

    int64_t argmax() const {
        for (int64_t i = 0; i < n; i += WIDTH) {
            const f32v v = at(i);
            const i32v hit = v == splat(peak);
            int any = 0;
            for (int j = 0; j < WIDTH; j++) any |= hit[j];
            if (any)
                for (int j = 0; j < WIDTH; j++)
                    if (hit[j]) return i + j;
        }
        return -1;
    }

    // totals[k] = sum of what each(i, sums) adds to sums[k], for vectors from i on
    template <class F>
    static INLINE void over_segments(int64_t n, const F& each, double* totals, int count) {
        for (int64_t s = 0; s < n; s += SEGMENT) {
            f32v sums[4] = {};
            for (int64_t i = s; i < std::min(n, s + SEGMENT); i += WIDTH) each(i, sums);
            for (int k = 0; k < count; k++) totals[k] += sum(sums[k]);
        }
    }

   private:
    // Beyond the end nothing is likely
    INLINE f32v at(int64_t i) const {
        if (n - i >= WIDTH) return load(z + i);
        float part[WIDTH];
        std::fill(part, part + WIDTH, -INFINITY);
        std::copy(z + i, z + n, part);
        return load(part);
    }
    INLINE f32v scaled(f32v v) const { return temperature == 1 ? v - peak : (v - peak) / temperature; }

    const float* z;
    const int64_t n;
    const float temperature;
    float peak, log_mass;
};

// p log p, 0 where p is
INLINE f32v self_information(f32v p, f32v log_p) { return p > 0 ? p * log_p : p != p ? p : splat(0.0f); }

// p (log p - log q), 0 where nothing of p is
INLINE f32v relative(f32v p, f32v log_p, f32v log_q) { return log_p > -INFINITY ? p * (log_p - log_q) : log_p != log_p ? log_p : splat(0.0f); }

void cross_entropy_row(const TokenLoss& a, int64_t row) {
    const LogSoftmax student(a.student + row * a.student_stride, a.vocab, a.temperature);
    float* gradient = a.teacher + row * a.teacher_stride;
    double entropy = 0;
    LogSoftmax::over_segments(a.vocab, [&](int64_t i, f32v* sums) {
        const f32v log_s = student(i), s = exp(log_s);
        sums[0] -= self_information(s, log_s);
        store(gradient + i, s / a.temperature, a.vocab - i);
    }, &entropy, 1);
    const int64_t target = a.targets[row];
    gradient[target] -= 1 / a.temperature;
    a.student_entropy[row] = (float)entropy;
    a.student_logprob[row] = student.single(target);
    a.loss[row] = -a.student_logprob[row];
    a.agreement[row] = student.argmax() == target;
}

template <bool REVERSE>
void kl_row(const TokenLoss& a, int64_t row) {
    float* gradient = a.teacher + row * a.teacher_stride;
    const LogSoftmax student(a.student + row * a.student_stride, a.vocab, a.temperature), teacher(gradient, a.vocab, a.temperature);
    // The KL with q - p added to each term, which is 0 in sum and takes away what rounding does to all terms alike; the KL without
    double totals[4] = {};
    LogSoftmax::over_segments(a.vocab, [&](int64_t i, f32v* sums) {
        const f32v log_s = student(i), log_t = teacher(i), s = exp(log_s), t = exp(log_t);
        const f32v term = REVERSE ? relative(s, log_s, log_t) : relative(t, log_t, log_s);
        sums[0] += term + (REVERSE ? t - s : s - t);
        sums[1] += term;
        sums[2] -= self_information(t, log_t);
        sums[3] -= self_information(s, log_s);
    }, totals, 4);
    const int64_t target = a.targets[row];
    a.loss[row] = (float)totals[0];
    a.teacher_entropy[row] = (float)totals[2];
    a.student_entropy[row] = (float)totals[3];
    a.agreement[row] = student.argmax() == teacher.argmax();
    a.teacher_logprob[row] = teacher.single(target);
    a.student_logprob[row] = student.single(target);
    const float mean = (float)totals[1];
    for (int64_t i = 0; i < a.vocab; i += WIDTH) {
        const f32v log_s = student(i), log_t = teacher(i), s = exp(log_s);
        const f32v slope = REVERSE ? relative(s, log_s, log_t) - s * mean : s - exp(log_t);
        store(gradient + i, a.temperature == 1 ? slope : slope / a.temperature, a.vocab - i);
    }
}

}  // namespace hybrid

extern "C" void token_loss(const hybrid::TokenLoss* a) {
    hybrid::for_each(a->rows, 1, [&](int64_t row) {
        if (a->kind == 0)
            hybrid::cross_entropy_row(*a, row);
        else if (a->kind == 1)
            hybrid::kl_row<false>(*a, row);
        else
            hybrid::kl_row<true>(*a, row);
    });
}
