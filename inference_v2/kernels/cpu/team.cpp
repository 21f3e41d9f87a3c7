#include "team.h"

#include <linux/futex.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <thread>

namespace hybrid {

constexpr int64_t SPIN_NS = 500000;  // how long a thread without work stays awake: the gap between two kernels of a step

static int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000 + t.tv_nsec;
}

static void pause_a_little() {
    for (int i = 0; i < 32; i++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
}

class Team {
   public:
    // False if another thread's job runs
    bool run(int threads, int64_t count, int64_t size, Work w, const void* c) {
        std::unique_lock<std::mutex> mine(busy, std::try_to_lock);
        if (!mine.owns_lock()) return false;
        for (; started < threads - 1; started++) start(started);
        work = w, context = c, of_job = count, piece = size, helpers = threads - 1;
        taken = 0;
        open = true;
        jobs++;
        if (asleep > 0) syscall(SYS_futex, &jobs, FUTEX_WAKE_PRIVATE, helpers, nullptr, nullptr, 0);
        take_part();
        open = false;  // who comes now finds nothing; the others are waited for
        for (int64_t i = 0; active > 0; i++) i < 64 ? pause_a_little() : (void)sched_yield();
        return true;
    }

   private:
    void start(int number) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // a worker inherits this: signals are for the threads of Python
        std::thread([this, number, seen = jobs.load()] { serve(number, seen); }).detach();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void serve(int number, uint32_t seen) {
        while (true) {
            wait(seen);
            seen = jobs;
            active++;  // before the look at `open`: the job cannot change while anybody is active
            if (open && number < helpers && taken < of_job) take_part();
            active--;
        }
    }

    void wait(uint32_t seen) {
        for (int64_t start = now_ns(); now_ns() - start < SPIN_NS; pause_a_little())
            if (jobs != seen) return;
        asleep++;
        while (jobs == seen) syscall(SYS_futex, &jobs, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        asleep--;
    }

    void take_part() {
        Pieces pieces(taken, of_job, piece);
        work(context, pieces);
    }

    std::mutex busy;
    int started = 0;
    Work work = nullptr;
    const void* context = nullptr;
    int64_t of_job = 0, piece = 1;
    int helpers = 0;
    alignas(64) std::atomic<uint32_t> jobs{0};  // begun so far
    alignas(64) std::atomic<int64_t> taken{0};
    alignas(64) std::atomic<int> active{0};
    std::atomic<int> asleep{0};
    std::atomic<bool> open{false};
};

static std::atomic<Team*> team{nullptr};

static Team* the_team() {
    static std::once_flag once;
    std::call_once(once, [] {
        team = new Team;
        pthread_atfork(nullptr, nullptr, [] { team = new Team; });  // a child has none of the threads
    });
    return team;
}

int team_size() { return std::max(1, omp_get_max_threads()); }

void share(int64_t count, int64_t size, Work work, const void* context) {
    const int threads = (int)std::min<int64_t>(team_size(), (count + size - 1) / size);
    if (threads > 1 && the_team()->run(threads, count, size, work, context)) return;
    std::atomic<int64_t> taken{0};
    Pieces pieces(taken, count, size);
    if (count > 0) work(context, pieces);
}

}  // namespace hybrid
