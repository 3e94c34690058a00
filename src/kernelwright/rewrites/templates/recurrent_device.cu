// What the kernel takes from a GPU, and how it is launched.
#include <cuda_runtime.h>

#define SHARED_QUADS(name) extern __shared__ float4 name[]
#define as_float __uint_as_float
#define as_bits __float_as_uint
#define all_threads_here __syncthreads
#define one_warp_here __syncwarp
// Keeps the compiler from moving a sum behind the wait that follows it: its operands would fill the registers meanwhile.
#define COMPUTED_HERE(value) asm volatile("" : "+f"(value))
#define give_up __trap
#define from_other_lane(value, bit) __shfl_xor_sync(0xFFFFFFFFu, value, bit)

// Other blocks write what these read, so that no cache of one multiprocessor may answer.
__device__ __forceinline__ uint4 read_shared_quad(const float* from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ void write_shared(float* to, float value) {
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}

__device__ __forceinline__ void copy_quad(float4* to, const float* from) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}

__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
