// Enough of CUDA to run kernels of 256 threads on a CPU: one thread of the CPU each, blocks one after another.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
using std::max;
using std::min;

struct Index {
    unsigned x;
};
struct float4 {
    float x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct __half {
    uint16_t bits;
};
template <class To, class From> To same_bits(From x) {
    To result;
    memcpy(&result, &x, sizeof x);
    return result;
}
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline __half __float2half_rn(float x) { return {same_bits<uint16_t>((_Float16)x)}; }
inline float __half2float(__half x) { return same_bits<_Float16>(x.bits); }
inline uint16_t __half_as_ushort(__half x) { return x.bits; }
template <class T> T __ldg(const T* at) { return *at; }

inline int __float_as_int(float x) { return same_bits<int>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }

thread_local Index threadIdx, blockIdx, gridDim;
constexpr int CPU_THREADS = 256;
std::barrier<> every(CPU_THREADS);
std::barrier<> warp_barriers[8] = {std::barrier<>(32), std::barrier<>(32), std::barrier<>(32), std::barrier<>(32),
                                   std::barrier<>(32), std::barrier<>(32), std::barrier<>(32), std::barrier<>(32)};
int exchanged[CPU_THREADS];

inline void __syncthreads() { every.arrive_and_wait(); }
inline int __syncthreads_or(int value) {
    exchanged[threadIdx.x] = value;
    every.arrive_and_wait();
    int any = std::any_of(exchanged, exchanged + CPU_THREADS, [](int x) { return x != 0; });
    every.arrive_and_wait();
    return any;
}
inline int __shfl_xor_sync(unsigned, int value, int distance) {
    auto& mine = warp_barriers[threadIdx.x / 32];
    exchanged[threadIdx.x] = value;
    mine.arrive_and_wait();
    int other = exchanged[threadIdx.x ^ distance];
    mine.arrive_and_wait();
    return other;
}
inline void atomicAdd(int* at, int value) { std::atomic_ref<int>(*at).fetch_add(value); }
inline void atomicOr(int* at, int value) { std::atomic_ref<int>(*at).fetch_or(value); }
inline void atomicMax(int* at, int value) {
    std::atomic_ref<int> there(*at);
    for (int old = there.load(); old < value && !there.compare_exchange_weak(old, value);) {
    }
}

template <class Kernel> void on_cpu(int blocks, Kernel kernel) {
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < CPU_THREADS; t++)
        threads.emplace_back([=] {
            threadIdx = {t}, gridDim = {(unsigned)blocks};
            for (int block = 0; block < blocks; block++) {
                blockIdx = {(unsigned)block};
                kernel();
                every.arrive_and_wait();
            }
        });
    for (auto& thread : threads) thread.join();
}
