// Runs the recurrent kernel on a CPU: every GPU thread of every block is a fiber of one thread, so that all blocks run at once.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct float4 {
    float x, y, z, w;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct Index {
    unsigned x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class To, class From> To same_bits(From x) {
    To result;
    memcpy(&result, &x, sizeof x);
    return result;
}
inline float as_float(unsigned x) { return same_bits<float>(x); }
inline unsigned as_bits(float x) { return same_bits<unsigned>(x); }

// Threads that wait for one another: the last to arrive lets all go on.
struct Barrier {
    unsigned size = 0, arrived = 0, rounds = 0;
};
struct Block {
    std::vector<float4> shared;
    Barrier all;
    std::map<unsigned, Barrier> warps;
    std::vector<float> exchanged;
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    Index thread, block;
    Block* home;
    bool over = false;
};

ucontext_t scheduler;
Fiber* running = nullptr;
std::function<void()> body;
Index threadIdx, blockIdx;

inline void let_others_run() {
    Fiber* mine = running;
    swapcontext(&mine->context, &scheduler);
    running = mine, threadIdx = mine->thread, blockIdx = mine->block;
}
inline void wait_at(Barrier& barrier) {
    const unsigned round = barrier.rounds;
    if (++barrier.arrived == barrier.size) {
        barrier.arrived = 0, barrier.rounds++;
        return;
    }
    while (barrier.rounds == round) let_others_run();
}
inline void all_threads_here() { wait_at(running->home->all); }
inline void one_warp_here() { wait_at(running->home->warps[threadIdx.x / 32]); }
inline float from_other_lane(float value, int bit) {
    Block* home = running->home;
    Barrier& warp = home->warps[threadIdx.x / 32];
    home->exchanged[threadIdx.x] = value;
    wait_at(warp);
    const float other = home->exchanged[threadIdx.x ^ bit];
    wait_at(warp);
    return other;
}
inline uint4 read_shared_quad(const float* from) {
    let_others_run();
    return *(const uint4*)from;
}
inline void write_shared(float* to, float value) {
    *to = value;
    let_others_run();
}
inline void copy_quad(float4* to, const float* from) { *to = *(const float4*)from; }
inline void copies_done() {}
inline void give_up() { abort(); }
#define COMPUTED_HERE(value) (void)(value)
#define SHARED_QUADS(name) float4* name = running->home->shared.data()

inline void begin() {
    threadIdx = running->thread, blockIdx = running->block;
    body();
    running->over = true;
    swapcontext(&running->context, &scheduler);
}

inline void on_cpu(Index grid, unsigned threads, size_t quads, std::function<void()> kernel) {
    body = kernel;
    std::vector<Block> blocks(grid.x * grid.y);
    std::vector<Fiber> fibers(blocks.size() * threads);
    for (size_t at = 0; at < fibers.size(); ++at) {
        const unsigned block = at / threads;
        Block& home = blocks[block];
        if (at % threads == 0) {
            // Shared memory comes with whatever was there.
            home.shared.assign(quads, make_float4(NAN, NAN, NAN, NAN));
            home.exchanged.resize(threads);
            home.all.size = threads;
            for (unsigned warp = 0; warp < threads / 32; ++warp) home.warps[warp].size = 32;
        }
        Fiber& one = fibers[at];
        one.stack.resize(1 << 17);
        one.thread = {(unsigned)(at % threads), 0}, one.block = {block % grid.x, block / grid.x}, one.home = &home;
        getcontext(&one.context);
        one.context.uc_stack.ss_sp = one.stack.data(), one.context.uc_stack.ss_size = one.stack.size();
        makecontext(&one.context, begin, 0);
    }
    // Blocks run at speeds of their own: some wait a long time for others.
    std::mt19937 random(0);
    for (size_t left = fibers.size(); left;) {
        const size_t block = random() % blocks.size();
        for (unsigned rounds = random() % 200; rounds && left; --rounds) {
            for (size_t at = block * threads; at < (block + 1) * threads; ++at) {
                Fiber& one = fibers[at];
                if (one.over) continue;
                running = &one;
                swapcontext(&scheduler, &one.context);
                left -= one.over;
            }
        }
    }
}
// KERNEL
template <int QUADS> int launched(const Call& call, int cells) {
    const size_t quads = BATCH * (2 * QUADS + STATE_QUADS) * SLICES;
    on_cpu({HIDDEN / UNITS, (unsigned)cells}, THREADS, quads, [&] { recurrent<QUADS>(call); });
    return 0;
}

extern "C" int unwritten(void* out, int64_t bytes, void*) {
    memset(out, 0xFF, bytes);
    return 0;
}

extern "C" int launch(const Call* call, int cells, int narrow, void*) {
    return narrow ? launched<NARROW_QUADS>(*call, cells) : launched<WIDE_QUADS>(*call, cells);
}
