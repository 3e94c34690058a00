
template <int QUADS>
cudaError_t launched(const Call& call, int cells, cudaStream_t stream) {
    const int bytes = BATCH * (2 * QUADS + STATE_QUADS) * SLICES * (int)sizeof(float4);
    cudaError_t error = cudaFuncSetAttribute(recurrent<QUADS>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute together;
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(HIDDEN / UNITS, cells);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &together;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, recurrent<QUADS>, call);
}

extern "C" int unwritten(void* out, int64_t bytes, void* stream) {
    return cudaMemsetAsync(out, 0xFF, bytes, (cudaStream_t)stream);
}

// Runs cells, at once or behind one another; a CUDA error, or 0.
extern "C" int launch(const Call* call, int cells, int narrow, void* stream) {
    return narrow ? launched<NARROW_QUADS>(*call, cells, (cudaStream_t)stream)
                  : launched<WIDE_QUADS>(*call, cells, (cudaStream_t)stream);
}
