// CUDA C++ kernels in the styles that re-scheduling meets outside Triton: shared-memory tiles, shuffles, atomics,
// asynchronous copies, tensor cores, double precision, calls that are not inlined, and jump tables.

#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <mma.h>

extern "C" __global__ void sgemm(const float *a, const float *b, float *c, int n) {
  __shared__ float left[16][17], right[16][17];
  int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
  float sum = 0;
  for (int k = 0; k < n; k += 16) {
    left[threadIdx.y][threadIdx.x] = a[row * n + k + threadIdx.x];
    right[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * n + column];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 16; i++) sum += left[threadIdx.y][i] * right[i][threadIdx.x];
    __syncthreads();
  }
  c[row * n + column] = sum;
}

extern "C" __global__ void row_sum(const float *x, float *out, int columns) {
  __shared__ float partial[32];
  float sum = 0;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += x[blockIdx.x * columns + i];
  for (int offset = 16; offset; offset /= 2) sum += __shfl_down_sync(0xffffffff, sum, offset);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    sum = threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0;
    for (int offset = 16; offset; offset /= 2) sum += __shfl_down_sync(0xffffffff, sum, offset);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
  }
}

extern "C" __global__ void histogram(const int *x, int *bins, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&bins[x[i] & 255], 1);
}

extern "C" __global__ void pipelined_scale(const float4 *x, float4 *y, int tiles) {
  __shared__ float4 stage[2][128];
  int lane = threadIdx.x;
  __pipeline_memcpy_async(&stage[0][lane], &x[lane], 16);
  __pipeline_commit();
  for (int t = 0; t < tiles; t++) {
    if (t + 1 < tiles) __pipeline_memcpy_async(&stage[(t + 1) % 2][lane], &x[(t + 1) * 128 + lane], 16);
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
    float4 v = stage[t % 2][lane ^ 1];
    y[t * 128 + lane] = make_float4(v.x * 2, v.y * 3, expf(v.z), v.w);
    __syncthreads();
  }
}

extern "C" __global__ void tensor_gemm(const half *a, const half *b, float *c, int n) {
  using namespace nvcuda::wmma;
  fragment<matrix_a, 16, 16, 16, half, row_major> left;
  fragment<matrix_b, 16, 16, 16, half, row_major> right;
  fragment<accumulator, 16, 16, 16, float> sum;
  fill_fragment(sum, 0.0f);
  for (int k = 0; k < n; k += 16) {
    load_matrix_sync(left, a + blockIdx.y * 16 * n + k, n);
    load_matrix_sync(right, b + k * n + blockIdx.x * 16, n);
    mma_sync(sum, left, right, sum);
  }
  store_matrix_sync(c + blockIdx.y * 16 * n + blockIdx.x * 16, sum, n, mem_row_major);
}

extern "C" __global__ void double_norm(const double *x, double *y, int n) {
  double sum = 1e-9;
  for (int i = 0; i < n; i++) sum += x[i] * x[i];
  y[threadIdx.x] = x[threadIdx.x] / sqrt(sum);
}

__device__ __noinline__ float opaque(float x, int n) {
  for (int i = 0; i < n; i++) x = x * 1.5f + sinf(x);
  return x;
}

extern "C" __global__ void calls(const float *x, float *y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = opaque(x[i], n) + opaque(x[i] + 1, n + 1);
}

extern "C" __global__ void jumps(const int *x, int *y) {
  int i = threadIdx.x, v = x[i];
  switch (v & 15) {
    case 0: v = v * 3 + 1; break;
    case 1: v = __popc(v) ^ i; break;
    case 2: v = v / 7; break;
    case 3: v = __ffs(v) * 5; break;
    case 4: v = v % 11; break;
    case 5: v = __brev(v); break;
    case 6: v = v << (i & 7); break;
    case 7: v = __clz(v) + i; break;
    case 8: v = v * v; break;
    case 9: v = v - 77 * i; break;
    default: v = 0;
  }
  y[i] = v;
}
