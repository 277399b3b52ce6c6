#include "cuda/delta_promote.h"
#include "cuda/math.cuh"

namespace dfl::cuda {
namespace {

constexpr int MAX_PATH = 256;       // nodes of an accepted path
constexpr int PROMOTED_VALUES = 64; // rows of the state that a block advances
constexpr int PATH = 16;            // nodes of a path that shared memory holds at a time
constexpr int PROMOTION_THREADS = 256;

// Advances states and convolution inputs. A block advances 64 rows of one head's state, or copies
// one input of a convolution.
template <int D>
__global__ void __launch_bounds__(PROMOTION_THREADS)
    promote_states(const DeltaPromotion work, int n_state_blocks) {
    static_assert(D == 128, "a warp reads one row of the state, 4 values a lane");
    __shared__ __align__(16) float keys[PATH][D], us[PATH][PROMOTED_VALUES];
    __shared__ float log_decays[MAX_PATH], decays[PATH];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    constexpr int N_ROWS = PROMOTED_VALUES / (PROMOTION_THREADS / 32);

    if (static_cast<int>(blockIdx.x) >= n_state_blocks) {
        const int x = blockIdx.x - n_state_blocks, input = x % work.n_inputs;
        const int sequence = x / work.n_inputs % work.n_sequences;
        const int64_t layer = x / work.n_inputs / work.n_sequences;
        if (work.counts[sequence] == 0) {
            return;
        }
        const int64_t slot = work.slots != nullptr ? work.slots[sequence] : sequence;
        const int64_t row = work.conv_rows[sequence * work.n_inputs + input];
        const float * from =
            work.conv_updates + layer * work.conv_update_layer + row * work.channels;
        float * to = work.conv + layer * work.conv_layer + slot * work.conv_slot +
                     static_cast<int64_t>(input) * work.channels;
        for (int c = thread * 4; c < work.channels; c += PROMOTION_THREADS * 4) {
            *reinterpret_cast<float4 *>(to + c) = quad(from + c);
        }
        return;
    }
    constexpr int PARTS = D / PROMOTED_VALUES;
    const int part = blockIdx.x % PARTS, head = blockIdx.x / PARTS % work.n_v;
    const int sequence = blockIdx.x / PARTS / work.n_v % work.n_sequences;
    const int64_t layer = blockIdx.x / PARTS / work.n_v / work.n_sequences;
    const int n = work.counts[sequence];
    if (n == 0) {
        return;
    }
    const int64_t slot = work.slots != nullptr ? work.slots[sequence] : sequence;
    float * state = work.state + layer * work.state_layer + slot * work.state_slot +
                    (static_cast<int64_t>(head) * D + part * PROMOTED_VALUES + warp * N_ROWS) * D +
                    lane * 4;
    float4 rows[N_ROWS];
#pragma unroll
    for (int r = 0; r < N_ROWS; ++r) {
        rows[r] = quad(state + r * D);
    }
    const int32_t * path = work.path + sequence * work.max_path;
    const auto update = [&](int j) {
        return work.updates + layer * work.update_layer + path[j] * work.update_row;
    };
    for (int j = thread; j < n; j += PROMOTION_THREADS) {
        log_decays[j] = update(j)[D * (work.n_k + work.n_v) + head];
    }
    __syncthreads();
    float sum = 0; // G of the last node
    for (int j = n - 1; j >= 0; --j) {
        sum += log_decays[j];
    }
    const float path_decay = exponential(sum);
#pragma unroll
    for (int r = 0; r < N_ROWS; ++r) {
        rows[r].x *= path_decay, rows[r].y *= path_decay;
        rows[r].z *= path_decay, rows[r].w *= path_decay;
    }
    for (int first = 0; first < n; first += PATH) {
        const int count = min(PATH, n - first);
        if (thread < count) {
            float log_decay = 0;
            for (int j = n - 1; j > first + thread; --j) {
                log_decay += log_decays[j];
            }
            decays[thread] = exponential(log_decay);
        }
        for (int x = thread; x < count * (D / 4); x += PROMOTION_THREADS) {
            const int j = x / (D / 4), value = x % (D / 4) * 4;
            *reinterpret_cast<float4 *>(&keys[j][value]) =
                quad(update(first + j) + head % work.n_k * D + value);
        }
        for (int x = thread; x < count * (PROMOTED_VALUES / 4); x += PROMOTION_THREADS) {
            const int j = x / (PROMOTED_VALUES / 4), value = x % (PROMOTED_VALUES / 4) * 4;
            *reinterpret_cast<float4 *>(&us[j][value]) =
                quad(update(first + j) + (work.n_k + head) * D + part * PROMOTED_VALUES + value);
        }
        __syncthreads();
        for (int j = 0; j < count; ++j) {
            float4 key = quad(&keys[j][lane * 4]);
            const float decay = decays[j];
            key.x *= decay, key.y *= decay, key.z *= decay, key.w *= decay;
            float u[N_ROWS];
            load(&us[j][warp * N_ROWS], u);
#pragma unroll
            for (int r = 0; r < N_ROWS; ++r) {
                rows[r].x = fmaf(u[r], key.x, rows[r].x);
                rows[r].y = fmaf(u[r], key.y, rows[r].y);
                rows[r].z = fmaf(u[r], key.z, rows[r].z);
                rows[r].w = fmaf(u[r], key.w, rows[r].w);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < N_ROWS; ++r) {
        *reinterpret_cast<float4 *>(state + r * D) = rows[r];
    }
}

constexpr int D = HEAD_SIZE;

} // namespace

cudaError_t delta_promote(const DeltaPromotion & work, cudaStream_t stream) {
    const int n_state_blocks = work.n_layers * work.n_sequences * work.n_v * (D / PROMOTED_VALUES);
    const int n_copies = work.n_layers * work.n_sequences * work.n_inputs;
    promote_states<D>
        <<<n_state_blocks + n_copies, PROMOTION_THREADS, 0, stream>>>(work, n_state_blocks);
    return cudaGetLastError();
}

} // namespace dfl::cuda
