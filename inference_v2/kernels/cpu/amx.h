// The tile registers of AMX. A thread's configuration belongs to oneDNN as well, which remembers what it has loaded.
#pragma once
#if defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace hybrid {

struct alignas(64) TileConfig {
    uint8_t palette = 0, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// While it lives this thread's tiles are ours; then they are configured as they were found
class TileScope {
   public:
    TileScope() { asm volatile("sttilecfg %0" : "=m"(before)); }
    ~TileScope() { load(before); }
    TileScope(const TileScope&) = delete;

    // Rows of each of the eight tiles, and bytes of a row
    void configure(const uint8_t (&rows)[8], const uint8_t (&bytes)[8] = {64, 64, 64, 64, 64, 64, 64, 64}) {
        bool same = now.palette == 1;
        for (int t = 0; t < 8; t++) same = same && now.rows[t] == rows[t] && now.bytes[t] == bytes[t];
        if (same) return;
        now.palette = 1;
        for (int t = 0; t < 8; t++) {
            now.bytes[t] = bytes[t];
            now.rows[t] = rows[t];
        }
        load(now);
    }

   private:
    // Not the intrinsic: gcc 12's names 8 of the 64 bytes as its input, and the others may be optimised away
    static void load(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }

    TileConfig before, now;
};

// The kernel asks before a process may use the tile registers
inline bool may_use_tiles() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0; }

}  // namespace hybrid
#endif
