// A recurrent layer, or a stack of them, in one kernel whose thread blocks stay for all time steps.
//
// A *cell* is one direction of one layer. UNITS of its hidden units belong to a block, SLICES threads to a unit; a thread keeps
// its part of the unit's weights in registers for the whole sequence. Each step a block multiplies the cell's input, then the
// previous hidden state, adds up over its slices, and writes the new hidden state of its units to `out`.
//
// `out` is also how blocks wait for one another: it is filled with UNWRITTEN before the launch, each value is written once, and
// who reads one asks again until it is there. So the cells of a stack follow one another by a step, and no barrier is needed.
// All blocks of a launch have to run at once, which a cooperative launch makes sure of. A result that is NaN with the very
// bits of UNWRITTEN is written as another NaN.
#include <cstdint>

constexpr int THREADS = UNITS * SLICES;
constexpr int STATE_QUADS = (HIDDEN + 4 * SLICES - 1) / (4 * SLICES);  // float4 of a state that a thread multiplies.
constexpr int SUMS = 4;                 // Of an LSTM one for each gate; of a GRU those of two gates, and both parts of the new state.
constexpr int MOST_CELLS = 24;
constexpr unsigned UNWRITTEN = 0xFFFFFFFFu, OTHER_NAN = 0x7FFFFFFFu;
constexpr unsigned MOST_LOOKS = 1u << 24;  // Some ten seconds: whoever waits so long waits for a block that is gone.

struct Cell {
    const float *input_weight, *state_weight, *input_bias, *state_bias, *first_state, *first_memory;
    float *last_state, *last_memory;
    const float* x;
    float* out;                          // steps x BATCH x width, at the cell's first column.
    int64_t x_step, x_sequence, inputs;  // Strides of x, and its columns.
    int64_t follows, reversed;           // Whether another cell of the launch writes x; whether time runs backwards.
};

struct Call {
    int64_t steps, width;
    Cell cells[MOST_CELLS];
};

__device__ __forceinline__ bool complete(uint4 v) {
    return v.x != UNWRITTEN && v.y != UNWRITTEN && v.z != UNWRITTEN && v.w != UNWRITTEN;
}

__device__ __forceinline__ float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ void add_product(float& sum, float4 a, float4 b) {
    sum = fmaf(a.x, b.x, sum);
    sum = fmaf(a.y, b.y, sum);
    sum = fmaf(a.z, b.z, sum);
    sum = fmaf(a.w, b.w, sum);
}

// Brings BATCH rows, each QUADS x SLICES float4 wide there, to shared memory.
template <int QUADS>
struct Rows {
    static constexpr int WIDTH = QUADS * SLICES, EACH = (BATCH * WIDTH + THREADS - 1) / THREADS;
    const float* from;
    int64_t stride;
    int quads;

    template <class Visit>
    __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
        for (int index = 0; index < EACH; ++index) {
            const int at = threadIdx.x + index * THREADS, row = at / WIDTH, column = at % WIDTH;
            if (row < BATCH && column < quads) visit(index, at, from + row * stride + 4 * column);
        }
    }

    // Copies what is there while the thread goes on; `settle` looks at it.
    __device__ __forceinline__ void copy(float4* to) const {
        each([&](int, int at, const float* source) { copy_quad(to + at, source); });
    }

    // Waits until all that this thread has copied is written, where another block writes it.
    __device__ __forceinline__ void settle(bool wait, float4* to) const {
        copies_done();
        if (!wait) return;
        each([&](int, int at, const float* source) {
            const float4 v = to[at];
            const uint4 bits = {as_bits(v.x), as_bits(v.y), as_bits(v.z), as_bits(v.w)};
            if (!complete(bits)) to[at] = awaited(bits, source);
        });
    }

    // The same without copying ahead: all rows are asked for before the first one is waited for.
    __device__ __forceinline__ void bring(bool wait, float4* to) const {
        uint4 values[EACH];
        each([&](int index, int, const float* source) { values[index] = read_shared_quad(source); });
        each([&](int index, int at, const float* source) { to[at] = wait ? awaited(values[index], source) : as_floats(values[index]); });
    }

    __device__ __forceinline__ static float4 as_floats(uint4 v) {
        return make_float4(as_float(v.x), as_float(v.y), as_float(v.z), as_float(v.w));
    }

    __device__ __forceinline__ static float4 awaited(uint4 v, const float* source) {
        for (unsigned looks = 0; !complete(v); ++looks) {
            if (looks == MOST_LOOKS) give_up();
            v = read_shared_quad(source);
        }
        return as_floats(v);
    }
};

// Adds rows x weights to the sums; of a GRU the state's part of the new state has a sum of its own.
template <int QUADS, bool OF_STATE>
__device__ __forceinline__ void multiply(const float4* rows, const float4 (&weights)[GATES][QUADS], int slice,
                                         float (&sums)[SUMS][BATCH]) {
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) {
#pragma unroll
        for (int row = 0; row < BATCH; ++row) {
            const float4 v = rows[(row * QUADS + quad) * SLICES + slice];
#pragma unroll
            for (int gate = 0; gate < GATES; ++gate)
                add_product(sums[GATES == 3 && OF_STATE && gate == 2 ? 3 : gate][row], v, weights[gate][quad]);
        }
    }
#pragma unroll
    for (int which = 0; which < SUMS; ++which) {
#pragma unroll
        for (int row = 0; row < BATCH; ++row) COMPUTED_HERE(sums[which][row]);
    }
}

// Adds the slices' sums, so that each thread of a unit has those of one row, in place 0; which row that is, or -1.
__device__ __forceinline__ int row_of(int slice) {
    int row = 0, count = BATCH;
    for (int bit = SLICES / 2, size = BATCH; bit; bit /= 2, size = (size + 1) / 2) {
        const int half = (size + 1) / 2;
        if (slice & bit) {
            row += half;
            count -= half;
        } else if (count > half) {
            count = half;
        }
    }
    return count > 0 ? row : -1;
}

template <int BIT, int SIZE>
__device__ __forceinline__ void fold(float (&sums)[SUMS][BATCH], int slice) {
    if constexpr (BIT > 0) {
        constexpr int HALF = (SIZE + 1) / 2;
        const bool upper = slice & BIT;
#pragma unroll
        for (int which = 0; which < SUMS; ++which) {
#pragma unroll
            for (int row = 0; row < HALF; ++row) {
                const float low = sums[which][row], high = row + HALF < SIZE ? sums[which][row + HALF] : 0.0f;
                sums[which][row] = (upper ? high : low) + from_other_lane(upper ? low : high, BIT);
            }
        }
        fold<BIT / 2, HALF>(sums, slice);
    }
}

template <int QUADS>
__global__ void __launch_bounds__(THREADS, 1) recurrent(const __grid_constant__ Call call) {
    SHARED_QUADS(shared);
    constexpr int INPUT_ROWS = BATCH * QUADS * SLICES, STATE_ROWS = BATCH * STATE_QUADS * SLICES;
    float4 *input_rows = shared, *state_rows = shared + 2 * INPUT_ROWS;
    const Cell& cell = call.cells[blockIdx.y];
    const int slice = threadIdx.x % SLICES, unit = blockIdx.x * UNITS + threadIdx.x / SLICES;
    const int quads = (int)cell.inputs / 4, steps = (int)call.steps;
    const float4 zero = make_float4(0, 0, 0, 0);

    float4 input_weights[GATES][QUADS], state_weights[GATES][STATE_QUADS];
    float bias[SUMS] = {0, 0, 0, 0};
#pragma unroll
    for (int gate = 0; gate < GATES; ++gate) {
        const int64_t row = (int64_t)gate * HIDDEN + unit;
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
            const int at = quad * SLICES + slice;
            input_weights[gate][quad] = at < quads ? ((const float4*)(cell.input_weight + row * cell.inputs))[at] : zero;
        }
#pragma unroll
        for (int quad = 0; quad < STATE_QUADS; ++quad) {
            const int at = quad * SLICES + slice;
            state_weights[gate][quad] = at < HIDDEN / 4 ? ((const float4*)(cell.state_weight + row * HIDDEN))[at] : zero;
        }
        if (cell.input_bias) {
            bias[gate] += cell.input_bias[row];
            bias[GATES == 3 && gate == 2 ? 3 : gate] += cell.state_bias[row];
        }
    }
    // Columns beyond the last stay 0.
    for (int at = threadIdx.x; at < 2 * INPUT_ROWS + STATE_ROWS; at += THREADS) shared[at] = zero;

    const int row = row_of(slice);
    const int64_t place = (int64_t)row * HIDDEN + unit;
    float state = row < 0 ? 0.0f : cell.first_state[place];
    float memory = row < 0 || GATES == 3 ? 0.0f : cell.first_memory[place];
    const int64_t stride = call.width, step_stride = BATCH * stride;
    auto position = [&](int step) -> int64_t { return cell.reversed ? steps - 1 - step : step; };
    auto input = [&](int step) { return Rows<QUADS>{cell.x + position(step) * cell.x_step, cell.x_sequence, quads}; };

    all_threads_here();
    input(0).copy(input_rows);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        float4* here = input_rows + step % 2 * INPUT_ROWS;
        input(step).settle(cell.follows, here);
        all_threads_here();
        if (step + 1 < steps) input(step + 1).copy(input_rows + (step + 1) % 2 * INPUT_ROWS);
        float sums[SUMS][BATCH] = {};
        multiply<QUADS, false>(here, input_weights, slice, sums);
        const float* before = step ? cell.out + position(step - 1) * step_stride : cell.first_state;
        Rows<STATE_QUADS>{before, step ? stride : HIDDEN, HIDDEN / 4}.bring(step > 0, state_rows);
        all_threads_here();
        multiply<STATE_QUADS, true>(state_rows, state_weights, slice, sums);
        fold<SLICES / 2, BATCH>(sums, slice);
        if (row >= 0) {
            const float first = sums[0][0] + bias[0], second = sums[1][0] + bias[1];
            const float third = sums[2][0] + bias[2], fourth = sums[3][0] + bias[3];
            if (GATES == 4) {
                memory = logistic(second) * memory + logistic(first) * tanhf(third);
                state = logistic(fourth) * tanhf(memory);
            } else {
                const float fresh = tanhf(third + logistic(first) * fourth), kept = logistic(second);
                state = (1.0f - kept) * fresh + kept * state;
            }
            write_shared(cell.out + position(step) * step_stride + row * stride + unit,
                         as_bits(state) == UNWRITTEN ? as_float(OTHER_NAN) : state);
        }
        one_warp_here();  // Who has a result writes it before others of the warp wait for the next input.
    }
    if (row >= 0) {
        cell.last_state[place] = state;
        if (GATES == 4) cell.last_memory[place] = memory;
    }
}
