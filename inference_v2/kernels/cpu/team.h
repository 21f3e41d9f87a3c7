// Threads that share the work of one kernel after the other.
//
// Not OpenMP's, whose threads wait either asleep, and to wake one takes a virtual machine longer than a small kernel, or spinning
// without regard to other processes, and each barrier then waits for whoever was displaced. Here whoever comes takes the next
// piece: a late thread delays nobody, and it spins only for about as long as the gap between two kernels.
#pragma once
#include <atomic>
#include <cstdint>

namespace hybrid {

// The pieces of a job, for one thread after the other to take
class Pieces {
   public:
    Pieces(std::atomic<int64_t>& taken, int64_t count, int64_t size) : taken(taken), count(count), size(size) {}

    // The next piece begin : end; false if there is none
    bool next(int64_t& begin, int64_t& end) {
        begin = taken.fetch_add(size, std::memory_order_relaxed);
        end = begin + size < count ? begin + size : count;
        return begin < count;
    }

   private:
    std::atomic<int64_t>& taken;
    const int64_t count, size;
};

typedef void (*Work)(const void* context, Pieces& pieces);
void share(int64_t count, int64_t size, Work work, const void* context);
int team_size();  // threads that torch may use

// Calls work(pieces) once on each thread that takes part, of which one may get all pieces. They cover 0 : count, `size` at a time.
template <class F>
void in_parallel(int64_t count, int64_t size, const F& work) {
    share(count, size, [](const void* context, Pieces& pieces) { (*(const F*)context)(pieces); }, &work);
}

// Calls each(i) for i in 0 : count
template <class F>
void for_each(int64_t count, int64_t size, const F& each) {
    in_parallel(count, size, [&](Pieces& pieces) {
        for (int64_t i, end; pieces.next(i, end);)
            for (; i < end; i++) each(i);
    });
}

}  // namespace hybrid
