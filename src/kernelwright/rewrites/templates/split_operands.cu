// Kernels around the split product: they split both operands, add slices of K, and repair tiles that hold Inf or NaN.
// Defined before this text: BK, Tensors and `epilogue`. A test also compiles it as C++ for a CPU.

constexpr int THREADS = 256;
constexpr int KEPT = 8;          // Groups of four values that a thread keeps between the two passes over a row.
constexpr int SPAN = 8192;       // Length of K that a block takes where several share a row.
constexpr int TILE = 64;         // Rows, and length of K, of a transposed tile; rows and columns of a repaired one.
constexpr int COLUMN_SPAN = 512; // Length of K that a block takes of transposed tiles.
constexpr int STEP = 16;         // Length of K that a step of the repair reads.

// How an operand is split: a warp, a block, or several blocks a row; or by tiles where values of a column lie side by side.
enum Way { WARPS, BLOCKS, SPANS, COLUMNS };

struct Operand {
    const float* x;
    __half *high, *low;
    int *shifts, *marks, *largest, *flag;
    int64_t stride_batch, stride_row, stride_k;
    int rows, all_rows, length, padded, way, blocks, spans;  // `all_rows` are those of all batches.
    bool vector;  // Whether four neighbouring values can be read at once.

    __device__ const float* at(int row) const { return x + row / rows * stride_batch + row % rows * stride_row; }

    // Four values of a row from `k` on; zero past the end.
    __device__ float4 along(const float* from, int k) const {
        if (vector) return k < length ? *(const float4*)(from + k) : make_float4(0, 0, 0, 0);
        return make_float4(k < length ? from[k * stride_k] : 0, k + 1 < length ? from[(k + 1) * stride_k] : 0,
                           k + 2 < length ? from[(k + 2) * stride_k] : 0, k + 3 < length ? from[(k + 3) * stride_k] : 0);
    }

    // One value of four neighbouring rows; `from` is the batch.
    __device__ float4 across(const float* from, int row, int k) const {
        if (k >= length) return make_float4(0, 0, 0, 0);
        const float* p = from + row * stride_row + k * stride_k;
        if (vector) return row < rows ? *(const float4*)p : make_float4(0, 0, 0, 0);
        return make_float4(row < rows ? p[0] : 0, row + 1 < rows ? p[stride_row] : 0,
                           row + 2 < rows ? p[2 * stride_row] : 0, row + 3 < rows ? p[3 * stride_row] : 0);
    }
};

struct Operands {
    Operand of[2];
};

// With programmatic dependent launch a kernel starts before the previous one ends: wait for what that has written.
__device__ __forceinline__ void wait_for_previous() {
#ifdef __CUDA_ARCH__
    asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

__device__ __forceinline__ float unscaled(float value, int shift) {
    int half = -shift >> 1;  // In two steps, since the sum of two shifts can exceed the exponents of float32.
    return value * power_of_two(half) * power_of_two(-shift - half);
}

__device__ __forceinline__ int bits(float value) { return __float_as_int(value) & 0x7FFFFFFF; }

__device__ __forceinline__ int bits(float4 v) { return max(max(bits(v.x), bits(v.y)), max(bits(v.z), bits(v.w))); }

// Both halves of a scaled value, the high one in the lower 16 bits.
__device__ __forceinline__ uint32_t halves(float value) {
    __half high = __float2half_rn(value);
    __half low = __float2half_rn(value - __half2float(high));
    return (uint32_t)__half_as_ushort(high) | (uint32_t)__half_as_ushort(low) << 16;
}

// The power of two that brings a row's largest value to 2^14, unless the row holds Inf or NaN.
struct Scale {
    int shift;
    bool unusual;
    float factor;

    __device__ Scale() {}
    __device__ explicit Scale(int largest) {
        unusual = largest >= 0x7F800000;
        shift = largest > 0 && !unusual ? min(141 - (largest >> 23), 126) : 0;
        factor = power_of_two(shift);
    }

    __device__ float operator()(float value) const { return unusual ? 0.0f : value * factor; }
};

// Positive for a scaled value that is too small for two halves, negative for others.
constexpr float NARROW = 0.125f;  // A scaled value under this loses bits.

__device__ __forceinline__ int balance_of(float value) { return value == 0 ? 0 : fabsf(value) < NARROW ? 1 : -1; }

__device__ __forceinline__ void store_four(const Operand& o, int row, int k, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    int64_t to = (int64_t)row * o.padded + k;
    *(uint2*)(o.high + to) = make_uint2((x & 0xFFFF) | y << 16, (z & 0xFFFF) | w << 16);
    *(uint2*)(o.low + to) = make_uint2(x >> 16 | (y & 0xFFFF0000), z >> 16 | (w & 0xFFFF0000));
}

__device__ __forceinline__ int split_four(const Operand& o, int row, int k, float4 v, const Scale& scale) {
    float x = scale(v.x), y = scale(v.y), z = scale(v.z), w = scale(v.w);
    store_four(o, row, k, halves(x), halves(y), halves(z), halves(w));
    return balance_of(x) + balance_of(y) + balance_of(z) + balance_of(w);
}

// The largest, or the sum, over the threads that share a row: a warp, or the block.
template <bool SUM>
__device__ int over_threads(int value, int count, int* shared) {
    for (int distance = 16; distance > 0; distance /= 2) {
        int other = __shfl_xor_sync(0xFFFFFFFF, value, distance);
        value = SUM ? value + other : max(value, other);
    }
    if (count == 32) return value;
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    value = shared[0];
    for (int warp = 1; warp < THREADS / 32; warp++) value = SUM ? value + shared[warp] : max(value, shared[warp]);
    return value;
}

// A whole row by `count` threads; what a thread can keep is read once.
template <int COUNT>
__device__ void split_row(const Operand& o, int row, int lane, int* shared) {
    const float* from = o.at(row);
    float4 kept[KEPT];
    int largest = 0;
#pragma unroll
    for (int i = 0; i < KEPT; i++) kept[i] = o.along(from, 4 * (i * COUNT + lane));
#pragma unroll
    for (int i = 0; i < KEPT; i++) largest = max(largest, bits(kept[i]));
#pragma unroll 4
    for (int k = 4 * (KEPT * COUNT + lane); k < o.length; k += 4 * COUNT) largest = max(largest, bits(o.along(from, k)));
    Scale scale(over_threads<false>(largest, COUNT, shared));
    int balance = 0;
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        int k = 4 * (i * COUNT + lane);
        if (k < o.padded) balance += split_four(o, row, k, kept[i], scale);
    }
#pragma unroll 4
    for (int k = 4 * (KEPT * COUNT + lane); k < o.padded; k += 4 * COUNT)
        balance += split_four(o, row, k, o.along(from, k), scale);
    balance = over_threads<true>(balance, COUNT, shared);
    if (lane == 0) {
        bool marked = scale.unusual || balance > 0;
        o.shifts[row] = scale.shift;
        o.marks[row] = marked;
        if (marked) atomicOr(o.flag, 1);
    }
}

__device__ __forceinline__ void add_marks(const Operand& o, int row, int balance) {
    if (balance != 0) atomicAdd(o.marks + row, balance);
    if (balance > 0) atomicOr(o.flag, 1);
}

// A span of a row, whose largest value is known in the second pass.
template <bool WRITE>
__device__ void split_span(const Operand& o, int block, int* shared) {
    int row = block / o.spans, first = block % o.spans * SPAN, last = min(first + SPAN, o.padded);
    const float* from = o.at(row);
    if (!WRITE) {
        int largest = 0;
#pragma unroll 8
        for (int k = first + 4 * threadIdx.x; k < last; k += 4 * THREADS) largest = max(largest, bits(o.along(from, k)));
        largest = over_threads<false>(largest, THREADS, shared);
        if (threadIdx.x == 0) atomicMax(o.largest + row, largest);
        return;
    }
    Scale scale(o.largest[row]);
    int balance = 0;
#pragma unroll 4
    for (int k = first + 4 * threadIdx.x; k < last; k += 4 * THREADS)
        balance += split_four(o, row, k, o.along(from, k), scale);
    balance = over_threads<true>(balance, THREADS, shared);
    if (threadIdx.x == 0) {
        o.shifts[row] = scale.shift;
        add_marks(o, row, balance + scale.unusual);
    }
}

// A span of 64 rows whose values lie side by side: each thread reads one value of four rows; tiles turn in shared memory.
template <bool WRITE>
__device__ void split_columns(const Operand& o, int block, int* shared) {
    constexpr int WIDTH = TILE + 1, QUADS = TILE / 4, DEEP = THREADS / QUADS;
    int groups = (o.rows + TILE - 1) / TILE, quad = threadIdx.x % QUADS, depth = threadIdx.x / QUADS;
    int row = block % groups * TILE, first = block / groups % o.spans * COLUMN_SPAN, batch = block / groups / o.spans;
    int last = min(first + COLUMN_SPAN, o.padded), mine = row + 4 * quad, base = batch * o.rows;
    const float* from = o.x + batch * o.stride_batch;
    int found[4] = {0, 0, 0, 0};
    Scale scale[4];
    if (!WRITE) {
#pragma unroll 8
        for (int k = first + depth; k < last; k += DEEP) {
            float4 v = o.across(from, mine, k);
            found[0] = max(found[0], bits(v.x)), found[1] = max(found[1], bits(v.y));
            found[2] = max(found[2], bits(v.z)), found[3] = max(found[3], bits(v.w));
        }
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) scale[j] = Scale(mine + j < o.rows ? o.largest[base + mine + j] : 0);
        for (int start = first; start < last; start += TILE) {
            float4 v[TILE / DEEP];
#pragma unroll
            for (int i = 0; i < TILE / DEEP; i++) v[i] = o.across(from, mine, start + depth + i * DEEP);
#pragma unroll
            for (int i = 0; i < TILE / DEEP; i++) {
                float x[4] = {scale[0](v[i].x), scale[1](v[i].y), scale[2](v[i].z), scale[3](v[i].w)};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    shared[(4 * quad + j) * WIDTH + depth + i * DEEP] = (int)halves(x[j]);
                    found[j] += balance_of(x[j]);
                }
            }
            __syncthreads();
            int k = start + 4 * quad;
#pragma unroll
            for (int i = 0; i < TILE / DEEP; i++) {
                int line = depth + i * DEEP;
                const int* p = shared + line * WIDTH + 4 * quad;
                if (row + line < o.rows && k < o.padded)
                    store_four(o, base + row + line, k, (uint32_t)p[0], (uint32_t)p[1], (uint32_t)p[2], (uint32_t)p[3]);
            }
            __syncthreads();
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) shared[depth * TILE + 4 * quad + j] = found[j];
    __syncthreads();
    int line = threadIdx.x;
    if (line >= TILE || row + line >= o.rows) return;
    int whole = shared[line];
    for (int i = 1; i < DEEP; i++) whole = WRITE ? whole + shared[i * TILE + line] : max(whole, shared[i * TILE + line]);
    if (!WRITE) {
        atomicMax(o.largest + base + row + line, whole);
    } else {
        Scale own(o.largest[base + row + line]);
        o.shifts[base + row + line] = own.shift;
        add_marks(o, base + row + line, whole + own.unusual);
    }
}

// Finds the largest values of rows that several blocks share. Blocks of the first operand come first.
extern "C" __global__ void __launch_bounds__(THREADS) find_largest(const __grid_constant__ Operands both) {
    __shared__ int shared[TILE * (TILE + 1)];
    wait_for_previous();
    int before = both.of[0].way >= SPANS ? both.of[0].blocks : 0, block = blockIdx.x;
    const Operand& o = both.of[block >= before];
    if (block >= before) block -= before;
    if (o.way == SPANS)
        split_span<false>(o, block, shared);
    else
        split_columns<false>(o, block, shared);
}

extern "C" __global__ void __launch_bounds__(THREADS) split_operands(const __grid_constant__ Operands both) {
    __shared__ int shared[TILE * (TILE + 1)];
    wait_for_previous();
    int block = blockIdx.x, before = both.of[0].blocks;
    const Operand& o = both.of[block >= before];
    if (block >= before) block -= before;
    if (o.way == WARPS) {
        int row = block * (THREADS / 32) + threadIdx.x / 32;
        if (row < o.all_rows) split_row<32>(o, row, threadIdx.x % 32, shared);
    } else if (o.way == BLOCKS) {
        split_row<THREADS>(o, block, threadIdx.x, shared);
    } else if (o.way == SPANS) {
        // Backwards: what the first pass read last is still in the cache.
        split_span<true>(o, o.blocks - 1 - block, shared);
    } else {
        split_columns<true>(o, o.blocks - 1 - block, shared);
    }
}

// Adds the slices of K; `size` is the output's.
extern "C" __global__ void __launch_bounds__(THREADS) add_slices(
    const float* parts, float* c, const __grid_constant__ Tensors tensors, int64_t size, int n, int slices) {
    wait_for_previous();
    int64_t at = 4 * ((int64_t)blockIdx.x * THREADS + threadIdx.x);
    if (size % 4 == 0 && at < size) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (int slice = 0; slice < slices; slice++) {
            float4 v = *(const float4*)(parts + slice * size + at);
            sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
        }
        float out[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int j = 0; j < 4; j++) out[j] = epilogue(out[j], at + j, (int)((at + j) % n), tensors);
        *(float4*)(c + at) = make_float4(out[0], out[1], out[2], out[3]);
    } else {
        for (int64_t one = at; one < at + 4 && one < size; one++) {
            float sum = 0;
            for (int slice = 0; slice < slices; slice++) sum += parts[slice * size + one];
            c[one] = epilogue(sum, one, (int)(one % n), tensors);
        }
    }
}

// Computes each tile that has a marked row or column again, with float32 multiply-adds.
extern "C" __global__ void __launch_bounds__(THREADS) repair(
    const __grid_constant__ Operands both, float* c, const __grid_constant__ Tensors tensors, int batches, int shared_b) {
    __shared__ float left[STEP][TILE + 4], right[STEP][TILE + 4];
    wait_for_previous();
    if (*both.of[0].flag == 0) return;
    const Operand &a = both.of[0], &b = both.of[1];
    int m = a.rows, n = b.rows, tiles_m = (m + TILE - 1) / TILE, tiles_n = (n + TILE - 1) / TILE;
    for (int64_t tile = blockIdx.x; tile < (int64_t)tiles_m * tiles_n * batches; tile += gridDim.x) {
        int batch = (int)(tile / ((int64_t)tiles_m * tiles_n)), inner = (int)(tile % ((int64_t)tiles_m * tiles_n));
        int row = inner / tiles_n * TILE, col = inner % tiles_n * TILE, base_a = batch * m, base_b = shared_b ? 0 : batch * n;
        const float *from_a = a.x + batch * a.stride_batch, *from_b = shared_b ? b.x : b.x + batch * b.stride_batch;
        int t = threadIdx.x;
        bool marked = (t < TILE && row + t < m && a.marks[base_a + row + t] > 0) ||
                      (t < TILE && col + t < n && b.marks[base_b + col + t] > 0);
        if (!__syncthreads_or(marked)) continue;
        float total[4][4] = {};
        for (int start = 0; start < a.length; start += STEP) {
#pragma unroll
            for (int i = 0; i < TILE * STEP / THREADS; i++) {
                // Neighbouring threads read neighbouring values.
                int e = t + i * THREADS;
                int k = a.way == COLUMNS ? e / TILE : e % STEP, line = a.way == COLUMNS ? e % TILE : e / STEP;
                bool inside = row + line < m && start + k < a.length;
                left[k][line] = inside ? from_a[(row + line) * a.stride_row + (start + k) * a.stride_k] : 0;
                k = b.way == COLUMNS ? e / TILE : e % STEP, line = b.way == COLUMNS ? e % TILE : e / STEP;
                inside = col + line < n && start + k < b.length;
                right[k][line] = inside ? from_b[(col + line) * b.stride_row + (start + k) * b.stride_k] : 0;
            }
            __syncthreads();
#pragma unroll
            for (int k = 0; k < STEP; k++)
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        total[i][j] = fmaf(left[k][t / 16 * 4 + i], right[k][t % 16 * 4 + j], total[i][j]);
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int r = row + t / 16 * 4 + i, s = col + t % 16 * 4 + j;
                int64_t at = ((int64_t)batch * m + r) * n + s;
                if (r < m && s < n) c[at] = epilogue(total[i][j], at, s, tensors);
            }
    }
}

// How one call is laid out: sizes as Python gives them, and where its parts lie in the workspace.
struct Sizes {
    int64_t batches, m, n, k, shared_b, slices, stride_a[3], stride_b[3], device;
};

struct Layout {
    int64_t high[2], low[2], flag, marks[2], largest[2], shifts[2], parts, end;

    explicit Layout(const Sizes& s) {
        int64_t rows[2] = {s.batches * s.m, (s.shared_b ? 1 : s.batches) * s.n}, padded = (s.k + BK - 1) / BK * BK;
        end = 0;
        for (int i = 0; i < 2; i++) high[i] = take(rows[i] * padded * 2), low[i] = take(rows[i] * padded * 2);
        flag = take(4);  // From here to `shifts` all is zero at first.
        for (int i = 0; i < 2; i++) marks[i] = take(rows[i] * 4), largest[i] = take(rows[i] * 4);
        for (int i = 0; i < 2; i++) shifts[i] = take(rows[i] * 4);
        parts = take(s.slices > 1 ? s.slices * s.batches * s.m * s.n * 4 : 0);
    }

    int64_t take(int64_t bytes) {
        int64_t at = end;
        end += (bytes + 255) / 256 * 256;
        return at;
    }
};

extern "C" int64_t workspace_bytes(const Sizes* sizes) { return Layout(*sizes).end; }

static Operand operand(const Sizes& s, const Layout& layout, int which, const float* x, char* work, int processors) {
    Operand o = {};
    const int64_t* strides = which ? s.stride_b : s.stride_a;
    int batches = which && s.shared_b ? 1 : (int)s.batches;
    o.x = x;
    o.high = (__half*)(work + layout.high[which]), o.low = (__half*)(work + layout.low[which]);
    o.marks = (int*)(work + layout.marks[which]), o.largest = (int*)(work + layout.largest[which]);
    o.shifts = (int*)(work + layout.shifts[which]), o.flag = (int*)(work + layout.flag);
    o.stride_batch = strides[0], o.stride_row = strides[1], o.stride_k = strides[2];
    o.rows = (int)(which ? s.n : s.m), o.all_rows = o.rows * batches, o.length = (int)s.k;
    o.padded = (o.length + BK - 1) / BK * BK;
    bool aligned = o.stride_batch % 4 == 0 && (uint64_t)x % 16 == 0;
    if (o.stride_k <= o.stride_row) {
        bool shared_rows = o.padded > (o.all_rows < processors ? SPAN : 8 * SPAN);
        o.way = shared_rows ? SPANS : o.padded <= 4 * KEPT * 32 ? WARPS : BLOCKS;
        o.spans = (o.padded + SPAN - 1) / SPAN;
        o.blocks = o.way == WARPS ? (o.all_rows + THREADS / 32 - 1) / (THREADS / 32) : o.all_rows * (shared_rows ? o.spans : 1);
        o.vector = aligned && o.stride_k == 1 && o.stride_row % 4 == 0 && o.length % 4 == 0;
    } else {
        o.way = COLUMNS;
        o.spans = (o.padded + COLUMN_SPAN - 1) / COLUMN_SPAN;
        o.blocks = (o.rows + TILE - 1) / TILE * o.spans * batches;
        o.vector = aligned && o.stride_row == 1 && o.stride_k % 4 == 0 && o.rows % 4 == 0;
    }
    return o;
}
