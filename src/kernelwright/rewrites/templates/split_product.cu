// Split product on Hopper: one warpgroup loads tiles through the tensor memory accelerator, two multiply with wgmma.
// Defined before this text: BN, BK, STAGES, CLUSTER, GROUP, `multiply`, one wgmma of 64 x BN x 16, and split_operands.cu.

constexpr int BM = 128;                      // 64 rows for each of two multiplying warpgroups.
constexpr int A_BYTES = BM * BK * 2;         // One half of A's tile.
constexpr int B_BYTES = BN * BK * 2;
constexpr int STAGE_BYTES = 2 * (A_BYTES + B_BYTES);
constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + 1024 + 16 * STAGES;

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(uint32_t bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}

__device__ __forceinline__ void barrier_expect(uint32_t bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t bar, int parity) {
    asm volatile(
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}"
        ::"r"(bar), "r"(parity) : "memory");
}

// Tells the loading warps of every block of the cluster that a stage may be overwritten.
__device__ __forceinline__ void barrier_release(uint32_t bar) {
    if (CLUSTER == 1) {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
    } else {
        for (int block = 0; block < CLUSTER; block++)
            asm volatile(
                "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
                "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar), "r"(block) : "memory");
    }
}

__device__ __forceinline__ void load(uint32_t to, const CUtensorMap* map, int k, int row, uint32_t bar, bool everywhere) {
    if (everywhere)
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
            "[%0], [%1, {%2, %3}], [%4], %5;"
            ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(bar), "h"((uint16_t)((1 << CLUSTER) - 1)) : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
            ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(bar) : "memory");
}

// Descriptor of a K-major tile whose rows of 2 * BK bytes are swizzled over as many bytes.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    constexpr uint64_t layout = BK == 64 ? 1 : 2, group = BK * 2 * 8 >> 4;
    return (uint64_t)((address & 0x3FFFF) >> 4) | (1ull << 16) | (group << 32) | (layout << 62);
}

__device__ __forceinline__ void cluster_sync() {
    if (CLUSTER == 1) {
        __syncthreads();
    } else {
        __syncwarp();
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
}

struct Place {
    int slice, batch, row, col, first, last;

    __device__ Place(int tile, int rank, int batches, int m, int n, int steps, int slices) {
        int tiles_m = (m + BM * CLUSTER - 1) / (BM * CLUSTER), tiles_n = (n + BN - 1) / BN, tiles = tiles_m * tiles_n;
        int inner = tile % tiles, outer = tile / tiles, per = (steps + slices - 1) / slices;
        int group = inner / (GROUP * tiles_n), within = inner % (GROUP * tiles_n), height = min(tiles_m - group * GROUP, GROUP);
        batch = outer % batches;
        slice = outer / batches;
        row = ((group * GROUP + within % height) * CLUSTER + rank) * BM;
        col = within / height * BN;
        first = slice * per;
        last = min(first + per, steps);
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1) split_product(
    const __grid_constant__ CUtensorMap a_high, const __grid_constant__ CUtensorMap a_low,
    const __grid_constant__ CUtensorMap b_high, const __grid_constant__ CUtensorMap b_low, float* c, const int* shifts_a,
    const int* shifts_b, const __grid_constant__ Tensors tensors, int batches, int m, int n, int steps, int slices,
    int shared_b, int tiles) {
    extern __shared__ uint8_t raw[];
    uint32_t base = (shared_address(raw) + 1023) & ~1023u;
    uint32_t full = base + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    int group = threadIdx.x / 128, rank = CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 8 * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    cluster_sync();
    wait_for_previous();
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            int count = 0;
            for (int tile = blockIdx.x / CLUSTER; tile < tiles; tile += gridDim.x / CLUSTER) {
                Place at(tile, rank, batches, m, n, steps, slices);
                int row = at.batch * m + at.row, col = (shared_b ? 0 : at.batch * n) + at.col + rank * (BN / CLUSTER);
                for (int step = at.first; step < at.last; step++, count++) {
                    int stage = count % STAGES;
                    uint32_t to = base + stage * STAGE_BYTES, bar = full + 8 * stage;
                    uint32_t to_b = to + 2 * A_BYTES + rank * (B_BYTES / CLUSTER);
                    barrier_wait(empty + 8 * stage, count / STAGES & 1 ^ 1);
                    barrier_expect(bar, STAGE_BYTES);
                    load(to, &a_high, step * BK, row, bar, false);
                    load(to_b + B_BYTES, &b_low, step * BK, col, bar, CLUSTER > 1);
                    load(to + A_BYTES, &a_low, step * BK, row, bar, false);
                    load(to_b, &b_high, step * BK, col, bar, CLUSTER > 1);
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, count = 0;
        float major[BN / 2], total[BN / 2];
        for (int tile = blockIdx.x / CLUSTER; tile < tiles; tile += gridDim.x / CLUSTER) {
            Place at(tile, rank, batches, m, n, steps, slices);
#pragma unroll
            for (int i = 0; i < BN / 2; i++) total[i] = 0;
            for (int step = at.first; step < at.last; step++, count++) {
                int stage = count % STAGES;
                uint32_t from = base + stage * STAGE_BYTES;
                uint64_t ah = descriptor(from + (group - 1) * (A_BYTES / 2)), al = ah + (A_BYTES >> 4);
                uint64_t bh = descriptor(from + 2 * A_BYTES), bl = bh + (B_BYTES >> 4);
                barrier_wait(full + 8 * stage, count / STAGES & 1);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                // The small products come first: the accumulator truncates relative to what it holds.
#pragma unroll
                for (int k = 0; k < BK / 16; k++) multiply(major, ah + 2 * k, bl + 2 * k, k > 0);
#pragma unroll
                for (int k = 0; k < BK / 16; k++) multiply(major, al + 2 * k, bh + 2 * k, 1);
#pragma unroll
                for (int k = 0; k < BK / 16; k++) multiply(major, ah + 2 * k, bh + 2 * k, 1);
                asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
                if (lane == 0) barrier_release(empty + 8 * stage);
#pragma unroll
                for (int i = 0; i < BN / 2; i++) total[i] += major[i];
            }
            __syncwarp();
            int top = at.row + (group - 1) * 64 + warp * 16 + lane / 4;
            const int* shift_of_col = shifts_b + (shared_b ? 0 : at.batch * n);
            float* out = c + ((size_t)at.slice * batches + at.batch) * m * n;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = top + 8 * half;
                if (row >= m) continue;
                int shift = shifts_a[at.batch * m + row];
                int64_t start = ((int64_t)at.batch * m + row) * n;
                float* line = out + (size_t)row * n;
#pragma unroll
                for (int j = 0; j < BN / 8; j++) {
                    int col = at.col + j * 8 + lane % 4 * 2;
                    if (col >= n) continue;
                    bool both = col + 1 < n;
                    int left_shift = shift_of_col[col], right_shift = both ? shift_of_col[col + 1] : 0;
                    float left = unscaled(total[4 * j + 2 * half], shift + left_shift);
                    float right = unscaled(total[4 * j + 2 * half + 1], shift + right_shift);
                    if (slices == 1) {
                        left = epilogue(left, start + col, col, tensors);
                        if (both) right = epilogue(right, start + col + 1, col + 1, tensors);
                    }
                    if (n % 2 == 0) {
                        *(float2*)(line + col) = make_float2(left, right);
                    } else {
                        line[col] = left;
                        if (both) line[col + 1] = right;
                    }
                }
            }
            __syncwarp();
        }
    }
    if (CLUSTER > 1) cluster_sync();  // A block's memory must outlast its neighbours' arrivals.
}

typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                           const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

template <class... Parameters, class... Arguments>
static cudaError_t start(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared, void* stream, bool overlap,
                         Arguments... arguments) {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = (cudaStream_t)stream;
    config.attrs = &attribute;
    config.numAttrs = overlap;
    return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

enum Stage { SET_UP = 1, SPLIT, TENSOR_MAPS, PRODUCT, SUM, REPAIR };

constexpr int MOST_DEVICES = 64;

// What is set once for each device.
static cudaError_t set_up(int device, Encode& encode, int& processors) {
    static Encode found_encode = nullptr;
    static int found[MOST_DEVICES] = {};
    if (device < 0 || device >= MOST_DEVICES) return cudaErrorInvalidDevice;
    if (!found[device]) {
        cudaDriverEntryPointQueryResult result;
        int count;
        cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&found_encode, 12000,
                                                              cudaEnableDefault, &result);
        if (status == cudaSuccess && !found_encode) status = cudaErrorNotSupported;
        if (status == cudaSuccess) status = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
        if (status == cudaSuccess)
            status = cudaFuncSetAttribute(split_product, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
        if (status != cudaSuccess) return status;
        found[device] = count;
    }
    encode = found_encode;
    processors = found[device];
    return cudaSuccess;
}

// Launches all kernels of one call on a stream; zero, or a stage times 65,536 plus the number of the error.
static int launch_all(const float* x, const float* y, float* c, char* work, const Sizes& s, const Tensors& tensors, void* stream) {
    Encode encode;
    int processors;
    cudaError_t status = set_up((int)s.device, encode, processors);
    if (status != cudaSuccess) return SET_UP << 16 | status;
    Layout layout(s);
    Operands both = {{operand(s, layout, 0, x, work, processors), operand(s, layout, 1, y, work, processors)}};
    const Operand &a = both.of[0], &b = both.of[1];
    status = cudaMemsetAsync(work + layout.flag, 0, layout.shifts[0] - layout.flag, (cudaStream_t)stream);
    int shared_rows = (a.way >= SPANS ? a.blocks : 0) + (b.way >= SPANS ? b.blocks : 0);
    if (status == cudaSuccess && shared_rows) status = start(find_largest, shared_rows, THREADS, 0, stream, false, both);
    if (status == cudaSuccess) status = start(split_operands, a.blocks + b.blocks, THREADS, 0, stream, shared_rows > 0, both);
    if (status != cudaSuccess) return SPLIT << 16 | status;

    CUtensorMap maps[4];
    for (int i = 0; i < 4; i++) {
        const Operand& o = both.of[i / 2];
        cuuint64_t sizes[2] = {(cuuint64_t)o.padded, (cuuint64_t)o.all_rows}, stride[1] = {(cuuint64_t)o.padded * 2};
        cuuint32_t box[2] = {BK, (cuuint32_t)(i < 2 ? BM : BN / CLUSTER)}, ones[2] = {1, 1};
        CUresult result = encode(&maps[i], CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, i % 2 ? o.low : o.high, sizes, stride, box,
                                 ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 BK == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if (result != CUDA_SUCCESS) return TENSOR_MAPS << 16 | (int)result;
    }
    int m = a.rows, n = b.rows, batches = (int)s.batches, slices = (int)s.slices, shared_b = (int)s.shared_b;
    int tiles = (m + BM * CLUSTER - 1) / (BM * CLUSTER) * ((n + BN - 1) / BN) * batches * slices;
    int blocks = min(tiles, processors / CLUSTER) * CLUSTER;
    float* out = slices > 1 ? (float*)(work + layout.parts) : c;
    status = start(split_product, blocks, 384, SHARED_BYTES, stream, true, maps[0], maps[1], maps[2], maps[3], out, a.shifts,
                   b.shifts, tensors, batches, m, n, a.padded / BK, slices, shared_b, tiles);
    if (status != cudaSuccess) return PRODUCT << 16 | status;
    if (slices > 1) {
        int64_t size = s.batches * s.m * s.n;
        status = start(add_slices, (size + 4 * THREADS - 1) / (4 * THREADS), THREADS, 0, stream, true, out, c, tensors, size, n,
                       slices);
        if (status != cudaSuccess) return SUM << 16 | status;
    }
    int64_t repaired = (s.m + TILE - 1) / TILE * ((s.n + TILE - 1) / TILE) * s.batches;
    status = start(repair, repaired < 2 * processors ? repaired : 2 * processors, THREADS, 0, stream, true, both, c, tensors,
                   batches, shared_b);
    return status == cudaSuccess ? 0 : REPAIR << 16 | status;
}

extern "C" int launch(const float* x, const float* y, float* c, char* work, const Sizes* sizes, void* stream,
                      const float* tensor0, const float* tensor1, const float* tensor2, const float* tensor3) {
    int device;
    cudaError_t status = cudaGetDevice(&device);
    bool other = status == cudaSuccess && device != sizes->device;
    if (other) status = cudaSetDevice((int)sizes->device);
    if (status != cudaSuccess) return SET_UP << 16 | status;
    int result = launch_all(x, y, c, work, *sizes, {{tensor0, tensor1, tensor2, tensor3}}, stream);
    if (other) cudaSetDevice(device);
    return result;
}
