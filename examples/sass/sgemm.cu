// C = A * B in fp32 on the CUDA cores: 64 x 64 tiles, 4 x 4 outputs a thread. n is a multiple of 64.
extern "C" __global__ void __launch_bounds__(256) sgemm(const float *a, const float *b, float *c, int n) {
  __shared__ float left[16][64], right[16][64];
  int x = threadIdx.x % 16, y = threadIdx.x / 16, t = threadIdx.x;
  const float *rows = a + blockIdx.y * 64 * n, *columns = b + blockIdx.x * 64;
  float sum[4][4] = {};
  for (int k = 0; k < n; k += 16) {
    float4 l = *(const float4 *)&rows[(t / 4) * n + k + t % 4 * 4];
    left[t % 4 * 4][t / 4] = l.x, left[t % 4 * 4 + 1][t / 4] = l.y;
    left[t % 4 * 4 + 2][t / 4] = l.z, left[t % 4 * 4 + 3][t / 4] = l.w;
    *(float4 *)&right[t / 16][t % 16 * 4] = *(const float4 *)&columns[(k + t / 16) * n + t % 16 * 4];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float4 u = *(float4 *)&left[i][y * 4], v = *(float4 *)&right[i][x * 4];
      float us[4] = {u.x, u.y, u.z, u.w}, vs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int p = 0; p < 4; p++)
#pragma unroll
        for (int q = 0; q < 4; q++) sum[p][q] += us[p] * vs[q];
    }
    __syncthreads();
  }
  for (int p = 0; p < 4; p++)
    *(float4 *)&c[(blockIdx.y * 64 + y * 4 + p) * n + blockIdx.x * 64 + x * 4] =
        make_float4(sum[p][0], sum[p][1], sum[p][2], sum[p][3]);
}
